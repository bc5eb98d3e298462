"""Secret sharing over a prime field: MMF algorithm 1 (CreateShares, ReconstructSecret), and decoding when holders lie.

A field is the integers modulo l, the smallest prime above 2^256 or 2^128, so that any 32 bytes (a private key), or any 16 (a
seed of a key stream with a key of 128 bits), are one element. A secret is the value at 0 of a random polynomial of degree t - 1; a share is its value at a holder's point x > 0. Any t
shares give the secret back, t - 1 say nothing about it.

Where algorithm 1 writes s + a_1 x + a_2 x^2 + ..., the polynomial here is drawn as s + c_1 x + c_2 x(x-1) + c_3
x(x-1)(x-2) + ...: the falling products are monic, so the map between (a_j) and (c_j) is unitriangular, and one is
uniform exactly when the other is. In this form holders numbered 1, 2, ..., n get their shares by additions alone.

Integers of Python are not constant-time. Shares are made and combined by the party or server that holds the secret
anyway; a secret is used for one round.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from fedmpi.errors import CryptoError


@dataclass(frozen=True)
class Field:
    prime: int
    secret_bytes: int

    @cached_property
    def share_bytes(self) -> int:
        return -(-self.prime.bit_length() // 8)

    @cached_property
    def prime_bytes(self) -> bytes:
        return self.prime.to_bytes(self.share_bytes, "big")  # big-endian: bytes compare as the numbers do


KEYS = Field(2**256 + 297, 32)
SEEDS = Field(2**128 + 51, 16)

# How many small factors or sums may pile up before a reduction: found by timing; the result does not depend on it.
_LAZY_BITS = 320
_LAZY_SUMS = 100
_LAZY_WORDS = 16
_ROWS = 256  # of the table of differences at a time, so that ten thousand points need 20 MB and not 800


def secret_to_int(secret: bytes, field: Field = KEYS) -> int:
    """32 bytes, or 16, as an element of the field."""
    if len(secret) != field.secret_bytes:
        raise CryptoError(f"a shared secret has {field.secret_bytes} bytes, not {len(secret)}")
    return int.from_bytes(secret, "big")


def int_to_secret(value: int, field: Field = KEYS) -> bytes:
    """The bytes of a reconstructed secret. A value that needs more of them was never one: some share was wrong."""
    if not 0 <= value < 2 ** (8 * field.secret_bytes):
        raise CryptoError(f"the reconstructed value is not a secret of {field.secret_bytes} bytes")
    return value.to_bytes(field.secret_bytes, "big")


def encode_share(share: int, field: Field = KEYS) -> bytes:
    """A byte more than a secret has, big-endian."""
    if not 0 <= share < field.prime:
        raise CryptoError("a share is not an element of the field")
    return share.to_bytes(field.share_bytes, "big")


def is_share(data: bytes, field: Field = KEYS) -> bool:
    """Whether `decode_share` would take it."""
    return len(data) == field.share_bytes and data < field.prime_bytes


def decode_share(data: bytes, field: Field = KEYS) -> int:
    """The share in its bytes. Every share has one encoding, so a value of l or more is refused, not reduced."""
    if len(data) != field.share_bytes:
        raise CryptoError(f"a share has {field.share_bytes} bytes, not {len(data)}")
    share = int.from_bytes(data, "big")
    if share >= field.prime:
        raise CryptoError("a share is not an element of the field")
    return share


def create_shares(
    secrets: Sequence[int],
    threshold: int,
    xs: Sequence[int],
    random_bytes: Callable[[int], bytes],
    fields: Sequence[Field] | None = None,
) -> list[list[int]]:
    """CreateShares: for every secret, in order, the list of its shares at the points `xs`; any `threshold` of them
    reconstruct it. `fields`: that of each secret; `KEYS` unless said.

    A coefficient is as many random bytes as a secret, as they are: uniform below 2^256 or 2^128, which is within 297 / 2^256 or
    51 / 2^128, below 2^-122, of uniform modulo l. `random_bytes(n)` is called once, for all of them. A share depends on the secret, the
    randomness and its own point only, not on which other points are asked for.
    """
    fields = [KEYS] * len(secrets) if fields is None else fields
    if len(fields) != len(secrets):
        raise CryptoError(f"{len(secrets)} secrets take as many fields, not {len(fields)}")
    points = _points(xs, min(fields, key=lambda field: field.prime, default=KEYS))
    if not 1 <= threshold <= len(points):
        raise CryptoError(f"a threshold of {threshold} does not fit {len(points)} shares: 1 to {len(points)} does")
    values = [value for secret, field in zip(secrets, fields) for value in _elements([secret], "a secret", field)]
    wanted = (threshold - 1) * sum(field.secret_bytes for field in fields)
    random = random_bytes(wanted)
    if len(random) != wanted:
        raise CryptoError(f"the source of randomness gave {len(random)} bytes, {wanted} were asked for")
    polynomials, at = [], 0
    for secret, field in zip(values, fields):
        size, end = field.secret_bytes, at + (threshold - 1) * field.secret_bytes
        polynomials.append([secret, *(int.from_bytes(random[j : j + size], "big") for j in range(at, end, size))])
        at = end
    # Additions up to the last point cost t * max(x) / 2, multiplications at the points alone t * n, each dearer.
    if values and max(points) <= 2 * len(points):
        return _by_differences(polynomials, points, fields)
    return [_by_products(coefficients, points, field) for coefficients, field in zip(polynomials, fields)]


def _by_differences(polynomials: list[list[int]], xs: list[int], fields: Sequence[Field]) -> list[list[int]]:
    # The j-th forward difference at 0 of sum_j c_j x(x-1)...(x-j+1) is j! c_j. From the row of the (j+1)-th
    # differences at 0, 1, 2, ... running sums give the row of the j-th, one longer; the last row is the polynomial.
    # All polynomials ride in one integer, each in a lane of its own: an addition costs hardly more if it is longer.
    top, terms = max(xs), len(polynomials[0])
    sums = min(_LAZY_SUMS, terms)
    primes = [field.prime for field in fields]
    # After k running sums of values up to v, number i of a row is at most v (C(i, 0) + ... + C(i, k)) <= v C(i + k, k).
    width = (max(primes) * math.comb(top + sums, sums)).bit_length()
    lanes = list(zip(range(0, width * len(polynomials), width), primes))
    lane_mask = (1 << width) - 1
    # j! modulo all of the primes at once: a residue of their product is one of each.
    modulus = math.prod(set(primes))
    factorials = accumulate(range(1, terms), lambda left, right: left * right % modulus, initial=1)
    at_zero = [
        sum([coefficient * factorial % prime << lane for coefficient, (lane, prime) in zip(column, lanes)])
        for factorial, column in zip(factorials, zip(*polynomials))
    ]
    row = [at_zero.pop()] * (top - terms + 2)
    for done, difference in enumerate(reversed(at_zero), start=1):
        row = list(accumulate(row, initial=difference))
        if done % sums == 0:
            row = [sum([(value >> lane & lane_mask) % prime << lane for lane, prime in lanes]) for value in row]
    return [[(row[x] >> lane & lane_mask) % prime for x in xs] for lane, prime in lanes]


def _by_products(coefficients: list[int], xs: list[int], field: Field) -> list[int]:
    # Horner's rule for the same form: ... (c_2 (x-1) + c_1) x + c_0, reduced once in a group of terms.
    lazy = max(1, _LAZY_BITS // max(xs).bit_length())
    terms = list(enumerate(coefficients))[::-1]
    groups = [terms[first : first + lazy] for first in range(0, len(terms), lazy)]
    shares = []
    for x in xs:
        value = 0
        for group in groups:
            for j, coefficient in group:
                value = value * (x - j) + coefficient
            value %= field.prime
        shares.append(value)
    return shares


def lagrange_weights(xs: Sequence[int], field: Field = KEYS) -> list[int]:
    """The weights w_j = prod_{m != j} x_m / (x_m - x_j) with which shares at `xs` add up to the value at 0: computed
    once for a set of survivors, used for every secret that they hold shares of."""
    prime, points = field.prime, _points(xs, field)
    denominators = _denominators(points, prime)
    # One inversion for all: invert the product, then peel the factors off from the end.
    prefixes = list(accumulate(denominators, lambda left, right: left * right % prime, initial=1))
    inverse = pow(prefixes[-1], -1, prime) * _product(points, prime) % prime
    weights = [0] * len(points)
    for j in range(len(points) - 1, -1, -1):
        weights[j] = inverse * prefixes[j] % prime
        inverse = inverse * denominators[j] % prime
    return weights


def _denominators(points: list[int], prime: int) -> list[int]:
    """x_j * prod_{m != j} (x_m - x_j) for every j."""
    # Points are small numbers in practice: several factors fit a machine word, and numpy multiplies those.
    bits = max(points).bit_length()
    column = np.array(points, dtype=np.int64 if bits <= 62 else object)
    width = -(-len(points) // max(1, 62 // bits))
    denominators: list[int] = []
    for first in range(0, len(points), _ROWS):
        own = np.arange(first, min(first + _ROWS, len(points)))
        factors = column - column[own, None]
        factors[own - first, own] = column[own]
        words = factors[:, :width].copy()
        for start in range(width, len(points), width):
            block = factors[:, start : start + width]
            words[:, : block.shape[1]] *= block
        denominators.extend(_product(row, prime) for row in words.tolist())
    return denominators


def _product(factors: list[int], prime: int) -> int:
    product = 1
    for first in range(0, len(factors), _LAZY_WORDS):
        product = product * math.prod(factors[first : first + _LAZY_WORDS]) % prime
    return product


def reconstruct(weights: Sequence[int], shares: Sequence[int], field: Field = KEYS) -> int:
    """ReconstructSecret: the value at 0, from `threshold` or more shares in the order of the points of the weights."""
    if len(weights) != len(shares):
        raise CryptoError(f"{len(shares)} shares do not go with {len(weights)} weights")
    return int(sum(map(operator.mul, weights, _elements(shares, "a share", field)))) % field.prime


def decode(xs: Sequence[int], shares: Sequence[int], threshold: int, field: Field = KEYS) -> tuple[int, list[int]]:
    """The secret, and the positions in `shares` of those that are wrong.

    m shares are a Reed-Solomon word: up to (m - threshold) // 2 wrong ones are found, whatever they are. With more, the
    answer is an error or, if the liars agreed on another polynomial, that one's: the caller compares the secret with
    the dealer's commitment. With m = threshold nothing can be told wrong.
    """
    prime, points = field.prime, _points(xs, field)
    values = _elements(shares, "a share", field)
    if len(values) != len(points):
        raise CryptoError(f"{len(values)} shares do not go with {len(points)} points")
    surplus = len(points) - threshold
    if threshold < 1 or surplus < 0:
        raise CryptoError(f"{len(points)} shares cannot be decoded with a threshold of {threshold}")
    weights = lagrange_weights(points, field)
    # Shares of a polynomial of degree < t satisfy sum_j v_j y_j x_j^k = 0 for k < m - t, with v_j = 1 / prod_{m != j}
    # (x_j - x_m); w_j x_j is v_j up to a factor common to all. What is left of these sums comes from the errors.
    terms = [weight * x * value % prime for weight, x, value in zip(weights, points, values)]
    syndromes = []
    for _ in range(surplus):
        syndromes.append(sum(terms) % prime)
        terms = [term * x % prime for term, x in zip(terms, points)]
    if not any(syndromes):
        return reconstruct(weights, values, field), []
    # With errors at x_1 ... x_e the syndromes are a sum of e geometric series: the shortest recurrence
    # S_k = r_1 S_{k-1} + ... + r_e S_{k-e} has the x_i as roots of z^e - r_1 z^{e-1} - ... - r_e.
    recurrence = _shortest_recurrence(syndromes, prime)
    wrong = [j for j, x in enumerate(points) if _evaluate([1, *(-r for r in recurrence)], x, prime) == 0]
    if 2 * len(recurrence) > surplus or len(wrong) != len(recurrence):
        raise CryptoError(
            f"more than {surplus // 2} of {len(points)} shares are wrong: with a threshold of {threshold} they hide who"
        )
    right = sorted(set(range(len(points))) - set(wrong))
    weights = lagrange_weights([points[j] for j in right], field)
    return reconstruct(weights, [values[j] for j in right], field), wrong


def _evaluate(coefficients: list[int], x: int, prime: int) -> int:
    """The polynomial at x, highest power first."""
    value = 0
    for coefficient in coefficients:
        value = (value * x + coefficient) % prime
    return value


def _shortest_recurrence(series: list[int], prime: int) -> list[int]:
    """Berlekamp-Massey: the shortest r with series[k] = sum_i r[i] series[k - 1 - i] for all k >= len(r)."""
    current: list[int] = []
    previous: list[int] = []
    failed_at, inverse = -1, 1  # where `previous` failed, and the inverse of by how much
    for k, value in enumerate(series):
        gap = (value - sum(r * series[k - 1 - i] for i, r in enumerate(current))) % prime
        if gap == 0:
            continue
        if failed_at < 0:
            # The first term that is not zero: nothing shorter than k + 1 terms produces it out of zeros.
            current, failed_at, inverse = [0] * (k + 1), k, pow(gap, -1, prime)
            continue
        # `previous`, moved to k, is off by a known amount and right before: a multiple of it closes the gap.
        scale = gap * inverse % prime
        patch = [0] * (k - failed_at - 1) + [scale, *(-scale * r for r in previous)]
        patched = [
            ((current[i] if i < len(current) else 0) + (patch[i] if i < len(patch) else 0)) % prime
            for i in range(max(len(current), len(patch)))
        ]
        if k - len(current) > failed_at - len(previous):
            previous, failed_at, inverse = current, k, pow(gap, -1, prime)
        current = patched
    return current


def _points(xs: Sequence[int], field: Field) -> list[int]:
    try:
        points = [operator.index(x) for x in xs]
    except TypeError:
        raise CryptoError("the points of shares are integers") from None
    if not points:
        raise CryptoError("there is no share: at least one point is needed")
    if min(points) < 1 or max(points) >= field.prime:
        raise CryptoError("the points of shares are from 1 to l - 1: at 0 lies the secret")
    if len(set(points)) != len(points):
        raise CryptoError("two shares have the same point")
    return points


def _elements(values: Sequence[int], what: str, field: Field) -> list[int]:
    # The message names no value: it would be a secret or a share of one.
    try:
        elements = [operator.index(value) for value in values]
    except TypeError:
        raise CryptoError(f"{what} is not an integer") from None
    if elements and not (min(elements) >= 0 and max(elements) < field.prime):
        raise CryptoError(f"{what} is not an element of the field")
    return elements
