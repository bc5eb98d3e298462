"""Words, clipping, conditional rounding and the discrete Gaussian, under both sources of randomness."""

import copy
import hmac
import math
import pickle
import tracemalloc

import numpy as np
import pytest
from Crypto.Cipher import AES
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedmpi.crypto.prg import KeyStream
from fedmpi.errors import ConfigError, FedmpiError, ProtocolError
from fedmpi.privacy import noise
from fedmpi.privacy.noise import (
    clip,
    discrete_gaussian,
    l2_norm,
    round_conditionally,
    rounded_norm_bound,
    sum_divergence,
    sum_multiplier,
)
from fedmpi.randomness.words import SeededWords, bernoulli, fraction, uniform

KEY = bytes(range(32))

SOURCES = {
    "seeded": lambda party=0: SeededWords(7, "noise", party, 3),
    "os": lambda party=0: KeyStream(KEY, b"noise/%d" % party),
}


@pytest.fixture(params=sorted(SOURCES))
def make(request):
    return SOURCES[request.param]


class Fixed:
    """A source that plays back given words."""

    def __init__(self, *words):
        self.left = [np.array(w, dtype=np.uint64) for w in words]

    def words(self, n):
        head = self.left.pop(0)
        assert head.size == n
        return head


# --- words ---


def test_a_stream_does_not_depend_on_how_it_is_read(make):
    whole = make().words(1000)
    source = make()
    parts = [source.words(n) for n in (0, 1, 2, 3, 994)]
    assert whole.dtype == np.uint64
    assert np.array_equal(whole, np.concatenate(parts))
    assert len(np.unique(whole)) == 1000


def test_the_four_keys_each_make_another_stream():
    base = (7, "noise", 1, 2)
    others = [(8, "noise", 1, 2), (7, "rounding", 1, 2), (7, "noise", 2, 2), (7, "noise", 1, 3), (-7, "noise", 1, 2)]
    streams = [tuple(SeededWords(*keys).words(4)) for keys in [base, *others]]
    assert len(set(streams)) == len(streams)
    assert tuple(SeededWords(*base).words(4)) == streams[0]


def test_the_encoding_of_the_keys_is_unambiguous():
    # Written one after the other, each pair would give the same bytes.
    assert SeededWords(1, "noise1", 2, 3).words(1) != SeededWords(1, "noise", 12, 3).words(1)
    assert SeededWords(1, "noise", 1, 23).words(1) != SeededWords(1, "noise", 12, 3).words(1)
    assert SeededWords(1, "2a", 1, 1).words(1) != SeededWords(12, "a", 1, 1).words(1)
    with pytest.raises(TypeError):
        SeededWords(1.5, "noise", 1, 1)


def test_seeded_words_are_pinned():
    # Changing the derivation would change every seeded result that was ever published.
    assert [hex(w) for w in SeededWords(7, "noise", 1, 2).words(2)] == ["0xeb35e5055676980f", "0xa8471d81af793c6c"]


def test_a_shuffle_is_keyed_and_apart_from_the_words():
    shuffle = SeededWords(7, "batches", 1, 2).generator().permutation(50)
    source = SeededWords(7, "batches", 1, 2)
    source.words(10)
    assert np.array_equal(source.generator().permutation(50), shuffle)
    assert not np.array_equal(SeededWords(7, "batches", 2, 2).generator().permutation(50), shuffle)
    raw = SeededWords(7, "batches", 1, 2).generator().bit_generator.random_raw(4)
    assert not np.array_equal(raw, SeededWords(7, "batches", 1, 2).words(4))


def test_a_key_stream_is_aes_256_in_counter_mode():
    label = b"noise/3"
    subkey = hmac.new(KEY, b"fedmpi/key-stream/1" + len(label).to_bytes(4, "big") + label + b"\x01", "sha256").digest()
    blocks = b"".join(i.to_bytes(16, "big") for i in range(300))
    expected = np.frombuffer(AES.new(subkey, AES.MODE_ECB).encrypt(blocks), dtype="<u8")
    assert np.array_equal(KeyStream(KEY, label).words(600), expected)


def test_key_streams_differ_by_key_and_label():
    streams = [KeyStream(KEY, b"party/3"), KeyStream(KEY, b"party/4"), KeyStream(KEY[::-1], b"party/3")]
    streams += [KeyStream.from_os(b"party/3"), KeyStream.from_os(b"party/3")]
    assert len({tuple(s.words(4)) for s in streams}) == len(streams)


def test_a_key_stream_keeps_its_key_to_itself():
    stream = KeyStream(KEY, b"noise")
    for text in (repr(stream), str(stream), f"{[stream]}"):
        assert text.strip("[]") == "KeyStream(secret)"
    with pytest.raises(TypeError):
        pickle.dumps(stream)
    with pytest.raises(TypeError):
        copy.deepcopy(stream)
    with pytest.raises(ValueError, match="32 bytes, not 16"):
        KeyStream(KEY[:16], b"noise")


def test_uniform_takes_the_upper_53_bits():
    words = np.array([0, 2**11 - 1, 2**11, 2**63, 2**64 - 1], dtype=np.uint64)
    assert uniform(words).tolist() == [0.0, 0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53]


def test_fraction_keeps_the_precision_of_small_values():
    words = np.array([0, 1, 2**40, 2**64 - 1], dtype=np.uint64)
    assert fraction(words).tolist() == [2.0**-65, 1.5 * 2.0**-64, (2**40 + 0.5) * 2.0**-64, 1.0]


def test_uniform_and_coins_are_fair(make):
    n = 200_000
    u = uniform(make().words(n))
    assert 0.0 <= u.min() and u.max() < 1.0
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    p = np.repeat([[0.0, 0.1, 0.5, 0.9, 1.0]], n // 5, axis=0)
    heads = bernoulli(make(), p)
    assert heads.shape == p.shape
    rate = heads.mean(axis=0)
    assert rate[0] == 0.0 and rate[4] == 1.0
    assert np.all(np.abs(rate - p[0]) <= 4.0 * np.sqrt(p[0] * (1 - p[0]) / p.shape[0]))


# --- clipping ---

finite = st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e300, max_value=1e300)


@given(st.lists(finite, min_size=1, max_size=40), st.floats(min_value=1e-100, max_value=1e100))
@settings(max_examples=300, deadline=None)
def test_a_clipped_update_never_exceeds_the_bound(values, bound):
    delta = np.array(values)
    clipped, norm = clip(delta, bound)
    # Whatever order the squares are summed in: pairwise, left to right, and by a rounding-free sum.
    assert l2_norm(clipped) <= bound
    assert math.sqrt(sum(float(v) * float(v) for v in clipped)) <= bound
    assert math.sqrt(math.fsum(float(v) * float(v) for v in clipped)) <= bound
    if norm <= bound:
        assert np.array_equal(clipped, delta)
    else:
        assert l2_norm(clipped) == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_long_update_keeps_its_direction(seed):
    rng = np.random.default_rng(seed)
    delta = rng.normal(size=100_003).astype(np.float32)
    clipped, norm = clip(delta, 0.01)
    wide = delta.astype(np.float64)
    assert clipped.dtype == np.float64
    assert norm == pytest.approx(float(np.linalg.norm(wide)), rel=1e-12)
    for computed in (np.linalg.norm(clipped), np.sqrt(clipped @ clipped), l2_norm(clipped), l2_norm(clipped[::-1])):
        assert computed <= 0.01
    assert l2_norm(clipped) == pytest.approx(0.01, rel=1e-9)
    assert clipped @ wide == pytest.approx(l2_norm(clipped) * norm, rel=1e-12)
    again, _ = clip(clipped, 0.01)
    assert np.array_equal(again, clipped)


def test_clipping_zero_and_short_updates_changes_nothing():
    zero, norm = clip(np.zeros((3, 2)), 0.01)
    assert norm == 0.0 and zero.shape == (3, 2) and not zero.any()
    exact, norm = clip(np.array([3.0, 4.0]), 5.0)
    assert norm == 5.0 and exact.tolist() == [3.0, 4.0]
    assert clip(np.zeros(0), 1.0)[1] == 0.0


def test_clipping_does_not_write_to_its_argument():
    delta = np.array([3.0, 4.0])
    for bound in (1.0, 10.0):
        clipped, _ = clip(delta, bound)
        clipped[:] = 0.0
        assert delta.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_never_released(bad):
    delta = np.ones(10)
    delta[4] = bad
    with pytest.raises(
        ProtocolError, match=f"party 3, clip: the update holds {bad} at coordinate 4 .1 of 10"
    ) as caught:
        clip(delta, 1.0, party=3)
    assert isinstance(caught.value, FedmpiError)
    with pytest.raises(ProtocolError, match="norm of the update exceeds"):
        clip(np.full(4, 1.7e308), 1.0)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
def test_a_clipping_bound_must_be_a_positive_number(bound):
    with pytest.raises(ConfigError):
        clip(np.ones(2), bound)


# --- conditional rounding ---


class Counting:
    """Counts how many words were asked for."""

    def __init__(self, source):
        self.source, self.read = source, 0

    def words(self, n):
        self.read += n
        return self.source.words(n)


def test_the_rounded_norm_bound():
    # beta = exp(-1/2): c**2 + d/4 + c + sqrt(d)/2, or c + sqrt(d) where that is smaller.
    assert rounded_norm_bound(55.0, 100) == pytest.approx(math.sqrt(55.0**2 + 25.0 + 55.0 + 5.0), rel=1e-15)
    assert rounded_norm_bound(1000.0, 1) == pytest.approx(math.sqrt(1000.0**2 + 0.25 + 1000.5), rel=1e-15)
    assert rounded_norm_bound(0.1, 1) == pytest.approx(math.sqrt(0.01 + 0.25 + 0.6), rel=1e-15)
    assert rounded_norm_bound(0.0, 1) == pytest.approx(math.sqrt(0.75), rel=1e-15)
    assert rounded_norm_bound(0.25, 1) <= 1.25


def test_a_bad_draw_is_redrawn_whole():
    # d = 2, c = 0.5: c'**2 = 0.25 + 0.5 + 0.5 + 0.707 = 1.96, so (1, 1) is too long and (0, 1) is not.
    x = np.array([0.3, 0.4])
    up, down = 0, 2**64 - 1
    assert round_conditionally(x, 0.5, Fixed([up, up], [down, up])).tolist() == [0, 1]
    assert round_conditionally(x, 0.5, Fixed([up, down])).tolist() == [1, 0]


def test_rounding_keeps_its_bound_where_it_bites(make):
    # Every coordinate at 5.5 and the norm at its bound: about one draw in seven is too long.
    x = np.full(100, 5.5)
    source = Counting(make())
    limit = rounded_norm_bound(55.0, 100)
    drawn = [round_conditionally(x, 55.0, source) for _ in range(2000)]
    assert all(int(np.sum(y * y)) <= limit * limit for y in drawn)
    assert all(y.dtype == np.int64 and set(np.unique(y)) <= {5, 6} for y in drawn)
    tries = source.read / x.size
    assert 1.05 * 2000 < tries < 2000 / (1.0 - math.exp(-0.5))
    # Conditioning pulls the mean towards shorter vectors, within the bound of the theorem.
    bias = np.mean(drawn, axis=0) - x
    assert -0.1 < bias.mean() < -0.005
    beta = math.exp(-0.5)
    assert np.linalg.norm(bias) <= beta / (1 - beta) * math.sqrt(100) + 5.0 * math.sqrt(100 * 0.25 / 2000)


def test_rounding_is_unbiased_inside_the_bound(make):
    rng = np.random.default_rng(5)
    x = rng.uniform(-3.0, 3.0, size=60)
    x[:3] = [-2.0, 0.0, 3.0]
    n = 4000
    source = Counting(make())
    drawn = np.array([round_conditionally(x, 2.0 * l2_norm(x), source) for _ in range(n)])
    assert source.read == n * 60  # the condition never bit
    assert np.all((drawn == np.floor(x)) | (drawn == np.ceil(x)))
    p = x - np.floor(x)
    exact = p == 0.0
    assert np.all(drawn[:, exact] == x[exact]) and exact.sum() == 3
    z = (drawn.mean(axis=0) - x)[~exact] / np.sqrt(p * (1 - p) / n)[~exact]
    assert stats.chi2.sf(float(np.sum(z * z)), z.size) > 1e-3


@given(st.lists(st.floats(-50.0, 50.0), min_size=1, max_size=30), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_rounding_never_leaves_its_bound(values, seed):
    x = np.array(values)
    c = l2_norm(x)
    y = round_conditionally(x, c, SeededWords(seed, "rounding", 0, 0))
    assert int(np.sum(y * y)) <= rounded_norm_bound(c, x.size) ** 2
    assert np.all(np.abs(y - x) < 1.0)


def test_rounding_refuses_what_was_not_clipped():
    with pytest.raises(
        ProtocolError, match="party 2, round: the update has norm 5 in integer units, expected at most 4.9"
    ):
        round_conditionally(np.array([3.0, 4.0]), 4.9, SOURCES["seeded"](), party=2)
    with pytest.raises(ProtocolError):
        round_conditionally(np.array([3.0, math.nan]), 4.9, SOURCES["seeded"]())
    with pytest.raises(ProtocolError):
        round_conditionally(np.array([2.0**30 + 1.0]), 2.0**30, SOURCES["seeded"]())
    with pytest.raises(ConfigError, match="too fine a scale"):
        round_conditionally(np.array([3.0, 4.0]), 2.0**31, SOURCES["seeded"]())


# --- the discrete Gaussian ---


def pmf(sigma, reach):
    y = np.arange(-reach, reach + 1)
    p = np.exp(-(y**2) / (2.0 * sigma**2))
    return y, p / p.sum()


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0, 1.42, 3.0, 11.0])
def test_the_sampler_has_the_exact_law(make, sigma):
    n = 300_000
    drawn = discrete_gaussian(sigma, n, make())
    assert drawn.shape == (n,) and drawn.dtype == np.int64
    reach = int(12 * sigma) + 3
    y, p = pmf(sigma, reach)
    assert np.abs(drawn).max() <= reach
    counts = np.bincount(drawn + reach, minlength=2 * reach + 1)
    # Rare values of either sign are counted together, so that the chi-square law applies.
    rare = p * n < 10
    groups = [(counts[~rare], p[~rare] * n)]
    for side in (rare & (y < 0), rare & (y > 0)):
        groups.append((np.array([counts[side].sum()]), np.array([p[side].sum() * n])))
    seen, expected = (np.concatenate(part) for part in zip(*groups, strict=True))
    statistic = np.sum((seen - expected) ** 2 / np.maximum(expected, 1.0))
    assert stats.chi2.sf(statistic, seen.size - 1) > 1e-3


@pytest.mark.parametrize("sigma", [40.0, 4e4, 46341.0, 3.3e9])
def test_moments_and_shape_for_large_sigma(make, sigma):
    n = 400_000
    drawn = discrete_gaussian(sigma, n, make())
    x = drawn / sigma
    assert abs(x.mean()) < 4.0 / math.sqrt(n)
    assert abs(x.var() - 1.0) < 4.0 * math.sqrt(2.0 / n)
    assert abs(np.mean(x**3)) < 4.0 * math.sqrt(15.0 / n)
    assert abs(np.mean(x**4) - 3.0) < 4.0 * math.sqrt(96.0 / n)
    # Against the normal law, jittered within the unit so that the lattice itself does not show.
    jitter = uniform(SeededWords(1, "jitter", 0, 0).words(n)) - 0.5
    assert stats.kstest((drawn + jitter) / sigma, "norm").pvalue > 1e-3
    # The lowest bits are as good as uniform: this is where a rounded float Gaussian gives itself away.
    assert stats.chisquare(np.bincount(drawn & 15, minlength=16)).pvalue > 1e-3
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4.0 / math.sqrt(n)


def test_draws_are_reproducible_and_keyed(make):
    one = discrete_gaussian(100.0, 1000, make())
    assert np.array_equal(one, discrete_gaussian(100.0, 1000, make()))
    other = discrete_gaussian(100.0, 1000, make(party=1))
    assert np.mean(one == other) < 0.05


def test_a_sum_of_shares_has_the_whole_variance(make):
    parties, n, sigma = 16, 100_000, 50.0
    total = sum(discrete_gaussian(sigma / math.sqrt(parties), n, make(party=i)) for i in range(parties))
    assert abs(total.var() / sigma**2 - 1.0) < 4.0 * math.sqrt(2.0 / n)


def test_no_noise_and_impossible_noise():
    source = Counting(SOURCES["seeded"]())
    assert not discrete_gaussian(0.0, 5, source).any()
    assert not discrete_gaussian(1e-9, 5, source).any()
    assert source.read == 0
    assert discrete_gaussian(3.0, 0, source).size == 0
    for bad in (-1.0, math.nan, math.inf, 2.0**47):
        with pytest.raises(ConfigError):
            discrete_gaussian(bad, 5, source)


@pytest.mark.parametrize("sigma", [0.7, 3.0, 2.0**15, 2.0**15.49, 2.0**15.51])
def test_proposals_are_not_wasted(sigma):
    # Three words a proposal, of which 0.41 to 0.48 are kept (and fewer where zero, with its one sign, is likely).
    source = Counting(SOURCES["seeded"]())
    discrete_gaussian(sigma, 200_000, source)
    assert 5.9 < source.read / 200_000 < 8.0


def test_memory_does_not_grow_with_the_draw():
    n = 1_000_000
    tracemalloc.start()
    try:
        drawn = discrete_gaussian(4e4, n, SOURCES["seeded"]())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - drawn.nbytes < 4 * 2**20
    assert noise._CHUNK < n


# --- sums of discrete Gaussians ---


def test_sum_divergence():
    assert sum_divergence(3.0, 1) == 0.0
    assert sum_divergence(1.0, 2) == pytest.approx(10.0 * math.exp(-(math.pi**2)), rel=1e-12)
    three = 10.0 * (math.exp(-(math.pi**2)) + math.exp(-4.0 / 3.0 * math.pi**2))
    assert sum_divergence(1.0, 3) == pytest.approx(three, rel=1e-12)
    assert sum_divergence(3.0, 70_000) < 1e-37
    assert sum_divergence(0.49, 2) == math.inf and sum_divergence(math.nan, 2) == math.inf


@pytest.mark.parametrize(("sigma", "parties"), [(0.6, 2), (0.8, 3), (1.0, 5)])
def test_sum_divergence_bounds_the_true_distance(sigma, parties):
    # The exact law of the sum, by convolution, against one discrete Gaussian of the whole variance.
    _, share = pmf(sigma, 12)
    total = share
    for _ in range(parties - 1):
        total = np.convolve(total, share)
    reach = (total.size - 1) // 2
    y, one = pmf(sigma * math.sqrt(parties), reach)
    near = np.abs(y) <= 4 * sigma * math.sqrt(parties)
    distance = np.max(np.abs(np.log(total[near] / one[near])))
    assert 1e-7 < distance <= sum_divergence(sigma, parties)


def test_the_multiplier_of_a_sum():
    assert sum_multiplier(4.0, 0.0, 1000) == 4.0
    assert sum_multiplier(4.0, 0.01, 100) == pytest.approx(1.0 / 0.35, rel=1e-12)
    assert sum_multiplier(0.0, 0.0, 10) == 0.0
    assert sum_multiplier(4.0, math.inf, 10) == 0.0


class Told:
    """A source that says what it was told, then goes on at random."""

    def __init__(self, *words):
        self.left, self.then = list(words), SeededWords(0, "then", 0, 0)

    def words(self, n):
        taken, self.left = self.left[:n], self.left[n:]
        return np.array([*taken, *self.then.words(n - len(taken)).tolist()], dtype=np.uint64)


@pytest.mark.parametrize("deviations", [11, 20, 40])
def test_the_noise_has_no_end(deviations):
    """A proposal that far out is kept if its coin is small enough, and a coin may be smaller than one word can say. Without that
    an update more than ten deviations from another could be told from it for certain."""
    sigma = 2.0**20
    log_keep = deviations - deviations**2 / 2 - 0.5  # y = deviations * t with t = sigma: exp(V - y^2 / 2 sigma^2 - 1/2)
    whole, rest = divmod(-log_keep / math.log(2.0), 64)
    tail = int(math.exp(-(deviations + 0.5)) * 2.0**64)
    extension = [2**63] if tail < 1 << 24 else []  # a small tail is lengthened too
    for smaller, kept in ((1.1, False), (0.9, True)):
        first = int(smaller * 2.0 ** (64 - rest))
        coin = [0] * int(whole) + [first]
        place = [0] + [0] * 65  # 66 proposals for one value; U = 0 and positive
        source = Told(*place, tail, *[2**64 - 1] * 65, coin[0], *[2**64 - 1] * 65, *extension, *coin[1:], 2**63)
        drawn = discrete_gaussian(sigma, 1, source)
        assert (drawn[0] == deviations * 2**20) == kept
