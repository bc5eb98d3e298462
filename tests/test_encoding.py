"""Fixed-point encoding and plain aggregation: exact sums, in any order, that cannot wrap."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.aggregation.plain import PlainParty, PlainServer
from fedmpi.errors import ConfigError, ProtocolError
from fedmpi.privacy.encoding import Encoding, choose_encoding, needed_bits
from fedmpi.privacy.noise import clip, discrete_gaussian, round_conditionally
from fedmpi.randomness.words import SeededWords
from fedmpi.wire.bits import packed_size
from fedmpi.wire.messages import PlainInput, TrainReport
from fedmpi.wire.support import encode_support


@given(st.integers(8, 64), st.data())
def test_wrap_and_unwrap_are_inverse_in_range_and_additive_modulo(bits, data):
    encoding = Encoding(1.0, 16, bits, 3)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    values = np.array(data.draw(st.lists(st.integers(low, high), min_size=3, max_size=3)), np.int64)
    others = np.array(data.draw(st.lists(st.integers(low, high), min_size=3, max_size=3)), np.int64)
    assert np.array_equal(encoding.unwrap(encoding.wrap(values)), values)
    total = [(int(a) + int(b) - low) % 2**bits + low for a, b in zip(values, others, strict=True)]
    assert encoding.unwrap(encoding.wrap(values) + encoding.wrap(others)).tolist() == total


@given(
    st.integers(1, 300_000),
    st.integers(1, 5000),
    st.just(0.0) | st.floats(0.01, 200),
    st.integers(1, 1000),
    st.floats(1e-4, 10),
)
def test_a_plan_leaves_room_for_every_signal_and_the_noise(dimension, parties, multiplier, rounds, bound):
    encoding = choose_encoding(clip=bound, dimension=dimension, parties=parties, multiplier=multiplier, rounds=rounds)
    half = 2 ** (encoding.bits - 1)
    assert parties * encoding.steps < half, "all parties at their bound must not wrap"
    deviation = multiplier * encoding.sensitivity
    if deviation:
        reach = (half - parties * encoding.steps) / deviation
        # Union over every coordinate of every round; log2 of 2 d T exp(-z^2/2).
        assert 1 + math.log2(dimension * rounds) - reach**2 / 2 * math.log2(math.e) <= -40
        assert encoding.sensitivity <= encoding.steps * 1.01 + 2, "rounding must hardly cost anything"


def test_a_width_that_could_wrap_is_refused_and_the_next_ones_are_used_in_full():
    settings = dict(clip=0.01, dimension=270_000, parties=20, multiplier=40.0, rounds=100)
    with pytest.raises(ConfigError, match=r"bits = 8: .* could wrap, at least \d+ are needed"):
        choose_encoding(**settings, bits=8)
    with pytest.raises(ConfigError, match="bits = 70"):
        choose_encoding(**settings, bits=70)
    widths = [choose_encoding(**settings, bits=bits).steps for bits in (24, 32, 40)]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    assert needed_bits(widths[1], 270_000, 20, 40.0, 100) <= 32 < needed_bits(2 * widths[1], 270_000, 20, 40.0, 100)


def updates(encoding, parties, dimension, seed=1, noise=50.0):
    """Encoded updates, and the plain integers that they stand for."""
    rng = np.random.default_rng(seed)
    integers = []
    for party in range(parties):
        clipped, _ = clip(rng.normal(size=dimension), encoding.clip)
        steps = round_conditionally(clipped * encoding.scale, encoding.steps, SeededWords(seed, "rounding", party, 1))
        integers.append(steps + discrete_gaussian(noise, dimension, SeededWords(seed, "noise", party, 1)))
    return integers


@given(st.permutations(range(6)), st.integers(0, 3))
def test_the_sum_is_exact_whatever_the_order_of_arrival(order, seed):
    encoding = choose_encoding(clip=0.5, dimension=40, parties=6, multiplier=2.0, rounds=10)
    integers = updates(encoding, 6, 40, seed)
    server = PlainServer(1, tuple(range(6)), encoding, 40, own_support=False)
    for party in order:
        (message,) = PlainParty(1, party, encoding, 40, encoding.wrap(integers[party])).start()
        assert len(message.values) == packed_size(40, encoding.bits)
        assert server.receive(message) == []
    assert server.done and server.waiting() == ()
    result = server.result()
    assert result.survivors == tuple(range(6))
    assert np.array_equal(result.total, sum(integers))
    error = encoding.decode(result.total) * encoding.scale - sum(integers)
    assert np.abs(error).max() < 1e-6


def test_own_supports_are_added_where_they_belong():
    encoding = Encoding(1.0, 64, 20, 3)
    supports = [np.array([0, 4, 9]), np.array([4, 5, 6])]
    server = PlainServer(2, (0, 1), encoding, 10, own_support=True)
    for party, support in enumerate(supports):
        (message,) = PlainParty(2, party, encoding, 10, encoding.wrap(np.array([1, -2, 3])), support).start()
        assert message.support == encode_support(support, 10)
        server.receive(message)
    assert server.result().total.tolist() == [1, 0, 0, 0, -2 + 1, -2, 3, 0, 0, 3]


def good(encoding, party=0, round=1):
    return PlainParty(round, party, encoding, 10, encoding.wrap(np.arange(3)), np.array([1, 2, 3])).start()[0]


ENCODING = Encoding(1.0, 64, 20, 3)
WRONG = {
    "party 7, update: is not in this round's cohort": good(ENCODING, party=7),
    "party 0, update: sent a second update": good(ENCODING),
    "party 1, update: sent an update of round 9 in round 1": good(ENCODING, 1, 9),
    "party 1, update: sent no support": PlainInput(1, 1, b"", good(ENCODING).values),
    "party 1, update: sent 5 bytes of values, expected 8": PlainInput(1, 1, good(ENCODING).support, b"12345"),
    "party 1, update: sent TrainReport, expected PlainInput": TrainReport(1, 1),
    "expected 3": PlainParty(1, 1, Encoding(1.0, 64, 20, 3), 10, ENCODING.wrap(np.arange(3)), np.array([1, 2])).start()[
        0
    ],
    "party 1, update: ": PlainInput(1, 1, b"\xff\xff\xff", good(ENCODING).values),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_input_names_its_party_and_changes_nothing(said):
    server = PlainServer(1, (0, 1), ENCODING, 10, own_support=True)
    server.receive(good(ENCODING))
    before = server.result().total.copy()
    with pytest.raises(ProtocolError) as caught:
        server.receive(WRONG[said])
    assert said in str(caught.value)
    assert np.array_equal(server.result().total, before) and server.waiting() == (1,)
    server.receive(good(ENCODING, 1))
    assert server.done
