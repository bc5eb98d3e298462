"""Fixed-point encoding and plain aggregation: exact sums, in any order, that cannot wrap."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.aggregation.plain import PlainParty, PlainServer
from fedmpi.cli import resolve
from fedmpi.errors import ConfigError, ProtocolError
from fedmpi.privacy.accountant import calibrate
from fedmpi.privacy.encoding import (
    Encoding,
    choose_encoding,
    least_steps,
    needed_bits,
    rounding_cost,
    wrap_probability,
)
from fedmpi.privacy.mechanism import Noised
from fedmpi.privacy.noise import clip, discrete_gaussian, round_conditionally, sum_divergence
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


RUNS = {
    "dimension": st.integers(1, 300_000),
    "parties": st.integers(1, 5000),
    "multiplier": st.floats(0.01, 200),
    "rounds": st.integers(1, 1000),
}


def normal_tail(z):
    return 0.5 * math.erfc(z / math.sqrt(2))


@given(**RUNS, bound=st.floats(1e-4, 10))
def test_a_plan_leaves_room_for_every_signal_and_the_noise(bound, **run):
    encoding = choose_encoding(clip=bound, **run)
    dimension, parties = run["dimension"], run["parties"]
    half, norm = 2 ** (encoding.bits - 1), encoding.sensitivity
    assert parties * encoding.steps < half, "all parties at their bound must not wrap"
    deviation = run["multiplier"] * norm
    # The worst that updates can do, whatever the proof says: all of their norm in one coordinate, in two, in four, in all of them.
    for spread in {min(dimension, 1 << power) for power in range(20)}:
        signal = min(parties * encoding.steps, parties * norm / math.sqrt(spread))
        wraps = spread * (normal_tail((half - signal) / deviation) + normal_tail((half + signal) / deviation))
        wraps += (dimension - spread) * 2 * normal_tail(half / deviation)
        assert run["rounds"] * wraps <= 2.0**-40


@given(multiplier=st.just(0.0), **{name: RUNS[name] for name in ("dimension", "parties", "rounds")})
def test_without_noise_a_plan_is_as_fine_as_ever(**run):
    encoding = choose_encoding(clip=1.0, **run)
    assert encoding.steps == 2**20 and run["parties"] * 2**20 < 2 ** (encoding.bits - 1) <= run["parties"] * 2**21


@given(**RUNS)
def test_rounding_costs_at_most_a_hundredth_of_sigma_and_no_epsilon(dimension, parties, multiplier, rounds):
    run = {"dimension": dimension, "parties": parties, "multiplier": multiplier, "rounds": rounds}
    encoding = choose_encoding(clip=0.5, **run)
    deviation = multiplier * encoding.sensitivity / encoding.scale  # of the noise, in the units of an update
    rounding = math.sqrt(parties / 4) / encoding.scale
    assert math.hypot(deviation, rounding) <= 1.01 * multiplier * 0.5 * (1 + 1e-12)
    mechanism = Noised(encoding, multiplier=multiplier)
    share = mechanism.share(parties)
    assert share >= 3.5 and sum_divergence(share, parties) <= 1e-51 * parties
    # What the account makes of the shares is the multiplier that it was given, to the last bits.
    assert mechanism.of_sum(share / encoding.sensitivity, parties, dimension) == pytest.approx(multiplier, rel=1e-14)


@given(**RUNS)
def test_no_narrower_width_has_a_grid_and_no_finer_grid_the_width(**run):
    encoding = choose_encoding(clip=1.0, **run)
    given = run["dimension"], run["parties"], run["multiplier"]

    def holds(steps, bits):
        wraps = wrap_probability(steps, bits, *given, run["rounds"])
        return wraps <= 2.0**-40 and rounding_cost(steps, *given) <= 0.01

    assert holds(encoding.steps, encoding.bits) and not holds(encoding.steps + 1, encoding.bits)
    if encoding.bits == 8:
        return
    # Every grid that fits the narrower width: of the coarse ones all, of the others one in a hundred, the bounds being monotone.
    grid, narrower = 1, encoding.bits - 1
    while run["parties"] * grid < 2**narrower:
        assert not holds(grid, narrower)
        grid += max(1, grid // 100)
    least = least_steps(*given)
    assert rounding_cost(least, *given) <= 0.01 < (rounding_cost(least - 1, *given) if least > 1 else 1)
    assert not holds(least, narrower)


PRESETS = [  # (preset, coordinates, bits before: power-of-two steps with a floor of 2^12, bits, steps)
    ("demo-20", 7_870, 19, 15, 347),
    ("demo", 16_164, 21, 18, 555),
    ("cifar10-s5", 270_000, 22, 21, 2779),
]


@pytest.mark.parametrize("preset, coordinates, before, bits, steps", PRESETS)
def test_the_bits_of_the_presets(preset, coordinates, before, bits, steps):
    config = resolve(["--preset", preset])
    run, privacy = config.run, config.privacy
    multiplier = calibrate(privacy.epsilon, privacy.delta, privacy.sampling, run.rounds)
    given = dict(dimension=coordinates, parties=run.parties, multiplier=multiplier, rounds=run.rounds)
    encoding = choose_encoding(clip=privacy.clip, **given)
    assert (encoding.bits, encoding.steps) == (bits, steps)
    assert needed_bits(4096, **given) == before


def test_what_is_added_to_a_sum_is_the_noise_and_a_hundredth_of_it_measured():
    """On the real encoder, updates at their bound: cost below 1 %, and not by being no cost at all."""
    parties, dimension, multiplier = 40, 20_000, 0.5
    encoding = choose_encoding(clip=0.3, dimension=dimension, parties=parties, multiplier=multiplier, rounds=1)
    mechanism = Noised(encoding, multiplier=multiplier)
    truth, total = np.zeros(dimension), np.zeros(dimension, np.uint64)
    rng = np.random.default_rng(4)
    for party in range(parties):
        update = rng.normal(size=dimension)
        truth += clip(update, 0.3)[0]
        total += mechanism.encode(update, parties, lambda purpose, p=party: SeededWords(5, purpose, p, 1), party)
    added = encoding.decode(encoding.unwrap(total)) - truth
    measured = float(np.sqrt(np.mean(np.square(added)))) / (multiplier * 0.3) - 1
    cost = rounding_cost(encoding.steps, dimension, parties, multiplier)
    # A deviation from 20,000 draws is known to 0.5 %; the rounding of these updates is up to a third less than its bound.
    assert 0.005 < cost <= 0.01 and measured == pytest.approx(cost, abs=0.015)


def test_an_update_that_is_all_in_one_coordinate_is_never_a_step_too_long():
    """C times the scale may be a last bit above the number of steps, and must not be rounded up from there."""
    update = np.zeros(10_000)  # so many that the norm of one step too much would be let through
    update[0] = bound = 0.003
    heads = AlwaysHeads()
    for steps in (394, 397, 400):
        encoding = Encoding(bound, steps, 12, update.size)
        assert bound * encoding.scale > steps
        assert Noised(encoding).encode(update, 1, lambda purpose: heads, 0)[0] == steps


class AlwaysHeads:
    """A coin that always comes up heads where it can."""

    def words(self, n):
        return np.zeros(n, np.uint64)


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
