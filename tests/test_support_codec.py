"""The support codec: round trips, the size law, the distance from the entropy, canonicity, hostile bytes."""

import tracemalloc
from itertools import combinations, product
from math import comb, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.errors import WireError
from fedmpi.wire.support import (
    MAX_DIMENSION,
    decode_support,
    encode_support,
    entropy_bits,
    expected_support_bits,
    golomb_modulus,
)

DENSITIES = (
    *(0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18),
    *(0.2, 0.22, 0.24, 0.2463, 0.25, 0.26, 0.28, 0.3, 0.32, 0.34, 0.36, 0.37, 0.38, 0.3819, 0.382, 0.39, 0.4, 0.42),
    *(0.44, 0.46, 0.48, 0.5),
)
OVERHEAD_BYTES = 16


def uniform_support(dimension, count, seed=0):
    rng = np.random.default_rng((seed, dimension, count))
    return np.sort(rng.choice(dimension, count, replace=False))


def size_by_hand(indices, dimension):
    """Count, w bits a gap, a bit for each long remainder, and a unary quotient a gap: each stream in whole bytes."""
    coded = indices if 2 * len(indices) <= dimension else np.setdiff1d(np.arange(dimension), indices)
    size = -(-dimension.bit_length() // 8)
    if not len(coded):
        return size
    modulus = golomb_modulus(len(coded), dimension)
    width = modulus.bit_length() - 1
    quotients, remainders = np.divmod(np.diff(coded, prepend=-1) - 1, modulus)
    streams = len(coded) * width, np.count_nonzero(remainders >= (2 << width) - modulus), len(coded) + quotients.sum()
    return size + sum(-(-int(bits) // 8) for bits in streams)


def check_round_trip(indices, dimension):
    data = encode_support(indices, dimension)
    back = decode_support(data, dimension)
    assert back.dtype == np.int64
    assert np.array_equal(back, indices)
    assert size_by_hand(indices, dimension) == len(data)
    return data


@st.composite
def small_supports(draw):
    dimension = draw(st.integers(0, 300))
    members = draw(st.integers(0, (1 << dimension) - 1))
    return np.array([i for i in range(dimension) if members >> i & 1], np.int64), dimension


@st.composite
def uniform_supports(draw):
    dimension = draw(st.integers(1, 20_000))
    count = draw(st.integers(0, dimension))
    return uniform_support(dimension, count, draw(st.integers(0, 2**32))), dimension


@st.composite
def clustered_supports(draw):
    """Runs of neighbours at arbitrary places of a possibly huge dimension."""
    dimension = draw(st.integers(1, 1 << 33))
    runs = draw(st.lists(st.tuples(st.integers(0, dimension - 1), st.integers(1, 200)), max_size=8))
    members = [np.arange(start, min(start + length, dimension)) for start, length in runs]
    return (np.unique(np.concatenate(members)) if members else np.empty(0, np.int64)), dimension


@given(small_supports())
@settings(deadline=None)
def test_round_trip_small(case):
    check_round_trip(*case)


@given(uniform_supports())
@settings(deadline=None)
def test_round_trip_uniform(case):
    check_round_trip(*case)


@given(clustered_supports())
@settings(deadline=None)
def test_round_trip_clustered(case):
    indices, dimension = case
    # The complement of a sparse support in a huge dimension would be the whole range.
    if 2 * indices.size <= dimension or dimension < 1 << 16:
        check_round_trip(indices, dimension)


def test_every_support_of_small_dimensions():
    for dimension in range(9):
        encodings = set()
        for count in range(dimension + 1):
            for members in combinations(range(dimension), count):
                encodings.add(check_round_trip(np.array(members, np.int64), dimension))
        assert len(encodings) == 2**dimension


@pytest.mark.parametrize("dimension", (1, 255, 256, 10**6))
def test_empty_and_full_cost_the_count_alone(dimension):
    count_bytes = (dimension.bit_length() + 7) // 8
    assert len(check_round_trip(np.empty(0, np.int64), dimension)) == count_bytes
    assert len(check_round_trip(np.arange(dimension), dimension)) == count_bytes


@pytest.mark.parametrize("dimension", (1, 2, 3, 1000, 1 << 31, (1 << 31) + 5, MAX_DIMENSION))
def test_one_and_few_indices(dimension):
    for members in ([0], [dimension - 1], [0, dimension - 1], [0, dimension // 2, dimension - 1]):
        indices = np.unique(members)
        data = check_round_trip(indices, dimension)
        assert 8 * len(data) <= entropy_bits(indices.size, dimension) + 8 * OVERHEAD_BYTES


def test_all_but_a_few_cost_as_much_as_a_few():
    few = np.array([3, 70_000, 99_999])
    most = np.setdiff1d(np.arange(100_000), few)
    assert len(check_round_trip(most, 100_000)) == len(check_round_trip(few, 100_000))


@pytest.mark.parametrize("dimension", (1000, 20_000, 270_000))
def test_within_five_percent_of_the_entropy(dimension):
    for density in DENSITIES:
        for count in {round(density * dimension), dimension - round(density * dimension)}:
            size = len(encode_support(uniform_support(dimension, count), dimension))
            assert 8 * size <= 1.05 * entropy_bits(count, dimension) + 8 * OVERHEAD_BYTES, (dimension, count)


@pytest.mark.parametrize("dimension", (270_000, 10**7, 1 << 31))
def test_expected_size_is_within_five_percent_at_every_density(dimension):
    # A finer grid than can be encoded: densities in between must not be unlucky.
    for density in np.geomspace(0.001, 0.5, 400):
        count = round(density * dimension)
        expected, entropy = expected_support_bits(count, dimension), entropy_bits(count, dimension)
        assert entropy <= expected <= 1.043 * entropy + 8 * 8


def test_no_support_costs_much_more_than_a_random_one():
    dimension = 30_000
    for count in (10, 300, 3000, 9000, 12_000, 15_000):
        modulus = golomb_modulus(count, dimension)
        # Every gap longest in its remainder, the slack in front; and everything at the very end.
        wide = np.minimum(modulus, dimension // count)
        spaced = dimension - 1 - wide * np.arange(count)[::-1]
        end = np.arange(dimension - count, dimension)
        for indices in (spaced, end):
            size = len(check_round_trip(indices, dimension))
            assert 8 * size <= expected_support_bits(count, dimension) + 1.5 * count + 16


@pytest.mark.parametrize("dimension, count", [(50, 1), (200, 100), (1000, 40), (5000, 1000), (40_000, 12_000)])
def test_expected_size_is_the_mean_size(dimension, count):
    sizes = [8 * len(encode_support(uniform_support(dimension, count, seed), dimension)) for seed in range(200)]
    spread = np.std(sizes) / np.sqrt(len(sizes))
    assert abs(np.mean(sizes) - expected_support_bits(count, dimension)) < 8 + 4 * spread


def test_expected_size_does_not_jump_where_the_formula_changes():
    below, above = (expected_support_bits(k, 10**6) for k in (1 << 13, (1 << 13) + 1))
    assert 0 < above - below < 20


@pytest.mark.parametrize("dimension", (0, 1, 10, 1000, 40_000))
def test_entropy_is_the_logarithm_of_the_binomial(dimension):
    for count in {0, 1, dimension // 3, dimension // 2, dimension}:
        if count <= dimension:
            exact = comb(dimension, count)
            shift = max(0, exact.bit_length() - 60)
            assert entropy_bits(count, dimension) == pytest.approx(log2(exact >> shift) + shift, abs=1e-5)


@pytest.mark.parametrize(
    "indices, what",
    [
        ([1, 1], "strictly increasing"),
        ([2, 1], "strictly increasing"),
        ([-1, 3], "expected 0 to 9"),
        ([3, 10], "expected 0 to 9"),
        ([0.5], "vector of integers"),
        ([[1, 2]], "vector of integers"),
        (np.array([0, 2**63 + 1], np.uint64), "strictly increasing"),
    ],
)
def test_what_is_not_a_support_is_refused(indices, what):
    with pytest.raises(ValueError, match=what):
        encode_support(indices, 10)


def test_impossible_dimensions_and_counts():
    for dimension in (-1, MAX_DIMENSION + 1):
        with pytest.raises(ValueError, match="dimension"):
            encode_support([], dimension)
        with pytest.raises(ValueError, match="dimension"):
            decode_support(b"", dimension)
    for function in (entropy_bits, expected_support_bits):
        with pytest.raises(ValueError, match="expected 0 to the dimension"):
            function(11, 10)


def test_any_buffer_and_any_integer_dtype():
    data = encode_support([1, 5, 77], 100)
    assert encode_support(np.array([1, 5, 77], np.uint8), np.int64(100)) == data
    framed = memoryview(b"x" + data + b"y")[1:-1]
    for buffer in (bytearray(data), framed, np.frombuffer(data, np.uint8), np.frombuffer(data, np.int8)):
        assert decode_support(buffer, np.int64(100)).tolist() == [1, 5, 77]
    assert decode_support(np.empty(0, np.uint8), 0).size == 0


# Hostile bytes.


def accepted_only_if_canonical(data, dimension):
    try:
        indices = decode_support(data, dimension, max_count=1 << 20)
    except WireError:
        return False
    assert encode_support(indices, dimension) == bytes(data)
    return True


def test_short_strings_exhaustively():
    # Low bits vary the streams, high bits the padding.
    alphabet = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64, 128, 255)
    for dimension in (1, 2, 3, 4, 5, 7, 10):
        for count in range(dimension + 2):
            accepted = 0
            for length in range(4):
                for body in product(alphabet, repeat=length):
                    accepted += accepted_only_if_canonical(bytes([count, *body]), dimension)
            assert accepted <= (comb(dimension, count) if count <= dimension else 0)


@given(st.binary(max_size=60), st.integers(0, 1 << 20))
@settings(deadline=None, max_examples=300)
def test_random_bytes(data, dimension):
    accepted_only_if_canonical(data, dimension)


@given(st.data(), st.one_of(small_supports(), uniform_supports()))
@settings(deadline=None, max_examples=300)
def test_mutated_encodings(data, case):
    indices, dimension = case
    forged = bytearray(encode_support(indices, dimension))
    if not forged:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        forged[data.draw(st.integers(0, len(forged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    accepted_only_if_canonical(forged, dimension)


@given(st.one_of(small_supports(), clustered_supports()), st.binary(min_size=1, max_size=9))
@settings(deadline=None, max_examples=100)
def test_truncated_and_extended(case, tail):
    indices, dimension = case
    if 2 * indices.size > dimension > 1 << 16:
        return
    data = encode_support(indices, dimension)
    for end in range(max(0, len(data) - 12), len(data)):
        assert not accepted_only_if_canonical(data[:end], dimension)
    with pytest.raises(WireError):
        decode_support(data + b"\0", dimension)
    accepted_only_if_canonical(data + tail, dimension)


@pytest.mark.parametrize("count", (5, 100, 380, 500, 900))
def test_a_count_that_lies(count):
    data = encode_support(uniform_support(1000, count), 1000)
    for lie in range(1001):
        accepted = accepted_only_if_canonical(lie.to_bytes(2, "little") + data[2:], 1000)
        # The same streams with the count of the complement are the complement; the ones give any other count away.
        assert accepted == (lie in (count, 1000 - count))
    with pytest.raises(WireError, match="expected at most the dimension 1000"):
        decode_support((1001).to_bytes(2, "little") + data[2:], 1000)


@pytest.mark.parametrize("count", (1, 3, 50, 90, 120))
def test_an_index_out_of_range(count):
    # An encoding for a dimension larger by one, where both have the same modulus: only the last index gives it away.
    dimension = next(d for d in range(251, 255) if golomb_modulus(count, d) == golomb_modulus(count, d - 1))
    indices = np.append(np.arange(count - 1), dimension - 1)
    with pytest.raises(WireError, match=f"index {dimension - 1}, expected less than|of quotients, expected at most"):
        decode_support(encode_support(indices, dimension), dimension - 1)


def test_a_quotient_that_would_wrap_around():
    # One index with a quotient whose product with the modulus is a valid index again modulo 2^64.
    modulus = golomb_modulus(1, MAX_DIMENSION)
    quotient = next(q for q in range(1 << 10, 1 << 22) if q * modulus % (1 << 64) < MAX_DIMENSION // 4)
    honest = encode_support([0], MAX_DIMENSION)
    stream = (1 << quotient).to_bytes(quotient // 8 + 1, "little")
    with pytest.raises(WireError, match="of quotients, expected at most 1"):
        decode_support(honest[:-1] + stream, MAX_DIMENSION)


@pytest.mark.parametrize("count", (1 << 12, 1 << 30, 1 << 39, (1 << 40) - (1 << 20)))
def test_an_implausible_count_allocates_nothing(count):
    data = count.to_bytes(6, "little") + b"\xff" * 50
    tracemalloc.start()
    with pytest.raises(WireError, match="expected at least"):
        decode_support(data, 1 << 40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("density", (0.001, 0.02, 0.2, 0.3, 0.5))
def test_memory_is_a_multiple_of_the_length(density):
    dimension = 300_000
    data = encode_support(uniform_support(dimension, int(dimension * density)), dimension)
    tracemalloc.start()
    decode_support(data, dimension)
    honest = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    with pytest.raises(WireError):
        decode_support(data[:3] + b"\xff" * (len(data) - 3), dimension)
    forged = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(honest, forged) < 256 * len(data) + 100_000


def test_max_count_refuses_a_huge_support_before_building_it():
    # Six bytes that rightly stand for every one of 2^40 indices.
    data = (1 << 40).to_bytes(6, "little")
    with pytest.raises(WireError, match="expected at most 1000000"):
        decode_support(data, 1 << 40, max_count=10**6)
    full = encode_support(np.arange(50), 50)
    assert decode_support(full, 50, max_count=50).size == 50
    with pytest.raises(WireError, match="50 indices, expected at most 49"):
        decode_support(full, 50, max_count=49)
