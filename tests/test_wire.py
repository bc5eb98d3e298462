"""Frames and messages: they survive the trip, cost what their law says, and anything else is refused."""

import dataclasses
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.errors import WireError
from fedmpi.secagg import messages as secagg
from fedmpi.wire.bits import pack, pack_signed
from fedmpi.wire.control import NONCE, Adopt, Adopted, Release, Stop
from fedmpi.wire.frame import FRAMING, HEADER, MAGIC, MAX_PAYLOAD, MAX_ROUND, VERSION, Header, Reader
from fedmpi.wire.message import register
from fedmpi.wire.messages import (
    MESSAGES,
    AskModel,
    Checkpoint,
    Delta,
    EvalReport,
    Evaluate,
    Fill,
    GoOn,
    Model,
    Nonces,
    PlainInput,
    PlainRows,
    Ready,
    Replay,
    Setup,
    SupportProposal,
    SupportUnion,
    Tally,
    Train,
    TrainReport,
    decode,
    encode,
)
from fedmpi.wire.phases import Purpose

u32 = st.integers(0, 2**32 - 1)
parties = st.lists(u32, max_size=5).map(tuple)
floats = st.floats(allow_nan=False)
thetas = st.lists(st.floats(width=32, allow_nan=False), max_size=20).map(lambda xs: np.array(xs, np.float32))
rounds, party = u32, st.integers(-1, 2**31 - 1)
rows = st.integers(0, 4).map(lambda n: np.arange(n * Tally.COLUMNS, dtype=np.int64).reshape(n, Tally.COLUMNS))
facts = st.dictionaries(st.text(max_size=5), st.integers() | floats, max_size=3)
sizes = 32, 64, secagg.SEED_SHARE, secagg.KEY_SHARE
key, signature, seed_share, key_share = (st.binary(min_size=n, max_size=n) for n in sizes)
sealed = st.binary(min_size=secagg.SEALED, max_size=secagg.SEALED)
bundles = st.lists(st.builds(secagg.Bundle, u32, sealed), max_size=4).map(tuple)
survivors = st.lists(u32, max_size=5).map(tuple)
peer_keys = st.lists(st.builds(secagg.PeerKeys, u32, key, key), max_size=3) | st.lists(
    st.builds(secagg.PeerKeys, u32, key, key, signature), max_size=3
)
answer = st.builds(secagg.SelfMaskShare, u32, seed_share) | st.builds(secagg.PairKeyShare, u32, key_share)
answer |= st.builds(secagg.ListKeyShare, u32, seed_share)
answers = st.lists(answer | st.builds(secagg.PairMask, u32, st.binary(min_size=16, max_size=16)), max_size=5).map(tuple)
nonces = st.integers(0, 3).flatmap(lambda n: st.binary(min_size=NONCE * n, max_size=NONCE * n))
proofs = st.lists(st.builds(secagg.Signed, u32, signature), max_size=3).map(tuple)


def batch_bundles(draw, peers, length):
    sealed = st.binary(min_size=secagg.batch_sealed(length), max_size=secagg.batch_sealed(length))
    return tuple(secagg.Bundle(draw(u32), draw(sealed)) for _ in range(peers))


@st.composite
def share_batches(draw):
    peers, length = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    commitments = tuple(draw(key) for _ in range(length))
    lists = tuple(draw(st.binary(min_size=16 * peers + 16, max_size=16 * peers + 16)) for _ in range(length))
    return secagg.ShareBatch(draw(rounds), draw(party), batch_bundles(draw, peers, length), commitments, lists)


@st.composite
def batch_lists(draw):
    return secagg.ShareList(
        draw(rounds), draw(party), batch_bundles(draw, draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    )


@st.composite
def reports(draw, kind):
    whose, columns = draw(parties), draw(st.integers(0, 4))
    figures = draw(st.lists(floats, min_size=len(whose) * columns, max_size=len(whose) * columns))
    return kind(draw(rounds), draw(party), whose, np.array(figures, np.float64).reshape(len(whose), columns))


@st.composite
def plain_rows(draw):
    whose, width, bits = draw(parties), draw(st.integers(1, 3)), draw(st.integers(2, 20))
    counts = np.array(draw(st.lists(st.integers(0, 4), min_size=len(whose), max_size=len(whose))), np.int64)
    numbers = draw(st.lists(st.integers(0, 1000), min_size=int(counts.sum()), max_size=int(counts.sum())))
    edge = 2 ** (bits - 1)
    size = len(numbers) * width
    values = draw(st.lists(st.integers(-edge, edge - 1), min_size=size, max_size=size))
    packed = pack(np.array(numbers, np.int64), 10), pack_signed(np.array(values, np.int64), bits)
    return PlainRows(draw(rounds), draw(party), whose, counts, *packed, 10, bits, width)


anything = st.one_of(
    st.builds(secagg.AdvertiseKeys, rounds, party, key, key, st.just(b"") | signature),
    st.builds(secagg.KeyList, rounds, party, peer_keys.map(tuple), st.just(b"") | key),
    st.builds(secagg.ShareKeys, rounds, party, bundles, key),
    st.builds(secagg.ShareList, rounds, party, bundles),
    share_batches(),
    batch_lists(),
    st.builds(secagg.MaskedInput, rounds, party, st.binary(), survivors),
    st.builds(secagg.Withdrawal, rounds, party, survivors),
    st.builds(secagg.SurvivorList, rounds, party, survivors),
    st.builds(secagg.ConsistencyCheck, rounds, party, signature),
    st.builds(secagg.UnmaskRequest, rounds, party, survivors, proofs, survivors),
    st.builds(secagg.Unmask, rounds, party, answers),
    st.builds(Setup, rounds, party, st.text(), parties),
    st.builds(Ready, rounds, party, st.integers(0, 2**64 - 1), u32, parties, nonces),
    st.builds(Nonces, rounds, party, nonces),
    st.builds(Adopt, rounds, party, parties, u32),
    st.builds(Release, rounds, party, parties),
    st.builds(Adopted, rounds, party, st.text(max_size=100)),
    st.builds(Model, rounds, party, thetas, st.binary()),
    st.builds(Delta, rounds, party, u32, floats, u32, st.booleans(), st.binary(), st.binary()),
    st.builds(AskModel, rounds, party),
    st.builds(Replay, rounds, party, parties, thetas),
    st.builds(Fill, rounds, party, parties, u32, u32, u32, key),
    st.builds(Train, rounds, party, parties, u32, u32, u32, key, u32),
    st.builds(Evaluate, rounds, party, parties, u32, u32, u32, key),
    st.builds(SupportProposal, rounds, party, st.binary()),
    st.builds(SupportUnion, rounds, party, st.binary()),
    st.builds(PlainInput, rounds, party, st.binary(), st.binary()),
    reports(TrainReport),
    reports(EvalReport),
    plain_rows(),
    st.builds(Checkpoint, rounds, party),
    st.builds(GoOn, rounds, party),
    st.builds(Stop, rounds, party, u32),
    st.builds(Tally, rounds, party, st.integers(0, 2**64 - 1), rows, facts),
)


def length_of(bundles):
    """Rounds of the batch that bundles are of; 0: of one round alone."""
    sizes = {len(bundle.sealed) for bundle in bundles} or {secagg.SEALED}
    (size,) = sizes
    return 0 if size == secagg.SEALED else secagg.rounds_in(size)


def unmask_law(message):
    kinds = Counter(map(type, message.answers))
    seeds = kinds[secagg.SelfMaskShare] + kinds[secagg.ListKeyShare]
    return secagg.Unmask.wire_size(seeds, kinds[secagg.PairKeyShare], kinds[secagg.PairMask])


# The size law of every message, from what the message holds.
LAWS = {
    secagg.AdvertiseKeys: lambda m: secagg.AdvertiseKeys.wire_size(bool(m.signature)),
    secagg.KeyList: lambda m: secagg.KeyList.wire_size(
        len(m.peers), bool(m.peers and m.peers[0].signature), bool(m.digest)
    ),
    secagg.ShareKeys: lambda m: secagg.ShareKeys.wire_size(len(m.bundles)),
    secagg.ShareBatch: lambda m: secagg.ShareBatch.wire_size(len(m.bundles), len(m.commitments)),
    secagg.ShareList: lambda m: secagg.ShareList.wire_size(len(m.bundles), length_of(m.bundles)),
    secagg.MaskedInput: lambda m: secagg.MaskedInput.wire_size(len(m.values), 8, len(m.unopened)),
    secagg.Withdrawal: lambda m: secagg.Withdrawal.wire_size(len(m.unopened)),
    secagg.SurvivorList: lambda m: secagg.SurvivorList.wire_size(len(m.survivors)),
    secagg.ConsistencyCheck: lambda m: secagg.ConsistencyCheck.wire_size(),
    secagg.UnmaskRequest: lambda m: secagg.UnmaskRequest.wire_size(len(m.survivors), len(m.signatures), len(m.direct)),
    secagg.Unmask: unmask_law,
    Setup: lambda m: Setup.wire_size(len(m.config.encode()), len(m.parties)),
    Ready: lambda m: Ready.wire_size(len(m.clear), len(m.nonces) // NONCE),
    Nonces: lambda m: Nonces.wire_size(len(m.nonces) // NONCE),
    Adopt: lambda m: Adopt.wire_size(len(m.parties)),
    Release: lambda m: Release.wire_size(len(m.parties)),
    Adopted: lambda m: Adopted.wire_size(len(m.why.encode())),
    Replay: lambda m: Replay.wire_size(len(m.theta), len(m.parties)),
    PlainRows: lambda m: PlainRows.wire_size(len(m.parties), int(m.counts.sum()), m.row_bits, m.value_bits, m.width),
    Fill: lambda m: Fill.wire_size(len(m.parties)),
    Train: lambda m: Train.wire_size(len(m.parties)),
    Evaluate: lambda m: Evaluate.wire_size(len(m.parties)),
    Model: lambda m: Model.wire_size(len(m.theta), len(m.state)),
    Delta: lambda m: Delta.wire_size(len(m.support), len(m.values)),
    AskModel: lambda m: AskModel.wire_size(),
    SupportProposal: lambda m: SupportProposal.wire_size(len(m.support)),
    SupportUnion: lambda m: SupportUnion.wire_size(len(m.support)),
    PlainInput: lambda m: PlainInput.wire_size(len(m.support), len(m.values)),
    TrainReport: lambda m: TrainReport.wire_size(*m.figures.shape),
    EvalReport: lambda m: EvalReport.wire_size(*m.figures.shape),
    Checkpoint: lambda m: Checkpoint.wire_size(),
    GoOn: lambda m: GoOn.wire_size(),
    Stop: lambda m: Stop.wire_size(),
    Tally: lambda m: Tally.wire_size(len(m.rows), len(m.buffers()[-1])),
}


def test_every_message_has_a_law():
    assert set(LAWS) == set(MESSAGES.values())


def framed(kind, payload):
    return Header(kind.TYPE, 1, 2, len(payload)).pack() + payload


@pytest.mark.parametrize(
    "kind, payload, said",
    [
        (Setup, bytes(4) + b"\xff", "Setup: configuration is not UTF-8"),
        (Model, bytes(4) + b"abc", "Model: 3 bytes are not a whole number of float32"),
        (Model, b"\1\0\0\0", "Model: 1 bytes announced, 0 left"),
        (Delta, bytes(16) + b"\2" + bytes(4), "Delta: a flag of 2"),
        (PlainRows, bytes(4) + b"\0\x08\1\0\0\0", "PlainRows: rows of 1 values, 0 bits a row number and 8 a value"),
        (PlainRows, bytes(4) + b"\x08\x08\0\0\0\0", "PlainRows: rows of 0 values"),
        (Tally, bytes(12) + b"{", "Tally: facts are not JSON"),
        (Tally, bytes(12) + b"[" * 100_000, "Tally: facts are not JSON"),
        (Tally, bytes(12) + b"[]", "Tally: facts are not a JSON object"),
        (secagg.AdvertiseKeys, bytes(64 + 63), "AdvertiseKeys: a signature of 63 bytes, expected 64 or none"),
        (secagg.KeyList, b"\4", "KeyList: flags 4, expected 0 to 3"),
        (secagg.Unmask, b"\1\0\0\0" + b"\4\0\0\0\0", "Unmask: an answer of kind 4, expected below 4"),
        (secagg.ShareList, b"\2\0\0\0" + bytes(141), "2 bundles in 141 bytes"),
        (secagg.ShareList, b"\1\0\0\0" + bytes(4 + 51), "1 bundles in 55 bytes"),
        (secagg.ShareList, b"\0\0\0\0" + b"x", "0 bundles in 1 bytes"),
        (secagg.ShareKeys, bytes(32) + b"\1\0\0\0" + bytes(4 + 50), "1 bundles in 54 bytes"),
        (secagg.ShareBatch, b"\1\0\0\0\1\0\0\0" + bytes(32), "ShareBatch: 32 bytes announced, 0 left"),
        (Checkpoint, b"x", "Checkpoint: 1 bytes left over"),
        (Ready, bytes(5), "Ready: 12 bytes announced, 5 left"),
    ],
)
def test_what_is_wrong_with_a_payload_is_said(kind, payload, said):
    with pytest.raises(WireError, match=said):
        decode(framed(kind, payload))


def test_a_number_stands_for_one_message():
    class Imposter(Stop):
        pass

    with pytest.raises(ValueError, match="Imposter: type 9 is taken by Stop"):
        register(Imposter)
    assert MESSAGES[Stop.TYPE] is Stop


@given(anything)
def test_whoever_a_message_serves_is_charged_as_if_alone(message):
    """Where it serves one party, that is the message itself; what is kept for the record alone is charged to nobody."""
    charged = list(message.shares())
    if isinstance(message, (Adopt, Adopted, Release, Replay, Checkpoint, GoOn, Stop, Tally, Model, Delta, AskModel)):
        assert not charged  # what downloads would be to each party rank 0 charges by itself
    elif isinstance(message, Ready):
        assert not charged  # a decoded one does not know its parties
        named = dataclasses.replace(message, parties=(7,), clear=message.clear[:1], nonces=message.nonces[:NONCE])
        assert list(named.shares()) == [(7, Ready.wire_size(int(7 in named.clear), len(named.nonces) // NONCE))]
    elif isinstance(message, Nonces):
        assert not charged and list(dataclasses.replace(message, parties=(7,)).shares()) == [(7, len(message.nonces))]
    elif hasattr(message, "parties"):
        assert [party for party, _ in charged] == list(message.parties)
        if len(charged) == 1:
            assert charged[0][1] == LAWS[type(message)](message)
    else:
        assert charged == [(message.party, LAWS[type(message)](message))]


@given(anything)
def test_a_message_survives_the_trip_and_costs_what_its_law_says(message):
    frame = encode(message)
    assert encode(decode(frame)) == frame
    assert type(decode(frame)) is type(message)
    assert len(frame) == FRAMING + LAWS[type(message)](message)


@given(anything, st.data())
def test_a_cut_or_lengthened_frame_is_refused(message, data):
    frame = bytes(encode(message))
    cut = data.draw(st.integers(0, len(frame) - 1))
    for wrong in (frame[:cut], frame + b"\0"):
        with pytest.raises(WireError):
            decode(wrong)


@given(anything, st.data())
def test_a_changed_frame_is_refused_or_means_something_that_encodes_to_it(message, data):
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(frame)
    except WireError:
        return
    assert len(encode(decoded)) == len(frame) or isinstance(decoded, Tally)  # JSON has more than one spelling


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from(sorted(MESSAGES)), st.booleans())
def test_random_bytes_never_do_anything_but_raise_wire_error(payload, kind, framed):
    header = Header(kind, 1, 2, len(payload)).pack() if framed else b""
    try:
        decode(header + payload)
    except WireError:
        pass
    else:
        assert framed


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(magic=b"XX"), "starts with"),
        (dict(version=9), "version 9"),
        (dict(type=250), "unknown type 250"),
        (dict(purpose=2), "purpose 2, expected one of 0, 1"),
        (dict(length=(MAX_PAYLOAD + 1).to_bytes(7, "little")), "largest allowed"),
        (dict(length=b"\5" + bytes(6)), "announces 5 payload bytes and has 4"),
    ],
)
def test_what_is_wrong_with_a_header_is_said(change, said):
    fields = dict(magic=MAGIC, version=VERSION, type=Stop.TYPE, round=0, party=-1, purpose=0, length=b"\4" + bytes(6))
    fields |= change
    with pytest.raises(WireError, match=said):
        decode(HEADER.pack(*fields.values()) + b"\0\0\0\0")


def test_the_header_is_laid_out_as_its_table_says():
    frame = encode(secagg.ConsistencyCheck(0x01020304, 0x05060708, bytes(64), purpose=Purpose.TEST)).tobytes()
    assert frame[:FRAMING].hex() == "464d051a" + "04030201" + "08070605" + "01" + "40000000000000"


@pytest.mark.parametrize("round", [-1, MAX_ROUND + 1])
def test_a_round_that_does_not_fit_is_refused(round):
    with pytest.raises(WireError, match=f"round {round} cannot be sent: must be between 0 and 4294967295"):
        encode(Stop(round))


@given(anything, st.sampled_from(Purpose))
def test_every_message_carries_what_its_round_is_for(message, purpose):
    assert message.purpose is Purpose.TRAINING
    assert decode(encode(dataclasses.replace(message, purpose=purpose))).purpose is purpose


@pytest.mark.parametrize("kind", [Train, Setup, Tally, PlainInput])
def test_an_announced_size_is_never_allocated_before_its_bytes_are_there(kind):
    payload = b"\xff" * 24  # every count in it announces about 4 billion entries
    frame = Header(kind.TYPE, 0, 0, len(payload)).pack() + payload
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(anything)
def test_every_field_of_a_message_travels(message):
    """A field that `parse` does not give back would arrive as its default."""
    own = [field.name for field in dataclasses.fields(message) if field.name not in ("round", "party", "purpose")]
    stays = {"parties"} if isinstance(message, (Ready, Nonces)) else set()  # for the sender's own ledger
    payload = memoryview(encode(message))[FRAMING:]
    assert len(type(message).parse(Reader(payload, "message"))) == len(set(own) - stays)
