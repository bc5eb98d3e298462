"""The relay of tests/relay.py, on which the link model is held against reality: it is no faster than the link, and a job over it is one."""

import json
import os
import subprocess
import sys

import pytest
from relay import MTU, ShapedHosts, Way
from three_hosts import BIN, SBIN, Missing

from fedmpi.bill.links import PROFILES, Link
from fedmpi.cli import resolve

# ---- a way, without a clock ----


def test_a_packet_waits_for_the_one_before_it_and_takes_its_length_and_the_latency():
    way = Way(rate=8e6, latency=0.1)  # a byte a microsecond
    assert way.deliver(1000, 5.0) == pytest.approx(5.101)
    assert way.deliver(500, 5.0) == pytest.approx(5.1015), "behind the first"
    assert way.deliver(500, 6.0) == pytest.approx(6.1005), "nothing is saved up while nothing is sent"
    assert (way.packets, way.bytes, way.dropped) == (3, 2000, 0)


def test_a_full_queue_drops_and_then_goes_on():
    way = Way(rate=8e6, latency=0.0)
    arrivals = [way.deliver(MTU, 0.0) for _ in range(1000)]
    kept = [arrival for arrival in arrivals if arrival is not None]
    assert way.dropped == 1000 - len(kept) and len(kept) * MTU == pytest.approx(way.queue, abs=MTU)
    assert kept == sorted(kept) and kept[-1] == pytest.approx(len(kept) * MTU * 1e-6)
    assert way.deliver(MTU, kept[-1]) is not None


def test_jitter_is_of_a_burst_never_negative_and_overtakes_nobody():
    way = Way(rate=8e9, latency=0.01, jitter=0.02, seed=3)
    bursts = [[way.deliver(100, start + n * 1e-4) for n in range(5)] for start in range(2000)]
    delays = [burst[0] - start for start, burst in enumerate(bursts)]
    assert min(delays) >= 0.01
    assert sum(delays) / len(delays) == pytest.approx(0.03, rel=0.1), "exponential, so the mean is latency and jitter"
    arrivals = [arrival for burst in bursts for arrival in burst]
    assert arrivals == sorted(arrivals)
    for start, burst in zip(range(2000), bursts, strict=True):
        delay = [arrival - start - n * 1e-4 for n, arrival in enumerate(burst)]
        assert delay == pytest.approx([delay[0]] * 5, abs=1e-6), "packets that follow closely have the same"


# ---- real packets ----

SHORT = Link("short", up=8e6, down=16e6, latency=0.05)
COUNT, LIMIT = 400_000, 60  # bytes, seconds
# Sends COUNT bytes to whoever connects first; takes as many from the second.
SERVER = f"""
import socket
with socket.create_server(("10.77.0.1", 5000)) as server:
    print("up", flush=True)
    with server.accept()[0] as peer:
        peer.recv(1)
        peer.sendall(bytes({COUNT}))
    with server.accept()[0] as peer:
        taken = 0
        while taken < {COUNT}:
            taken += len(peer.recv(1 << 16))
        peer.sendall(b"!")
"""
CLIENT = f"""
import socket, time
with socket.create_connection(("10.77.0.1", 5000)) as server:
    began, taken = time.monotonic(), 0
    server.sendall(b"?")
    while taken < {COUNT}:
        taken += len(server.recv(1 << 16))
    print(time.monotonic() - began)
with socket.create_connection(("10.77.0.1", 5000)) as server:
    began = time.monotonic()
    server.sendall(bytes({COUNT}))
    server.recv(1)
    print(time.monotonic() - began)
"""


@pytest.fixture
def shaped(tmp_path_factory):
    """Hosts with these links; gone at the end, whatever happens."""
    made = []

    def make(*arguments, **options):
        try:
            made.append(ShapedHosts(tmp_path_factory.mktemp("shaped"), *arguments, **options))
        except Missing as missing:
            pytest.skip(str(missing))
        return made[-1]

    yield make
    for hosts in made:
        hosts.stop()


def python(hosts, name, script):
    return hosts.popen(name, [sys.executable, "-c", script], dict(os.environ), stdout=subprocess.PIPE, text=True)


@pytest.mark.netns
@pytest.mark.launch
@pytest.mark.slow
def test_bytes_take_their_length_over_the_bandwidth_and_the_latency_and_no_less(shaped):
    hosts = shaped({"host1": SHORT})
    server = python(hosts, "host0", SERVER)
    assert server.stdout.readline() == "up\n"
    said = python(hosts, "host1", CLIENT).communicate(timeout=LIMIT)[0]
    down, up = map(float, said.split())
    for took, rate in ((down, SHORT.down), (up, SHORT.up)):
        least = 2 * SHORT.latency + 8 * COUNT / rate  # there and back; of headers and TCP's window nothing is said
        assert least < took < 3 * least + 5, "a busy machine is slower, a relay that lets pass what it likes is not"
    passed = hosts.stop()["host1"]
    for way in ("up", "down"):
        assert COUNT < passed[way]["bytes"] < 1.5 * COUNT


@pytest.mark.netns
@pytest.mark.launch
@pytest.mark.slow
def test_the_relay_ends_with_who_started_it_and_the_network_with_the_relay(shaped):
    hosts = shaped({})
    relay = hosts.relay
    relay.stdin.close()  # as when this process dies
    assert relay.wait(LIMIT) == 0
    links = hosts.popen("host1", ["ip", "link"], dict(os.environ) | {"PATH": SBIN}, stdout=subprocess.PIPE, text=True)
    assert "eth0" not in links.communicate(timeout=LIMIT)[0]


@pytest.mark.netns
@pytest.mark.launch
@pytest.mark.slow
def test_a_job_over_a_link_has_the_model_of_one_without(shaped, run_in_memory, tmp_path):
    if "Open MPI" not in subprocess.getoutput(f"{BIN}/mpirun --version"):
        pytest.skip("the mpirun beside this Python is not Open MPI's")
    settings = (
        "--method benchmarks.toy:Method --dataset none --support dense --parties 4 --rounds 2 --eval-every 0 --checkpoint-every 0"
    ).split()
    hosts = shaped(dict.fromkeys(("host1", "host2"), PROFILES["wifi"]))
    said = tmp_path / "said"
    with said.open("w") as log:
        arguments = [*settings, "--aggregation", "secure", "--rank-deadline", LIMIT, "--out", tmp_path / "run"]
        job = hosts.job("host0:1,host1:1,host2:1", *arguments, stdout=log, stderr=log)
        assert job.wait(LIMIT) == 0, said.read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    config = resolve([*settings, "--aggregation", "plain", "--out", str(tmp_path / "planned")])
    assert summary["model_sha256"] == run_in_memory(config, 3)["model_sha256"]
    assert summary["dropouts"]["lost"]["ranks"] == []
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    # The second round's sum comes down and its masked input goes up, four trips of keys and shares aside.
    bytes_up = hosts.stop()["host1"]["up"]["bytes"]
    assert rows[1]["seconds"] > 8 * PROFILES["wifi"].latency + 8 * 0.4 * bytes_up / PROFILES["wifi"].up
