"""Packed integers: the layout against a big-integer reference, round trips at every width, and what must be refused."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.errors import WireError
from fedmpi.wire.bits import PackedSum, pack, pack_signed, packed_size, unpack, unpack_signed

WIDTHS = range(1, 65)
# Around the group of 64 values, the switch to whole groups, and beyond one chunk.
COUNTS = (0, 1, 7, 8, 63, 64, 65, 1023, 1024, 1087, 5000)
SEVERAL_CHUNKS = 3 * (1 << 17) + 77


def reference_pack(values, bits):
    """The definition: one big integer with value i at bit i * bits."""
    total = sum(int(v) << (i * bits) for i, v in enumerate(values))
    return total.to_bytes((len(values) * bits + 7) // 8, "little")


def random_values(count, bits, seed=0):
    return np.random.default_rng((seed, count, bits)).integers(0, 1 << bits, count, dtype=np.uint64, endpoint=False)


@st.composite
def vectors(draw):
    bits = draw(st.integers(1, 64))
    return draw(st.lists(st.integers(0, (1 << bits) - 1), max_size=40)), bits


def test_layout_of_the_docstring():
    assert pack(np.array([5, 1, 7], np.uint64), 3) == bytes([0b11_001_101, 0b0000000_1])


@given(vectors())
@settings(deadline=None)
def test_pack_is_its_definition(vector):
    values, bits = vector
    array = np.array(values, np.uint64)
    data = pack(array, bits)
    assert data == reference_pack(values, bits)
    assert np.array_equal(unpack(data, len(values), bits), array)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_width_at_every_path(bits):
    for count in COUNTS:
        values = random_values(count, bits)
        data = pack(values, bits)
        assert data == reference_pack(values, bits)
        assert len(data) == packed_size(count, bits)
        back = unpack(data, count, bits)
        assert back.dtype == np.uint64
        assert np.array_equal(back, values)


@pytest.mark.parametrize("bits", (1, 5, 8, 21, 32, 63))
def test_several_chunks(bits):
    values = random_values(SEVERAL_CHUNKS, bits)
    data = pack(values, bits)
    assert len(data) == packed_size(values.size, bits)
    assert np.array_equal(unpack(data, values.size, bits), values)
    # Chunks are joined without a seam: a window across the boundary is the definition too.
    start = (1 << 17) - 8
    window = data[start * bits // 8 :][: packed_size(16, bits)]
    assert window == reference_pack(values[start : start + 16], bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_signed_extremes(bits):
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    values = np.array([low, high, 0, -1 if bits > 1 else 0, low], np.int64)
    data = pack_signed(values, bits)
    assert data == reference_pack([int(v) % (1 << bits) for v in values], bits)
    back = unpack_signed(data, values.size, bits)
    assert back.dtype == np.int64
    assert np.array_equal(back, values)


@given(st.integers(1, 64), st.integers(0, 3000), st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_signed_round_trip(bits, count, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1, count, dtype=np.int64, endpoint=True)
    assert np.array_equal(unpack_signed(pack_signed(values, bits), count, bits), values)


@pytest.mark.parametrize("bits", range(1, 64))
def test_values_that_do_not_fit(bits):
    with pytest.raises(ValueError, match=f"{1 << bits} does not fit"):
        pack(np.array([0, 1 << bits], np.uint64), bits)
    with pytest.raises(ValueError, match="does not fit"):
        pack(np.array([0, -1]), bits)
    for outside in (1 << (bits - 1), -(1 << (bits - 1)) - 1):
        with pytest.raises(ValueError, match=f"{outside} does not fit"):
            pack_signed(np.array([0, outside]), bits)


def test_unsigned_beyond_int64_is_not_a_signed_value():
    with pytest.raises(ValueError, match="does not fit"):
        pack_signed(np.array([1 << 63], np.uint64), 64)


@pytest.mark.parametrize("array", (np.zeros(3), np.zeros((2, 2), np.uint64), np.array([True])))
def test_only_vectors_of_integers(array):
    for function in (pack, pack_signed):
        with pytest.raises(ValueError, match="expected a vector of integers"):
            function(array, 8)


@pytest.mark.parametrize("bits", (0, -1, 65))
def test_impossible_widths(bits):
    with pytest.raises(ValueError, match="expected 1 to 64"):
        pack(np.zeros(1, np.uint64), bits)
    with pytest.raises(ValueError, match="expected 1 to 64"):
        unpack(b"", 0, bits)
    with pytest.raises(ValueError, match="expected 1 to 64"):
        packed_size(1, bits)


def test_negative_count():
    with pytest.raises(ValueError, match="expected 0 or more"):
        unpack(b"", -1, 8)


@pytest.mark.parametrize("bits", WIDTHS)
def test_wrong_length(bits):
    data = pack(random_values(20, bits), bits)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(WireError, match=f"expected {len(data)} for 20 values"):
            unpack(wrong, 20, bits)
        with pytest.raises(WireError):
            unpack_signed(wrong, 20, bits)


@pytest.mark.parametrize("bits", [b for b in WIDTHS if 5 * b % 8])
def test_nonzero_padding(bits):
    data = bytearray(pack(random_values(5, bits), bits))
    for bit in range(5 * bits % 8, 8):
        forged = bytearray(data)
        forged[-1] |= 1 << bit
        with pytest.raises(WireError, match="padding"):
            unpack(forged, 5, bits)


@given(st.binary(max_size=40), st.integers(0, 60), st.integers(1, 64))
@settings(deadline=None)
def test_what_unpacks_packs_to_the_same_bytes(data, count, bits):
    try:
        values = unpack(data, count, bits)
    except WireError:
        return
    assert pack(values, bits) == data


def test_any_buffer_and_any_integer_dtype():
    values = random_values(100, 7)
    data = pack(values, 7)
    for dtype in (np.uint8, np.int16, np.int64):
        assert pack(values.astype(dtype), 7) == data
    assert pack(np.repeat(values, 2)[::2], 7) == data
    # An odd offset, as in the middle of a message.
    framed = memoryview(b"x" + data + b"y")[1:-1]
    for buffer in (data, bytearray(data), framed, np.frombuffer(data, np.uint8)):
        assert np.array_equal(unpack(buffer, np.int64(100), np.int64(7)), values)
    assert unpack(np.empty(0, np.uint8), 0, 7).size == 0


@pytest.mark.parametrize("dtype", (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64))
def test_every_dtype_at_every_width_in_a_long_vector(dtype):
    for bits in WIDTHS:
        values = random_values(300, min(bits, np.iinfo(dtype).max.bit_length()))
        expected = reference_pack(values, bits)
        assert pack(values.astype(dtype), bits) == expected
        assert pack(np.repeat(values.astype(dtype), 2)[::2], bits) == expected


def test_temporary_memory_is_bounded():
    values = random_values(1 << 21, 21)
    tracemalloc.start()
    data = pack(values, 21)
    packing = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    back = unpack(data, values.size, 21)
    unpacking = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    # Beside the result: the pieces it is joined from when packing, and a few chunks of 1 MiB.
    assert packing < 2 * len(data) + (6 << 20)
    assert unpacking < back.nbytes + (6 << 20)


def test_an_implausible_count_allocates_nothing():
    tracemalloc.start()
    with pytest.raises(WireError):
        unpack(b"\1" * 10, 1 << 60, 21)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 64), st.integers(0, 300), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_a_sum_of_packed_vectors_is_the_sum_of_the_vectors(bits, count, vectors, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**bits - 1, (vectors, count), dtype=np.uint64, endpoint=True)
    total = PackedSum(count, bits)
    for row in values:
        total.add(pack(row, bits))
    mask = np.uint64(2**bits - 1)
    assert np.array_equal(total.total(), values.sum(axis=0, dtype=np.uint64) & mask)


def test_a_sum_refuses_what_is_not_a_vector_of_its_shape_and_keeps_what_it_has():
    total, good = PackedSum(101, 21), pack(np.arange(101, dtype=np.uint64), 21)
    total.add(good)
    for wrong in (good[:-1], good + b"\0", good[:-1] + b"\xff"):
        with pytest.raises(WireError):
            total.add(wrong)
    assert total.total().tolist() == list(range(101))
