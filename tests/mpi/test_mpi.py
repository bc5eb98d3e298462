"""The engine over real MPI, on however many ranks this was started with."""

import signal
import subprocess
import time

import numpy as np
import psutil
import pytest

from fedmpi.transport.endpoint import FrameError
from fedmpi.transport.mpi import MpiEndpoint, insist, library
from fedmpi.wire.frame import FRAMING
from fedmpi.wire.messages import Model, PlainInput, Stop

pytestmark = pytest.mark.mpi(min_size=2)
WAIT = 60  # seconds; a rank that waits longer has lost its peer


EARLY = []  # messages of a kind that nobody asked for yet


def take(endpoint, kind):
    """The next message of a kind: a rank that is already at the barrier must not disturb one that is not."""
    for index, (_, message) in enumerate(EARLY):
        if isinstance(message, kind):
            return EARLY.pop(index)
    while True:
        arrived = endpoint.poll(WAIT)
        assert arrived is not None, f"rank {endpoint.rank} waited {WAIT} s for {kind.__name__}"
        if isinstance(arrived[1], kind):
            return arrived
        EARLY.append(arrived)


def everybody(endpoint):
    """A barrier made of messages, so that one test's traffic cannot reach the next."""
    if endpoint.rank:
        endpoint.send(0, Stop())
        take(endpoint, Stop)
    else:
        for _ in range(1, endpoint.size):
            take(endpoint, Stop)
        for rank in range(1, endpoint.size):
            endpoint.send(rank, Stop())
    endpoint.flush(WAIT)


@pytest.mark.parametrize("chunk", [1 << 30, 1 << 16, 1000])
def test_messages_of_every_size_arrive_whole(chunk):
    endpoint = MpiEndpoint(chunk)
    sizes = [0, 1, 999, 1000 - FRAMING - 4, 70_000, 3_000_000]
    if endpoint.rank:
        for number, size in enumerate(sizes):
            endpoint.send(0, PlainInput(number, endpoint.rank, b"", bytes([endpoint.rank]) * size))
        endpoint.flush(WAIT)
        assert endpoint.bytes_given == endpoint.ledger.bytes_given() == sum(FRAMING + 4 + size for size in sizes)
    else:
        seen = {rank: [] for rank in range(1, endpoint.size)}
        for _ in range(len(sizes) * (endpoint.size - 1)):
            source, message = take(endpoint, PlainInput)
            assert message.party == source and set(message.values) <= {source}
            seen[source].append((message.round, len(message.values)))
        assert all(got == list(enumerate(sizes)) for got in seen.values()), "in the order in which they were sent"
    everybody(endpoint)


def test_a_model_reaches_every_rank_bit_for_bit():
    endpoint = MpiEndpoint()
    theta = np.random.default_rng(0).standard_normal(270_000).astype(np.float32)
    if endpoint.rank == 0:
        for rank in range(1, endpoint.size):
            endpoint.send(rank, Model(1, rank, theta))
        endpoint.flush(WAIT)
    else:
        _, message = take(endpoint, Model)
        assert message.theta.tobytes() == theta.tobytes() and message.party == endpoint.rank
    everybody(endpoint)


def test_an_idle_rank_sleeps_and_gives_up_at_its_deadline():
    endpoint = MpiEndpoint()
    everybody(endpoint)
    patience = 3.0 if endpoint.rank else 1.0  # rank 0 first: whoever is done reports to it
    wall, cpu = time.monotonic(), time.process_time()
    assert endpoint.poll(patience) is None
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    assert wall >= patience and cpu < wall / 4
    everybody(endpoint)


def test_two_ranks_may_send_to_each_other_at_once():
    """Large blocking sends in both directions would wait for each other for ever."""
    endpoint = MpiEndpoint()
    peer = endpoint.rank ^ 1
    if peer < endpoint.size:
        endpoint.send(peer, PlainInput(0, 0, b"", bytes(5_000_000)))
        _, message = take(endpoint, PlainInput)
        assert len(message.values) == 5_000_000
        endpoint.flush(WAIT)
    everybody(endpoint)


class Most:
    def payload(self, source, kind):
        return 1000

    def largest(self, source):
        return 1000


def test_a_message_that_is_too_large_is_let_in_without_a_place_for_it():
    """And it is the sender's alone: whoever else speaks is heard before and after, and it can end as it should."""
    endpoint, size = MpiEndpoint(), 200_000_000
    if endpoint.rank == 1:
        endpoint._post(0, np.zeros(size, np.uint8).data)
        endpoint.flush(WAIT)
    elif endpoint.rank > 1:
        endpoint.send(0, PlainInput(1, endpoint.rank, b"", b"x"))
    else:
        endpoint.limits, before = Most(), psutil.Process().memory_info().rss
        heard, lost = set(), 0
        while len(heard) < endpoint.size - 2 or not lost:
            try:
                heard.add(take(endpoint, PlainInput)[0])
            except FrameError as error:
                assert error.source == 1 and error.lost and f"message of {size} bytes, at most 1020" in str(error)
                lost += 1
                endpoint.mute(1)
        assert heard == set(range(2, endpoint.size)) and lost == 1
        while endpoint._sunk:
            endpoint._unsent()
        assert psutil.Process().memory_info().rss - before < size / 4
        endpoint.muted.clear()
        endpoint.limits = None
    everybody(endpoint)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--support own",
        "--aggregation secure --dropout 0.2",
        "--method centaur --sampling 0.7 --min-cohort 1",
        "--preset demo-recsys --method fedmmf-lr --items 40 --ratings 300 --support own",
        "--preset demo-recsys --method fedmf --items 40 --ratings 300 --graph complete --aggregation hybrid --clear-parties 1,4",
    ],
)
def test_a_run_gives_the_model_that_the_in_memory_transport_gives(flags, make_config, run_in_memory, tmp_path):
    from fedmpi.report.terminal import Terminal
    from fedmpi.runtime.rank import run_client
    from fedmpi.runtime.server import run_server
    from fedmpi.runtime.start import start_run

    endpoint = MpiEndpoint()
    config = make_config(f"--parties 8 --min-cohort 3 {flags}")
    if endpoint.rank:
        assert run_client(endpoint, config) == 0
        take(endpoint, Stop)  # the server still listens to the others: nothing may be sent to it before it says so
    else:
        over_mpi = run_server(endpoint, *start_run(config, endpoint.size, library(), Terminal()))
        in_memory = run_in_memory(make_config(f"--parties 8 --min-cohort 3 {flags}"), 3)
        assert over_mpi["model_sha256"] == in_memory["model_sha256"]
        assert over_mpi["bytes_up"]["logical"] == in_memory["bytes_up"]["logical"]
        assert over_mpi["ranks"] == endpoint.size
        for rank in range(1, endpoint.size):
            endpoint.send(rank, Stop())
        endpoint.flush(WAIT)


def test_a_launcher_that_does_not_end_is_made_to():
    stubborn = subprocess.Popen(["sh", "-c", "trap '' TERM; while true; do sleep 1; done"])
    insist(stubborn.pid, patience=1)
    assert stubborn.wait(WAIT) == -signal.SIGKILL
