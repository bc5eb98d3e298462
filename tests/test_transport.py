"""The endpoint and its ledger over the in-memory transport; tests/mpi runs the same over MPI."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.errors import DataError, TransportError, WireError
from fedmpi.transport.ledger import Ledger
from fedmpi.transport.memory import Disconnected, Hub, run_ranks
from fedmpi.transport.places import LARGE, Places
from fedmpi.wire.frame import FRAMING
from fedmpi.wire.messages import Evaluate, Model, PlainInput, Ready, Stop, Train, encode
from fedmpi.wire.phases import Purpose


@settings(max_examples=50)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 400))
def test_messages_of_any_size_arrive_whole_and_in_order_whatever_the_chunk(sizes, chunk):
    server, client = Hub(2, chunk).endpoints
    for number, size in enumerate(sizes):
        client.send(0, PlainInput(number, 0, b"", bytes(size)))
    for number, size in enumerate(sizes):
        source, message = server.poll(1)
        assert (source, message.round, len(message.values)) == (1, number, size)
    assert client.ledger.bytes_given() == client.bytes_given == sum(FRAMING + 4 + size for size in sizes)


def test_chunks_of_several_senders_may_interleave():
    hub = Hub(3, chunk=32)
    for sender in (1, 2):
        hub.endpoints[sender].send(0, PlainInput(0, sender, b"", bytes([sender]) * 100))
    chunks = {1: [], 2: []}
    while not hub.queues[0].empty():
        source, piece = hub.queues[0].get()
        chunks[source].append(piece)
    for pair in zip(chunks[1], chunks[2], strict=True):
        for source, piece in zip((1, 2), pair, strict=True):
            hub.queues[0].put((source, piece))
    got = {source: message.values for source, message in (hub.endpoints[0].poll(1), hub.endpoints[0].poll(1))}
    assert got == {1: b"\1" * 100, 2: b"\2" * 100}


def test_poll_gives_up_at_its_deadline_and_costs_no_cpu():
    (endpoint,) = Hub(1).endpoints
    wall, cpu = time.monotonic(), time.process_time()
    assert endpoint.poll(0.5) is None
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    assert wall >= 0.5
    assert cpu < wall / 4, "an idle endpoint must sleep, not spin"


def test_garbage_names_the_rank_that_sent_it_and_the_next_message_is_fine():
    hub = Hub(2)
    hub.queues[0].put((1, b"not a frame at all, but long enough for a header"))
    with pytest.raises(WireError, match="from rank 1"):
        hub.endpoints[0].poll(1)
    hub.endpoints[1].send(0, Stop())
    assert hub.endpoints[0].poll(1)[0] == 1


def test_an_exception_on_one_rank_ends_the_others():
    def rank(endpoint):
        if endpoint.rank == 2:
            raise ZeroDivisionError("rank 2")
        endpoint.poll()  # would wait for ever

    with pytest.raises(ZeroDivisionError):
        run_ranks(3, rank)


def test_a_shared_download_counts_once_on_the_wire_and_once_per_party_logically():
    ledger = Ledger(0)
    message = Train(3, -1, (4, 5, 6), 20, 0)
    ledger.record(message, 2, len(encode(message)) - FRAMING)
    assert ledger.total("messages") == 1
    assert ledger.total("wire_payload", phase="model") == Train.wire_size(3)
    assert ledger.total("wire_framing") == FRAMING
    assert ledger.total("logical_payload", direction="down") == 3 * Train.wire_size(1)
    assert ledger.total("logical_payload", party=5) == Train.wire_size(1)
    assert ledger.total("logical_framing") == 3 * FRAMING
    assert ledger.total("wire_payload", direction="up") == 0


def test_an_account_holds_its_own_bytes_and_merges_to_the_truth():
    server, client = Hub(2).endpoints
    server.send(1, Evaluate(1, 0, (0,), 1, 0))
    client.send(0, Ready(dimension=7, parties=(0,)))
    client.send_tally(0, {"cpu": {"setup": 1.25}})
    client.send(0, PlainInput(1, 0, b"", b"xyz"))
    client.send_tally(0, {})
    sent, given_by_client = 0, 0
    for _ in range(4):
        _, message = server.poll(1)
        sent += len(encode(message))
        if hasattr(message, "rows"):
            server.ledger.merge(message.rows)
            given_by_client += message.bytes_given
    assert given_by_client == sent
    assert server.ledger.bytes_given() == server.bytes_given + given_by_client
    assert server.ledger.total("messages", direction="up") == 4


def test_without_detail_the_totals_are_the_same():
    message = Train(3, -1, (4, 5, 6), 20, 0)
    ledgers = [Ledger(0, detailed) for detailed in (True, False)]
    for ledger in ledgers:
        ledger.record(message, 2, len(encode(message)) - FRAMING)
    full, brief = ledgers
    assert (len(full.table()), len(brief.table())) == (4, 1)
    assert full.summary("down") == brief.summary("down") and full.summary("down", ["model"]) == full.summary("down")
    assert not any(full.summary("up").values()) and not any(full.summary("down", ["update"]).values())


def test_a_round_and_its_test_are_counted_apart():
    ledger = Ledger(1)
    for purpose in Purpose:
        ledger.record(PlainInput(3, 4, b"", b"xyz", purpose=purpose), 0, 7)
    assert ledger.total("messages", purpose="test") == ledger.total("messages", purpose="training") == 1
    assert [line.split(",")[:6] for line in ledger.csv().splitlines()[1:]] == [
        ["3", purpose, "update", "PlainInput", "up", "1"] for purpose in ("training", "test")
    ]


def test_a_ledger_of_another_version_is_refused():
    with pytest.raises(DataError, match="of another version"):
        Ledger(0).merge(np.zeros((2, 11), np.int64))


def test_what_is_not_taken_in_time_is_said():
    (endpoint,) = Hub(1).endpoints
    endpoint._unsent = lambda: 3
    with pytest.raises(TransportError, match="rank 0: 3 chunks were not taken within 0.01 s"):
        endpoint.flush(0.01)


def test_a_rank_that_aborts_ends_the_others():
    def rank(endpoint):
        endpoint.abort(2) if endpoint.rank else endpoint.poll()

    with pytest.raises(Disconnected):
        run_ranks(2, rank)


def test_the_csv_has_the_same_totals():
    ledger = Ledger(0)
    for round in (1, 2):
        message = Train(round, 0, (0,), 1, 0)
        ledger.record(message, 1, len(encode(message)) - FRAMING)
    header, *lines = ledger.csv().splitlines()
    column = header.split(",").index("wire_payload")
    assert sum(int(line.split(",")[column]) for line in lines) == ledger.total("wire_payload") == 2 * Train.wire_size(1)
    assert lines[0].startswith("1,training,model,Train,down,1,0,")


def test_a_ledger_that_is_packed_now_and_then_counts_the_same(monkeypatch):
    from fedmpi.transport import ledger

    def fill(book):
        for round in range(40):
            for party in range(5):
                book.record(PlainInput(round % 7, party, b"", bytes(10 + party)), 0, 10 + party)
        return book

    loose = fill(ledger.Ledger(1))
    monkeypatch.setattr(ledger, "LOOSE", 3)
    packed = fill(ledger.Ledger(1))
    assert packed._packed and np.array_equal(packed.table(), loose.table()) and packed.csv() == loose.csv()
    assert packed.bytes_given() == loose.bytes_given() == sum(40 * (10 + party + FRAMING) for party in range(5))
    again = ledger.Ledger(1)
    again.merge(packed.table())
    assert again.summary("up") == loose.summary("up")
    assert packed.rows_after(Stop(), 0) == len(packed.table()) + 1


def test_a_place_is_used_again_only_when_nobody_holds_anything_of_it():
    places = Places()
    first = places.take(2 * LARGE)
    part = np.frombuffer(first[LARGE:], np.uint8)
    address = part.ctypes.data - LARGE
    del first
    second = places.take(2 * LARGE)
    second[:] = bytes([1]) * len(second)
    assert np.frombuffer(second, np.uint8).ctypes.data != address, "a part of it is still looked at"
    del part
    assert np.frombuffer(places.take(2 * LARGE - 1), np.uint8).ctypes.data == address
    assert places.kept() == 4 * LARGE


def test_places_are_kept_up_to_a_limit_and_those_of_other_sizes_make_room():
    places = Places(most=8 * LARGE)
    for size in (8 * LARGE, 2 * LARGE, 9 * LARGE, 3 * LARGE):
        assert len(places.take(size)) == size and places.kept() <= 8 * LARGE
    assert places.kept() == 5 * LARGE
    held = [places.take(4 * LARGE) for _ in range(3)]
    assert places.kept() <= 8 * LARGE and len(held) == 3


def test_what_goes_to_many_ranks_is_put_together_once_unless_it_may_have_changed():
    theta = np.arange(1000, dtype=np.float32)
    hub = Hub(3)
    server = hub.endpoints[0]

    def sent(rank, message):
        server.send(rank, message)
        return hub.endpoints[rank].poll(0)[1].theta

    def frames():
        return {id(server._frame(Model(1, theta=theta)).obj) for _ in range(2)}

    assert np.array_equal(sent(1, Model(1, theta=theta)), theta)
    theta[0] = -1  # a writer who does not keep to the rules
    assert np.array_equal(sent(2, Model(1, theta=theta)), theta), "not the frame of before"
    theta.setflags(write=False)
    assert len(frames()) == 1
    assert np.array_equal(sent(2, Model(1, theta=theta + 1)), theta + 1)
    assert server.ledger.bytes_given() == server.bytes_given == 3 * (FRAMING + Model.wire_size(1000))
