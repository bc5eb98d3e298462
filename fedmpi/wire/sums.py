"""A sum of integer updates in close to the bits that it holds: each value is coded by how likely a bell curve makes it.

The sum of a round is mostly noise of a known law, a discrete Gaussian, whose entropy is log2(deviation) + 2.05 bits a coordinate; the
width in which it cannot wrap is three or more bits wider. Both ends know the number of values. A sum of rows (of a matrix) has as many scales:
an item's popularity, a column's meaning.

Layout (numbers little-endian)
    scheme      1 byte
    packed      scheme 0: lowest value (8), width in bits (1), the values less the lowest (`bits.pack`)
    coded       scheme 1 (Gaussian) or 2 (Laplace):
        low     1 byte: so many low bits of each value, which are as good as uniform, are not coded but packed
        ends    4 + 4 bytes: lowest and highest of what is left of the values
        width   4 bytes: of a row; 0: one scale for all values
        scales  one byte, or a byte for each column and then, as a sum by this very code behind its length (4), one for each row. A
                value's deviation is 2^((scale - 32) / 8), its row's and its column's scales being added up
        bits    the low bits (`bits.pack`), then 32-bit words of an asymmetric numeral system (Duda 2009), by `constriction`
    tabled      scheme 3 (Gaussian) or 4 (Laplace): the same without rows, but so many low bits are packed that the deviation of what is left is
                8 to 16: below that bits are uniform to within a thousandth of a bit, and the few values that are left have a table of
                probabilities. It takes a thirtieth of the time to read: 8 ms for 270,000 values, where coding all bits took 220

The encoder writes the table unless few values are far larger than the others, and beside it rows; of what it has, whichever is smallest.
Probabilities are computed in floating point: ends whose mathematical libraries differ could read other values. Whoever uses this holds a digest against what comes out, as fedmpi.runtime.mirror does.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import WireError
from fedmpi.wire.bits import pack, packed_size, unpack
from fedmpi.wire.frame import COUNT, Buffer, Reader

Ints = NDArray[np.int64]

PACKED, GAUSSIAN, LAPLACE, GAUSSIAN_TABLE, LAPLACE_TABLE = range(5)
PACKED_HEAD = struct.Struct("<BqB")
CODED_HEAD = struct.Struct("<BBiiI")
SHARP, STEPS = 32, 8  # the scale of deviation 1, and how many make it twice as large
BLUNTEST = 255
WIDEST = 20  # bits of what is coded of a value; more of it would be coding uniform bits
LONGEST = 1 << 12  # entries of a table
LEAST = 1e-9  # probability of one


def encode_sum(values: Ints, width: int = 0) -> bytes:
    """`width` of its rows, if it is a sum of rows."""
    values = np.ascontiguousarray(values, np.int64)
    found = [_packed(values)]
    if values.size and values.min() < values.max():
        tabled = _tabled(values)
        of_rows = {0, width} if tabled is None else {width} - {0}
        found += [] if tabled is None else [tabled]
        found += [_coded(values, rows, scheme) for rows in of_rows for scheme in (GAUSSIAN, LAPLACE)]
    return min(found, key=len)


def decode_sum(data: Buffer, count: int) -> Ints:
    """The `count` values; WireError unless `data` holds them."""
    reader = Reader(data, "sum")
    scheme = reader.take(1)[0]
    if scheme == PACKED:
        lowest, bits = struct.unpack("<qB", reader.take(PACKED_HEAD.size - 1))
        if bits > 64:
            raise WireError(f"sum: values of {bits} bits")
        offsets = unpack(reader.rest(), count, bits) if bits else np.zeros(count, np.uint64)
        values: Ints = (offsets + np.int64(lowest).astype(np.uint64)).view(np.int64)
        return values
    if scheme > LAPLACE_TABLE:
        raise WireError(f"sum: scheme {scheme}, expected 0 to {LAPLACE_TABLE}")
    low, lowest, highest, width = struct.unpack("<BiiI", reader.take(CODED_HEAD.size - 1))
    tabled = scheme in (GAUSSIAN_TABLE, LAPLACE_TABLE)
    if not (low <= 63 and lowest < highest and highest - lowest < (LONGEST if tabled else 1 << (WIDEST + 2))):
        raise WireError(f"sum: values from {lowest} to {highest} above {low} bits")
    if tabled and width:
        raise WireError(f"sum: rows of {width} with one table")
    if width and (count % width or width > count):
        raise WireError(f"sum: rows of {width} for {count} values")
    scales = _read_scales(reader, count, width)
    tail = unpack(reader.take(packed_size(count, low)), count, low).astype(np.int64) if low else np.int64(0)
    rest = reader.rest()
    if len(rest) % 4:
        raise WireError(f"sum: {len(rest)} bytes are not a whole number of words")
    coder = _coder(np.frombuffer(rest, "<u4").astype(np.uint32))
    if tabled:
        model = _categorical(_table(scheme, low, lowest, highest, int(scales[0]) if count else SHARP))
        decoded: Ints = coder.decode(model, count).astype(np.int64) + lowest
    else:
        model = _model(scheme, lowest, highest)
        decoded = coder.decode(model, np.zeros(count), _deviations(scales)).astype(np.int64)
    if not coder.is_empty():
        raise WireError("sum: words left over")
    return np.asarray((decoded << low) + tail)


def entropy_bits(deviation: float) -> float:
    """Of a discrete Gaussian, a coordinate: the least that any code takes on average."""
    if deviation >= 1:
        return 0.5 * math.log2(2 * math.pi * math.e * deviation**2)
    spread = np.arange(-40, 41)
    weights = np.exp(-np.square(spread) / (2 * max(deviation, 1e-3) ** 2))
    shares = weights[weights > 0] / weights.sum()
    return float(-(shares * np.log2(shares)).sum())


def expected_size(count: int, deviation: float) -> float:
    """Bytes of a sum that is noise of this deviation: the entropy, the head and half a word for the last one that is not full."""
    return CODED_HEAD.size + 1 + count * entropy_bits(deviation) / 8 + 6


def most_size(count: int, deviation: float, largest: int) -> int:
    """Bytes that no sum exceeds whose root mean square is at most this, and its values at most `largest` either way.

    A Gaussian code of the right deviation s takes log2(s) + 2.05 bits a value in the mean, whatever the values are: the logarithm of its
    density is their mean square. Beyond that, at most: 0.06 for the width of an integer, where s is 1 or more; 0.003 for the steps in
    which s is told; 0.2 for what `constriction` keeps aside, 2^-24 for each of up to 2^(WIDEST + 1) values. Where one value is so large
    that low bits are packed, and the rest of the others is nearly nothing, a value takes these bits and one more.
    """
    packed = PACKED_HEAD.size + packed_size(count, min(64, max(1, (2 * largest).bit_length())))
    low = max(0, largest.bit_length() - WIDEST)
    bits = max(math.log2(max(deviation, 1.0)) + 2.05, low + 1.0) + 0.27
    return min(packed, CODED_HEAD.size + 1 + math.ceil(count * bits / 8) + 12)


def _packed(values: Ints) -> bytes:
    lowest = int(values.min(initial=0)) if values.size else 0
    offsets = values.view(np.uint64) - np.int64(lowest).astype(np.uint64)
    bits = int(offsets.max(initial=0)).bit_length()
    return PACKED_HEAD.pack(PACKED, lowest, bits) + (pack(offsets, bits) if bits else b"")


def _tabled(values: Ints) -> bytes | None:
    """None where some values are so far out that a table would be too long."""
    size = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
    low = max(0, math.frexp(size)[1] - 4)  # 2^(e - 1) <= size < 2^e
    high = values >> low
    lowest, highest = int(high.min()), int(high.max())
    highest += lowest == highest
    if highest - lowest >= LONGEST or not -(1 << 31) <= lowest <= highest < 1 << 31:
        return None
    scale = int(_scale_of(np.sqrt(np.mean(np.square(high, dtype=np.float64)))))
    counts = np.bincount(high - lowest, minlength=highest - lowest + 1)
    tables = {scheme: _table(scheme, low, lowest, highest, scale) for scheme in (GAUSSIAN_TABLE, LAPLACE_TABLE)}
    scheme = min(tables, key=lambda kind: -float(counts @ np.log(tables[kind])))
    coder = _coder()
    coder.encode_reverse((high - lowest).astype(np.int32), _categorical(tables[scheme]))
    head = CODED_HEAD.pack(scheme, low, lowest, highest, 0) + bytes([scale])
    return b"".join((head, _low_bits(values, low), np.asarray(coder.get_compressed(), "<u4").tobytes()))


def _table(scheme: int, low: int, lowest: int, highest: int, scale: int) -> NDArray[np.float64]:
    """Probabilities of the values from lowest to highest, whose low bits are gone: what is left is rounded down, by a half in the mean."""
    edges = np.arange(lowest, highest + 2) - (0.0 if low else 0.5)
    at = edges / float(_deviations(np.array([scale]))[0])
    if scheme == GAUSSIAN_TABLE:
        below = 0.5 * (1 + np.array([math.erf(x / math.sqrt(2)) for x in at.tolist()]))
    else:
        tail = 0.5 * np.exp(-math.sqrt(2) * np.abs(at))
        below = np.where(at < 0, tail, 1 - tail)
    shares = np.maximum(np.diff(below), LEAST)
    table: NDArray[np.float64] = shares / shares.sum()
    return table


def _low_bits(values: Ints, low: int) -> bytes:
    return pack((values & ((1 << low) - 1)).view(np.uint64), low) if low else b""


def _coded(values: Ints, width: int, scheme: int) -> bytes:
    largest = max(int(values.max()), -int(values.min()))
    low = max(0, largest.bit_length() - WIDEST)
    high = values >> low
    lowest, highest = int(high.min()), int(high.max())
    if lowest == highest:
        highest += 1
    head = CODED_HEAD.pack(scheme, low, lowest, highest, width)
    scales, coded_scales = _choose_scales(high, width)
    coder = _coder()
    coder.encode_reverse(
        high.astype(np.int32), _model(scheme, lowest, highest), np.zeros(len(high)), _deviations(scales)
    )
    return b"".join((head, coded_scales, _low_bits(values, low), np.asarray(coder.get_compressed(), "<u4").tobytes()))


def _choose_scales(values: Ints, width: int) -> tuple[Ints, bytes]:
    """(of each value, as they are written)"""
    if not width:
        scale = _scale_of(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
        return np.full(len(values), int(scale)), bytes([int(scale)])
    matrix = values.reshape(-1, width).astype(np.float64)
    rows = np.sqrt(np.mean(np.square(matrix), axis=1))
    # A column's scale is what is typical of it once rows are taken out; both are logarithms, so they add up.
    relative = np.sqrt(np.mean(np.square(matrix / np.maximum(rows, 1e-9)[:, None]), axis=0))
    columns, of_rows = _scale_of(relative), _scale_of(rows)
    coded = encode_sum(of_rows)
    text = columns.astype(np.uint8).tobytes() + COUNT.pack(len(coded)) + coded
    return _together(of_rows, columns), text


def _read_scales(reader: Reader, count: int, width: int) -> Ints:
    if not width:
        return np.full(count, reader.take(1)[0], np.int64)
    columns = np.frombuffer(reader.take(width), np.uint8).astype(np.int64)
    rows = decode_sum(reader.take(reader.count()), count // width)
    if rows.size and not 0 <= rows.min() <= rows.max() <= BLUNTEST:
        raise WireError("sum: a scale that is none")
    return _together(rows, columns)


def _together(rows: Ints, columns: Ints) -> Ints:
    return np.asarray(np.clip(rows[:, None] + columns - SHARP, 0, BLUNTEST).reshape(-1))


def _scale_of(deviation: NDArray[np.float64] | np.float64) -> Ints:
    logarithm = np.log2(np.maximum(deviation, 2.0**-8))
    return np.asarray(np.clip(np.rint(STEPS * logarithm).astype(np.int64) + SHARP, 0, BLUNTEST))


def _deviations(scales: Ints) -> NDArray[np.float64]:
    # One value for each scale, so that equal scales are equal to the last bit whoever raised 2 to that power.
    table = np.array([2.0 ** (step / STEPS) for step in range(STEPS)])
    whole, part = np.divmod(scales - SHARP, STEPS)
    return np.asarray(np.ldexp(table[part], whole))


def _coder(words: NDArray[np.uint32] | None = None) -> Any:
    import constriction  # by those who need it

    try:
        return constriction.stream.stack.AnsCoder(*([] if words is None or not words.size else [words]))
    except ValueError as error:
        raise WireError(f"sum: {error}") from None


def _model(scheme: int, lowest: int, highest: int) -> Any:
    import constriction

    models = constriction.stream.model
    return (models.QuantizedGaussian if scheme == GAUSSIAN else models.QuantizedLaplace)(lowest, highest)


def _categorical(table: NDArray[np.float64]) -> Any:
    import constriction

    return constriction.stream.model.Categorical(table, perfect=False)
