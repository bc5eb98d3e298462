"""A support: k distinct indices out of range(d), in close to log2 C(d, k) bits.

Both ends know the dimension d. Let n = min(k, d - k) and let the coded set be the support itself, or its complement if
2 k > d. Golomb's code writes each gap g_i = c_i - c_(i-1) - 1 between neighbours of the coded set (with c_(-1) = -1) as
quotient and remainder by a modulus M; the remainder takes w = floor(log2 M) bits, or w + 1 if it is at least
u = 2^(w+1) - M (truncated binary). The three parts of all the codewords are stored as three streams, because each of
them alone can be written and read by whole-array operations.

Layout
    count       ceil(bitlength(d) / 8) bytes: k, little-endian
    base        ceil(n w / 8) bytes: w bits of each gap (`bits.pack`): the remainder r if r < u, else (r + u) >> 1
    extra       one bit for each gap with r >= u, in order: (r + u) & 1; zero-padded to a byte
    quotient    to the end of the data: floor(g_i / M) zeros and a one for each gap; zero-padded to a byte
    Bits fill a byte from the least significant end. If n = 0 there is only the count.

The modulus is not stored but follows from n and d,

    M = max(1, ceil(0.6931 d / n - 0.8146)),

in integers, so that every machine finds the same. It is the best M for the geometric gaps of a uniformly random
support: 0.6931 is ln 2 and 0.8146 puts the step from M = 1 to M = 2 where the two cost the same, at n / d = 0.382.
At M = 1 the base and extra streams are empty and the quotient stream is the bitmap of the coded set, cut after its last
one.

Size
    A uniformly random support with k / d in [0.001, 0.999] takes at most 4.3 % more than log2 C(d, k) bits (at k / d
    near 0.38 and 0.62; below 1.5 % for k / d up to 0.25), plus the count and the padding. Any support takes at most n
    bits for `extra` and n + (d - n) / M for `quotient`, so none costs over 1.5 bits per gap more than a random one.
    Clustering is not exploited: it would need a stored modulus, and a decoder that checks it to be the best one.

Canonical form
    Every pattern of base and extra bits is one remainder, no field has a second spelling, and the decoder rejects a
    count above d, nonzero padding, a quotient stream whose number of ones is not n or whose last byte is zero, and
    indices beyond d. So each support has exactly one encoding, and what decodes re-encodes to the same bytes.
"""

from __future__ import annotations

from math import exp, lgamma, log, log1p
from operator import index

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import WireError
from fedmpi.wire.bits import pack, packed_size, unpack

Ints = NDArray[np.int64]

# Keeps every intermediate of the decoder, less than 8 d even for forged streams, well inside int64.
MAX_DIMENSION = 1 << 48

# Up to this many indices the formulas below sum over them; beyond, an asymptotic form is exact to a few bits in all.
_SUM_LIMIT = 1 << 13


def encode_support(indices: Ints, dimension: int) -> bytes:
    """The encoding of strictly increasing `indices` in range(dimension); ValueError if they are not that."""
    dimension = _checked_dimension(dimension)
    indices = _checked_indices(indices, dimension)
    coded = _coded_set(indices, dimension)
    header = indices.size.to_bytes(_count_size(dimension), "little")
    if not coded.size:
        return header
    modulus = golomb_modulus(coded.size, dimension)
    if modulus == 1:
        return header + _bitmap(coded)
    remainders, ends = _split_gaps(coded, modulus)
    width, cutoff = _truncated_binary(modulus)
    long = remainders >= cutoff
    # A remainder below the cutoff is its own base; the others share a base in pairs and are told apart by `extra`.
    spread = remainders[long] + cutoff
    remainders[long] = spread >> 1
    extra = np.packbits((spread & 1).astype(bool), bitorder="little")
    return b"".join((header, pack(remainders.view(np.uint64), width), extra.tobytes(), _bitmap(ends)))


def decode_support(data: bytes | bytearray | memoryview, dimension: int, max_count: int | None = None) -> Ints:
    """The indices in `data`, increasing, as int64; WireError unless `data` is the encoding of a support.

    A count must be plausible for the length of the data before anything is allocated for it: memory is at most a
    constant times len(data), plus the result. The result of at most half of the dimension is within that bound too, for
    it takes a bit or more per index. A support of more than that is coded by its complement, so that a few bytes can
    stand for all `dimension` indices: `max_count` rejects more than that many indices before they are built. None
    allows any number.
    """
    dimension = _checked_dimension(dimension)
    view = memoryview(data)
    if view.ndim != 1 or view.format != "B":
        view = view.cast("B")
    start = _count_size(dimension)
    if len(view) < start:
        raise WireError(f"support: {len(view)} bytes, expected a count of {start} bytes first")
    count = int.from_bytes(view[:start], "little")
    if count > dimension:
        raise WireError(f"support: {count} indices, expected at most the dimension {dimension}")
    if max_count is not None and count > max_count:
        raise WireError(f"support: {count} indices, expected at most {max_count}")
    complemented = 2 * count > dimension
    coded = _decode_gaps(view[start:], dimension - count if complemented else count, dimension)
    if not complemented:
        return coded
    # 2 count > dimension: the mask is smaller than the result.
    return _complement(coded, dimension)


def expected_support_bits(count: int, dimension: int) -> float:
    """The mean size of all supports of `count` indices, to within about a byte.

    The padding of the extra and quotient streams is taken as 3.5 bits each, the mean over lengths that spread evenly
    modulo 8.
    """
    dimension = _checked_dimension(dimension)
    coded = _coded_count(index(count), dimension)
    bits = 8.0 * _count_size(dimension)
    if not coded:
        return bits
    modulus = golomb_modulus(coded, dimension)
    width, cutoff = _truncated_binary(modulus)
    quotient = extra = 0.0
    # A quotient is the number of t >= 1 with gap >= t M; a remainder is long if t M + u <= gap < (t + 1) M for a t.
    # Each term is about half of the one before.
    for t in range((dimension - coded) // modulus + 1):
        above = _gap_at_least((t + 1) * modulus, coded, dimension)
        quotient += above
        extra += _gap_at_least(t * modulus + cutoff, coded, dimension) - above
        if above < 1e-15:
            break
    bits += 8.0 * packed_size(coded, width) if width else 0.0
    bits += coded * extra + 3.5 if cutoff < modulus else 0.0
    return bits + coded * (1.0 + quotient) + 3.5


def entropy_bits(count: int, dimension: int) -> float:
    """log2 C(dimension, count): what any code needs on average for a uniformly random support."""
    dimension = _checked_dimension(dimension)
    chosen = _coded_count(index(count), dimension)
    if chosen <= _SUM_LIMIT:
        # lgamma loses all the digits of a small difference of huge numbers, the product of ratios does not.
        i = np.arange(chosen, dtype=np.float64)
        return float(np.log2((dimension - i) / (i + 1.0)).sum())
    return (lgamma(dimension + 1) - lgamma(chosen + 1) - lgamma(dimension - chosen + 1)) / log(2.0)


def golomb_modulus(coded: int, dimension: int) -> int:
    """The modulus M for a coded set of `coded` >= 1 indices, in integers only: both ends must agree to the last bit."""
    return max(1, -((8146 * coded - 6931 * dimension) // (10000 * coded)))


def _truncated_binary(modulus: int) -> tuple[int, int]:
    """(w, u): remainders below u take w bits, the others w + 1."""
    width = modulus.bit_length() - 1
    return width, (2 << width) - modulus


def _checked_dimension(dimension: int) -> int:
    # A numpy integer would overflow in the products of `golomb_modulus` where a Python one does not.
    dimension = index(dimension)
    if not 0 <= dimension <= MAX_DIMENSION:
        raise ValueError(f"dimension {dimension}, expected 0 to {MAX_DIMENSION}")
    return dimension


def _count_size(dimension: int) -> int:
    return (dimension.bit_length() + 7) // 8


def _coded_count(count: int, dimension: int) -> int:
    if not 0 <= count <= dimension:
        raise ValueError(f"{count} indices, expected 0 to the dimension {dimension}")
    return min(count, dimension - count)


def _checked_indices(indices: Ints, dimension: int) -> Ints:
    indices = np.asarray(indices)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise ValueError(f"array of {indices.dtype} with shape {indices.shape}, expected a vector of integers")
    # An unsigned index above 2^63 turns negative here and fails the order below.
    indices = indices.astype(np.int64, copy=False)
    if indices.size:
        if not (indices[1:] > indices[:-1]).all():
            raise ValueError("indices are not strictly increasing")
        if indices[0] < 0 or indices[-1] >= dimension:
            raise ValueError(f"indices from {indices[0]} to {indices[-1]}, expected 0 to {dimension - 1}")
    return indices


def _complement(indices: Ints, dimension: int) -> Ints:
    mask = np.ones(dimension, bool)
    mask[indices] = False
    return np.flatnonzero(mask).astype(np.int64, copy=False)


def _coded_set(indices: Ints, dimension: int) -> Ints:
    return _complement(indices, dimension) if 2 * indices.size > dimension else indices


def _split_gaps(coded: Ints, modulus: int) -> tuple[Ints, Ints]:
    """The remainder of each gap, and the position in the quotient stream of the one that ends its quotient."""
    gaps = np.diff(coded, prepend=-1)
    gaps -= 1
    ends = gaps // modulus
    gaps -= ends * modulus
    ends += 1
    np.cumsum(ends, out=ends)
    ends -= 1
    return gaps, ends


def _bitmap(ones: Ints) -> bytes:
    """The bit string with ones at the given increasing positions, ending with the last of them."""
    mask = np.zeros(int(ones[-1]) + 1, bool)
    mask[ones] = True
    return np.packbits(mask, bitorder="little").tobytes()


def _decode_gaps(body: memoryview, coded: int, dimension: int) -> Ints:
    """The coded set of `coded` indices from the streams after the count."""
    if not coded:
        if len(body):
            raise WireError(f"support: {len(body)} bytes after the count, expected none")
        return np.empty(0, np.int64)
    modulus = golomb_modulus(coded, dimension)
    width, cutoff = _truncated_binary(modulus)
    # Before anything is allocated: the base stream must be complete and followed by a bit or more per gap.
    base_size = packed_size(coded, width) if width else 0
    least = base_size + packed_size(coded, 1)
    if len(body) < least:
        raise WireError(f"support: {len(body)} bytes of gaps, expected at least {least} for {coded} gaps")
    remainders = None
    rest = body[base_size:]
    if width:
        remainders = unpack(body[:base_size], coded, width).view(np.int64)
        if cutoff < modulus:
            rest = _add_extra(remainders, rest, cutoff)
    indices = _quotient_ends(rest, coded, (dimension - coded) // modulus)
    if remainders is not None:
        # indices[i] is i + Q with Q the sum of the quotients so far; the index is i + M Q + the remainders so far.
        # Summing one more than each remainder gives the i at the same time.
        indices -= np.arange(coded)
        indices *= modulus
        remainders += 1
        np.cumsum(remainders, out=remainders)
        indices += remainders
        indices -= 1
    if indices[-1] >= dimension:
        raise WireError(f"support: index {indices[-1]}, expected less than the dimension {dimension}")
    return indices


def _add_extra(remainders: Ints, rest: memoryview, cutoff: int) -> memoryview:
    """Turns base values into remainders with the extra stream at the start of `rest`; returns what follows it."""
    long = np.flatnonzero(remainders >= cutoff)
    # `rest` has a bit or more per gap, as was checked, so that this many are there.
    size = packed_size(long.size, 1)
    if long.size:
        if long.size % 8 and rest[size - 1] >> long.size % 8:
            raise WireError("support: nonzero padding after the extra bits")
        extra = np.unpackbits(np.frombuffer(rest[:size], np.uint8), count=long.size, bitorder="little")
        remainders[long] = 2 * remainders[long] + extra - cutoff
    return rest[size:]


def _quotient_ends(stream: memoryview, coded: int, most: int) -> Ints:
    """The positions of the ones in the quotient stream; the quotients of a support add up to `most` or less."""
    longest = packed_size(coded + most, 1)
    if len(stream) > longest:
        raise WireError(f"support: {len(stream)} bytes of quotients, expected at most {longest}")
    if not len(stream) or not stream[-1]:
        raise WireError("support: the quotients do not end with a one")
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little").view(bool))
    if ends.size != coded:
        raise WireError(f"support: {ends.size} quotients, expected {coded}")
    return ends.astype(np.int64, copy=False)


def _gap_at_least(gap: int, coded: int, dimension: int) -> float:
    """P(a gap >= `gap`) = C(d - gap, n) / C(d, n); every gap, the one before the first index included, has this law."""
    if gap > dimension - coded:
        return 0.0
    if coded > _SUM_LIMIT:
        # Geometric in the limit; the difference comes to O(1) bits over the whole support.
        return exp(gap * log1p(-coded / dimension))
    return exp(float(np.log1p(-gap / (dimension - np.arange(coded, dtype=np.float64))).sum()))
