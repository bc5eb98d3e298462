"""Sums of integers on the wire: they come back to the last bit, whatever they are, and noise takes no more than its entropy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedmpi.errors import WireError
from fedmpi.privacy.noise import discrete_gaussian
from fedmpi.randomness.words import SeededWords
from fedmpi.wire.arrays import pack_arrays, read_arrays
from fedmpi.wire.bits import packed_size
from fedmpi.wire.sums import decode_sum, encode_sum, entropy_bits, expected_size, most_size

small, any_int = st.integers(-50, 50), st.integers(-(2**63), 2**63 - 1)
vectors = st.one_of(
    arrays.arrays(np.int64, st.integers(0, 300), elements=small),
    arrays.arrays(np.int64, st.integers(0, 40), elements=any_int),
    arrays.arrays(np.int64, st.integers(0, 40), elements=st.integers(-(2**31), 2**31)),
    arrays.arrays(np.int64, st.integers(0, 40), elements=st.just(7)),
)


@given(vectors)
def test_a_sum_comes_back(values):
    assert np.array_equal(decode_sum(encode_sum(values), len(values)), values)


@given(vectors, st.integers(1, 7))
def test_a_sum_of_rows_comes_back(values, width):
    values = values[: len(values) // width * width]
    assert np.array_equal(decode_sum(encode_sum(values, width), len(values)), values)


@pytest.mark.parametrize("deviation", [0.7, 3.0, 40.0, 1448.0, 65536.5, 3e7])
def test_noise_takes_its_entropy(deviation):
    """Within half a percent and the head; and the closed form says so beforehand."""
    count = 20_000
    values = discrete_gaussian(deviation, count, SeededWords(0, "sums", 0, 0))
    size = len(encode_sum(values))
    assert size >= count * entropy_bits(deviation) / 8 * 0.995
    # A bell curve over steps is not quite the discrete Gaussian where it is as narrow as a step.
    assert size <= (1.005 if deviation > 1 else 1.03) * expected_size(count, deviation)
    width = 1 + math.ceil(math.log2(9 * deviation + 1))
    assert size < packed_size(count, width), "and less than the width in which it does not wrap"


def _least_bound(values):
    """Of what is known of a sum, its length and its largest value, the least."""
    largest = max((abs(int(value)) for value in values), default=0)
    return most_size(len(values), math.sqrt(sum(int(value) ** 2 for value in values) / max(1, len(values))), largest)


@given(vectors)
def test_no_sum_is_longer_than_what_its_norm_allows(values):
    assert len(encode_sum(values)) <= _least_bound(values)


@pytest.mark.parametrize("spread", ["gauss", "uniform", "heavy", "spike", "sign", "sparse"])
@pytest.mark.parametrize("size", [1.5, 300.0, 2.0**19, 2.0**24, 2.0**40])
def test_no_long_sum_is_longer_than_what_its_norm_allows_whatever_its_law(spread, size):
    rng, count = np.random.default_rng(0), 20_000
    values = {
        "gauss": rng.normal(size=count),
        "uniform": rng.uniform(-1, 1, count),
        "heavy": rng.standard_t(1.1, count),
        "spike": np.eye(1, count)[0] * 1000 + rng.normal(size=count) / 1000,
        "sign": rng.choice([-1.0, 1.0], count),
        "sparse": rng.normal(size=count) * (rng.uniform(size=count) < 0.01),
    }[spread]
    values = np.rint(size * values).clip(-(2.0**61), 2.0**61).astype(np.int64)
    assert len(encode_sum(values)) <= _least_bound(values)


def test_entropy_is_that_of_the_law():
    for deviation in (0.5, 1.0, 2.0):
        spread = np.arange(-200, 201)
        shares = np.exp(-np.square(spread) / (2 * deviation**2))
        shares = shares[shares > 0] / shares.sum()
        assert entropy_bits(deviation) == pytest.approx(-(shares * np.log2(shares)).sum(), abs=2e-2)


def test_rows_of_different_scales_are_told_apart():
    rng = np.random.default_rng(0)
    rows = np.exp(rng.normal(3, 1.5, (500, 1))) * rng.standard_normal((500, 20)) * np.r_[0, 30, np.ones(18) * 5]
    values = np.rint(rows).astype(np.int64).reshape(-1)
    assert len(encode_sum(values, 20)) < 0.85 * len(encode_sum(values))


@given(st.binary(max_size=60), st.integers(0, 40))
def test_what_is_no_sum_is_refused(data, count):
    try:
        values = decode_sum(data, count)
    except WireError:
        return
    assert values.shape == (count,) and values.dtype == np.int64


@pytest.mark.parametrize(
    "data, count, said",
    [
        (b"", 1, "1 bytes announced, 0 left"),
        (b"\7", 1, "scheme 7, expected 0 to 4"),
        (b"\3\0" + bytes(4) + b"\0\x20\0\0" + bytes(4), 1, "values from 0 to 8192"),
        (b"\3\0" + bytes(4) + b"\1\0\0\0\2\0\0\0\x20", 4, "rows of 2 with one table"),
        (b"\4\x40" + bytes(4) + b"\1\0\0\0" + bytes(5), 1, "above 64 bits"),
        (b"\0" + bytes(8) + b"\x41", 1, "values of 65 bits"),
        (b"\1" + bytes(13), 1, "values from 0 to 0"),
        (b"\1\0" + bytes(4) + b"\1\0\0\0\3\0\0\0", 4, "rows of 3 for 4 values"),
        (b"\1\0" + bytes(4) + b"\1\0\0\0\0\0\0\0\x20abc", 4, "3 bytes are not a whole number of words"),
    ],
)
def test_what_is_wrong_is_said(data, count, said):
    with pytest.raises(WireError, match=said):
        decode_sum(data, count)


def test_arrays_come_back():
    given = {"first": np.arange(6.0).reshape(2, 3), "steps": np.array(3), "none": np.zeros(0), "x": np.float32([1, 2])}
    found = read_arrays(pack_arrays(given))
    assert list(found) == list(given)
    for name, values in given.items():
        assert found[name].dtype == values.dtype and np.array_equal(found[name], values)
        assert found[name].shape == values.shape
    assert pack_arrays({}) == b"" and read_arrays(b"") == {}


@pytest.mark.parametrize(
    "head, said",
    [
        (b"[", "cannot be read"),
        (b"[1]", "cannot be read"),
        (b'[["a", "|O", [1]]]', "of type '|O'"),
        (b'[["a", "<f8", [-1]]]', "shape"),
        (b'[["a", "<f8", [9]]]', "72 bytes announced"),
        (b"[]x", "cannot be read"),
    ],
)
def test_what_is_no_list_of_arrays_is_refused(head, said):
    import re

    with pytest.raises(WireError, match=re.escape(said)):
        read_arrays(len(head).to_bytes(4, "little") + head)
