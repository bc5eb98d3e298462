"""Fixed-width integers, tightly packed.

Layout
    The stream is one long bit string. Bit j of it is bit (j mod 8) of byte j // 8, least significant bit first. Value i
    occupies the bits [i * bits, (i + 1) * bits), its own least significant bit first; a value may straddle bytes. The
    unused bits of the last byte are zero. `packed_size(count, bits)` = ceil(count * bits / 8) bytes; neither the count
    nor the width is stored.

        bits = 3, values 5, 1, 7:   byte 0 = 0b11_001_101, byte 1 = 0b0000000_1

    For widths of 8, 16, 32 and 64 bits this is the array of little-endian integers itself.

How it is vectorised
    Chunks of values are byte-aligned, and the temporary memory is a small multiple of 8 * _CHUNK bytes whatever the length
    of the input. What does not fill a group goes through a matrix of single bits.

    Packing: two neighbours of b bits are one value of 2b bits, so neighbours are joined as long as that fits a word at
    any bit of a byte. Eight values of b bits fill b bytes: values c, c + 8, c + 16, ... start b bytes apart and at the
    same bit of a byte, and each such column is one shift and one OR on a strided view of the bytes as 64-bit words.

    Unpacking: 64 / gcd(bits, 64) values fill a whole number of 64-bit words, and at the same offsets in every such group.
    A chunk of words is therefore a matrix with one group per row; column c of the values is shifted by the constant
    c * bits mod 64 out of word c * bits // 64, and out of the next word where it straddles.

`pack` raises ValueError for values that do not fit, `unpack` raises WireError for bytes `pack` cannot have written, so
there is exactly one byte string for each array.
"""

from __future__ import annotations

from math import gcd
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import WireError

Words = NDArray[np.uint64]
Octets = NDArray[np.uint8]
Data = bytes | bytearray | memoryview | Octets

_WORD_BITS = 64
# 1 MiB of uint64: below 2^16 the fixed cost of a numpy call shows, above 2^18 the chunk leaves the cache.
_CHUNK = 1 << 17
# With fewer groups than this the ~100 numpy calls of the column loop cost more than the bit matrix.
_MIN_GROUPS = 16
_BYTE_WIDTHS: dict[int, np.dtype[Any]] = {
    8: np.dtype("<u1"),
    16: np.dtype("<u2"),
    32: np.dtype("<u4"),
    64: np.dtype("<u8"),
}
_LITTLE_U64 = np.dtype("<u8")
_LOADABLE = _WORD_BITS - 7  # widths that fit a word at any bit of a byte
_ALIGNED = 128  # values at a time that pack joins in pairs, up to four times over, and still are groups of eight


def packed_size(count: int, bits: int) -> int:
    """Bytes taken by `count` values of `bits` bits each."""
    count, bits = _checked_shape(count, bits)
    return (count * bits + 7) // 8


def pack(values: NDArray[Any], bits: int) -> bytes:
    """Packs a vector of integers in [0, 2^bits). Any integer dtype will do."""
    values = _integer_vector(values)
    _, bits = _checked_shape(values.size, bits)
    if values.size:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >> bits:
            raise ValueError(f"value {low if low < 0 else high} does not fit in {bits} unsigned bits")
    return b"".join(_pack_chunk(values[start : start + _CHUNK], bits) for start in range(0, values.size, _CHUNK))


def unpack(data: Data, count: int, bits: int) -> Words:
    """The `count` values of `bits` bits each in `data`, as uint64. The length is checked before any allocation."""
    count, bits = _checked_shape(count, bits)
    raw = _payload(data, count, bits)
    values = np.empty(count, np.uint64)
    for start in range(0, count, _CHUNK):
        chunk = values[start : start + _CHUNK]
        first = start * bits // 8
        _unpack_chunk(raw[first : first + packed_size(chunk.size, bits)], bits, chunk)
    return values


class PackedSum:
    """The sum, modulo 2^bits, of vectors that `pack` packed, without unpacking each of them.

    Eight values fill `bits` bytes, so values j, j + 8, j + 16 ... lie `bits` bytes apart and start at the same bit of a
    byte: one strided load and one shift bring them to the bottom of a machine word. What is left above them belongs to
    their neighbours, and does no harm: in a sum it only disturbs bits above 2^bits, which are cut off at the end. That
    costs a seventh of unpacking and adding.
    """

    def __init__(self, count: int, bits: int):
        self._count, self._bits = _checked_shape(count, bits)
        self._direct = _BYTE_WIDTHS.get(bits)
        # A value and the up to 7 bits below it in its first byte have to fit the word.
        self._word = np.dtype("<u4" if bits <= 25 else "<u8")
        tail = 8 // bits + 2  # groups at the end from which a load would run past the data
        self._groups = 0 if self._direct or bits > 57 else max(0, count // 8 - tail)
        self._heads = np.zeros((8, self._groups), self._word.newbyteorder("="))
        self._rest = np.zeros(count - 8 * self._groups, self._direct or np.uint64)

    def add(self, data: Data) -> None:
        """One more vector; WireError if it is not one of this shape, and then nothing is added."""
        raw = _payload(data, self._count, self._bits)
        if self._direct:
            self._rest += np.frombuffer(raw, self._direct)
            return
        for position, head in enumerate(self._heads if self._groups else ()):
            first, shift = divmod(position * self._bits, 8)
            values = np.ndarray((self._groups,), self._word, raw, first, (self._bits,))
            head += values >> head.dtype.type(shift)
        self._rest += unpack(raw[self._groups * self._bits :], self._rest.size, self._bits)

    def total(self) -> Words:
        heads = self._heads.T.reshape(-1).astype(np.uint64)
        total: Words = np.concatenate([heads, self._rest.astype(np.uint64)])
        total &= _mask(self._bits)
        return total


def pack_signed(values: NDArray[Any], bits: int) -> bytes:
    """Packs integers in [-2^(bits-1), 2^(bits-1)) as their residues modulo 2^bits (two's complement)."""
    values = _integer_vector(values)
    _, bits = _checked_shape(values.size, bits)
    if values.size:
        low, high = int(values.min()), int(values.max())
        bound = 1 << (bits - 1)
        if low < -bound or high >= bound:
            raise ValueError(f"value {low if low < -bound else high} does not fit in {bits} signed bits")
    mask = _mask(bits)
    return b"".join(
        _pack_chunk(values[start : start + _CHUNK].astype(np.int64, copy=False).view(np.uint64) & mask, bits)
        for start in range(0, values.size, _CHUNK)
    )


def unpack_signed(data: Data, count: int, bits: int) -> NDArray[np.int64]:
    """The inverse of `pack_signed`, as int64."""
    values = unpack(data, count, bits)
    # (v ^ s) - s with s = 2^(bits-1) carries the sign bit into the bits above it; uint64 arithmetic wraps as needed.
    sign = np.uint64(1 << (index(bits) - 1))
    np.bitwise_xor(values, sign, out=values)
    np.subtract(values, sign, out=values)
    return values.view(np.int64)


def _checked_shape(count: int, bits: int) -> tuple[int, int]:
    # As Python integers: their products below must not wrap.
    count, bits = index(count), index(bits)
    if not 1 <= bits <= _WORD_BITS:
        raise ValueError(f"width of {bits} bits, expected 1 to {_WORD_BITS}")
    if count < 0:
        raise ValueError(f"count of {count} values, expected 0 or more")
    return count, bits


def _integer_vector(values: NDArray[Any]) -> NDArray[Any]:
    values = np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"array of {values.dtype} with shape {values.shape}, expected a vector of integers")
    return values


def _payload(data: Data, count: int, bits: int) -> Octets:
    """`data` as bytes, once its length and its padding are those of `count` values."""
    size = packed_size(count, bits)
    raw = np.frombuffer(data, np.uint8)
    if raw.size != size:
        raise WireError(f"packed integers: {raw.size} bytes, expected {size} for {count} values of {bits} bits")
    used = count * bits % 8
    if used and int(raw[-1]) >> used:
        raise WireError(f"packed integers: nonzero padding in the last byte, expected {8 - used} zero bits")
    return raw


def _mask(bits: int) -> np.uint64:
    mask: np.uint64 = np.uint64((1 << bits) - 1)
    return mask


def _groups(count: int, bits: int) -> tuple[int, int, int]:
    """Whole groups in `count` values, values per group, words per group."""
    common = gcd(bits, _WORD_BITS)
    columns, words = _WORD_BITS // common, bits // common
    groups = count // columns
    return (groups if groups >= _MIN_GROUPS else 0), columns, words


def _pack_chunk(values: NDArray[Any], bits: int) -> bytes:
    if bits in _BYTE_WIDTHS:
        return values.astype(_BYTE_WIDTHS[bits], copy=False).tobytes()
    split = values.size // _ALIGNED * _ALIGNED
    return (_pack_joined(values[:split], bits) if split else b"") + _pack_rest(values[split:], bits)


def _pack_joined(values: NDArray[Any], bits: int) -> bytes:
    as_words: dict[str, Any] = {"dtype": np.uint64, "casting": "unsafe"}  # values fit, whatever their type
    while 2 * bits <= _LOADABLE and bits not in _BYTE_WIDTHS:
        joined = np.left_shift(values[1::2], np.uint64(bits), **as_words)
        values = np.bitwise_or(joined, values[::2], out=joined, **as_words)
        bits *= 2
    if bits in _BYTE_WIDTHS:
        return values.astype(_BYTE_WIDTHS[bits]).tobytes()
    if bits <= _LOADABLE:
        pieces = [(0, values)]
    else:
        wide = values.astype(np.uint64, copy=False)
        pieces = [(0, wide & _mask(32)), (32, wide >> np.uint64(32))]
    groups = values.size // 8
    stream = np.zeros(groups * bits + _LITTLE_U64.itemsize, np.uint8)  # the last word reaches past the last value
    shifted = np.empty(groups, np.uint64)
    for start, piece in pieces:
        for c, column in enumerate(piece.reshape(groups, 8).T):
            first, shift = divmod(c * bits + start, 8)
            words = np.ndarray((groups,), _LITTLE_U64, stream, first, (bits,))
            np.left_shift(column, np.uint64(shift), out=shifted, **as_words)
            np.bitwise_or(words, shifted, out=words)
    return stream[: groups * bits].tobytes()


def _pack_rest(values: NDArray[Any], bits: int) -> bytes:
    octets = values.astype(_LITTLE_U64, order="C").view(np.uint8).reshape(-1, 8)
    matrix = np.unpackbits(octets, axis=1, bitorder="little")
    return np.packbits(matrix[:, :bits], bitorder="little").tobytes()


def _unpack_chunk(raw: Octets, bits: int, out: Words) -> None:
    if bits in _BYTE_WIDTHS:
        out[:] = np.frombuffer(raw, _BYTE_WIDTHS[bits])
        return
    groups, columns, words = _groups(out.size, bits)
    split = groups * columns
    split_byte = split * bits // 8
    if groups:
        _unpack_groups(raw[:split_byte], bits, columns, words, out[:split])
    if split < out.size:
        _unpack_rest(raw[split_byte:], bits, out[split:])


def _unpack_groups(raw: Octets, bits: int, columns: int, words: int, out: Words) -> None:
    by_word = np.frombuffer(raw, _LITTLE_U64).reshape(-1, words).T.astype(np.uint64, order="C")
    by_column = np.empty((columns, by_word.shape[1]), np.uint64)
    spilled = np.empty(by_word.shape[1], np.uint64)
    mask = _mask(bits)
    for c in range(columns):
        word, shift = divmod(c * bits, _WORD_BITS)
        column = by_column[c]
        np.right_shift(by_word[word], np.uint64(shift), out=column)
        if shift + bits > _WORD_BITS:
            np.left_shift(by_word[word + 1], np.uint64(_WORD_BITS - shift), out=spilled)
            np.bitwise_or(column, spilled, out=column)
        np.bitwise_and(column, mask, out=column)
    out.reshape(-1, columns)[:] = by_column.T


def _unpack_rest(raw: Octets, bits: int, out: Words) -> None:
    matrix = np.zeros((out.size, _WORD_BITS), np.uint8)
    matrix[:, :bits] = np.unpackbits(raw, count=out.size * bits, bitorder="little").reshape(-1, bits)
    out[:] = np.packbits(matrix, axis=1, bitorder="little").view(_LITTLE_U64).ravel()
