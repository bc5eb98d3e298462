"""What is done to an update before it leaves its party: clip, round to integers, add integer noise.

The order is that of the distributed discrete Gaussian mechanism (Kairouz, Liu, Steinke 2021, "KLS" below):

    clip to C -> scale to integer units, norm bound c -> round conditionally, norm bound c' >= c -> discrete Gaussian

The sensitivity of the sum is c', not c: whoever accounts divides the noise's standard deviation by
`rounded_norm_bound(c, d)`. Noise is integer from the start, so there are no low bits of a float to give the signal
away, and a sum of integers is the same in every order.
"""

from __future__ import annotations

import math

import numpy as np

from fedmpi.errors import ConfigError, ProtocolError
from fedmpi.randomness.words import WordSource, bernoulli, fraction

# Proposals drawn at a time. Their work arrays stay within a few hundred kilobytes, so they live in the cache and the
# memory of a draw does not grow with n.
_CHUNK = 1 << 14

# KLS condition rounding on an event of probability at least 1 - beta; beta = exp(-1/2) makes sqrt(2 ln(1/beta)) = 1.
_ROUNDING_BETA = math.exp(-0.5)

# Up to here the squared norm of a rounded vector fits an int64 and is compared exactly.
_LARGEST_NORM = 2.0**31

# Up to here every value that the sampler proposes (of 88 proposal scales, 60 deviations, at least) is an integer that
# float64 holds exactly.
_LARGEST_SIGMA = 2.0**46

_PIECE = 1 << 14  # coordinates that are rounded at a time

# A word below this is lengthened by further ones: it has fewer than 24 of its 64 bits left, in one draw of 2**40.
_SMALL = np.uint64(1 << 24)


def l2_norm(x: np.ndarray) -> float:
    """Euclidean norm in float64, safe from overflow and underflow of the squares.

    numpy's pairwise sum, not BLAS: its order of summation does not depend on the number of threads, and so neither do
    the bits of a clipped update.
    """
    x = np.asarray(x, dtype=np.float64).ravel()
    largest = float(np.max(np.abs(x), initial=0.0))
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    if 1e-140 < largest < 1e140:
        return math.sqrt(float(np.sum(np.square(x))))
    return largest * math.sqrt(float(np.sum(np.square(x / largest))))


def clip(delta: np.ndarray, bound: float, *, party: int | None = None) -> tuple[np.ndarray, float]:
    """Scales an update down to norm `bound` if it is longer; answers it in float64 with the norm that it had before.

    The norm of the answer is at most `bound` as float64 computes it, in whatever order the squares are summed. An
    update with a NaN or an infinity has no norm to bound, so it is refused: it would leave its party unprotected.
    """
    if not (math.isfinite(bound) and bound > 0):
        raise ConfigError(f"clipping bound {bound}: must be a positive number")
    delta = np.asarray(delta, dtype=np.float64)
    broken = np.flatnonzero(~np.isfinite(delta.ravel()))
    if broken.size:
        raise ProtocolError(
            f"the update holds {delta.ravel()[broken[0]]} at coordinate {broken[0]} ({broken.size} of {delta.size} are "
            "not finite), expected finite numbers; it was not sent",
            party=party,
            phase="clip",
        )
    norm = l2_norm(delta)
    if math.isinf(norm):
        raise ProtocolError("the norm of the update exceeds float64; it was not sent", party=party, phase="clip")
    if norm <= bound:
        return delta.copy(), norm
    # DSU (12): delta / max(1, ||delta|| / C). A sum of d rounded squares errs by at most a factor 1 + d 2**-53; aiming
    # that little below the bound (1e-10 of it for a million coordinates) leaves nothing to chance.
    target = bound * (1.0 - (delta.size + 16) * 2.0**-53)
    # Divided first: target / norm could be a subnormal number, which has few bits.
    clipped = delta / norm
    clipped *= target
    return clipped, norm


def rounded_norm_bound(norm: float, dimension: int) -> float:
    """The norm c' that conditional rounding keeps a vector of norm at most c = `norm` below (KLS, proposition on
    conditional randomised rounding, grid size 1)."""
    root = math.sqrt(dimension)
    slack = math.sqrt(2.0 * math.log(1.0 / _ROUNDING_BETA))
    conditional = math.sqrt(norm * norm + dimension / 4.0 + slack * (norm + root / 2.0))
    # One step up: the bound is compared with, and accounted for, as a float that is not below the real number.
    return math.nextafter(min(conditional, norm + root), math.inf)


def round_conditionally(
    x: np.ndarray, bound_norm: float, source: WordSource, *, party: int | None = None
) -> np.ndarray:
    """Rounds every coordinate up or down at random, unbiased, and redraws the whole vector until its norm is at most
    `rounded_norm_bound(bound_norm, x.size)`, where `bound_norm` is the bound that `x` itself keeps.

    A draw is good with probability at least 1 - exp(-1/2) = 0.39. Without the condition the worst case, c + sqrt(d),
    would have to be the sensitivity. The condition moves the mean by at most beta/(1 - beta) sqrt(d) (KLS); for a
    vector well inside its bound it hardly ever bites and the rounding is unbiased.
    """
    x = np.asarray(x, dtype=np.float64)
    limit = rounded_norm_bound(bound_norm, x.size)
    if not (math.isfinite(bound_norm) and bound_norm + math.sqrt(x.size) < _LARGEST_NORM):
        raise ConfigError(
            f"an update of norm {bound_norm:.3g} in integer units over {x.size} coordinates is too fine a scale: "
            f"norm + sqrt(coordinates) must stay below {_LARGEST_NORM:.3g}"
        )
    norm = l2_norm(x)
    # The scaling to integer units costs a few roundings; anything longer was not clipped, and might never be rounded to
    # within the limit. (NaN fails the comparison.)
    if not norm <= bound_norm * (1.0 + 1e-12):
        raise ProtocolError(
            f"the update has norm {norm:.6g} in integer units, expected at most {bound_norm:.6g}; it was not sent",
            party=party,
            phase="round",
        )
    flat, y = x.ravel(), np.empty(x.size, np.int64)
    while True:
        squares = 0
        # In pieces that stay in the cache, which takes half the time; the words are the same in the same order.
        for first in range(0, flat.size, _PIECE):
            part = flat[first : first + _PIECE]
            down = np.floor(part)
            steps = down.astype(np.int64)
            steps += bernoulli(source, part - down)
            y[first : first + _PIECE] = steps
            squares += int(np.sum(np.square(steps, out=steps)))
        # Exact: y is within sqrt(d) of x, so the sum of squares is below 2**62.
        if squares <= limit * limit:
            return y.reshape(x.shape)


def discrete_gaussian(sigma: float, n: int, source: WordSource) -> np.ndarray:
    """n independent draws of the discrete Gaussian N_Z(0, sigma**2), P[y] proportional to exp(-y**2 / (2 sigma**2)).

    Canonne, Kamath, Steinke (2020): a discrete Laplace of scale t is proposed as a sign and a size y = U + t V, with U
    uniform in [0, t) kept with probability exp(-U/t) and V geometric, P[V >= v] = exp(-v); the proposal is kept with
    probability exp(-(y - sigma**2/t)**2 / (2 sigma**2)). Any t gives the same law. Here t is the power of two nearest
    to sigma, which makes U an exact bit field, and costs at most a seventh of the acceptance rate. The two coins are
    tossed as one, because the product of their probabilities is exp(V - y**2/(2 sigma**2) - sigma**2/(2 t**2)).

    A word has 64 bits, and a coin that lands below 2**-65 would need more: without them no value beyond 10.5 sigma would
    ever be drawn, and whoever sees one party's own update would know it from another that is further away than that. So a
    word that comes out small is lengthened by further ones, as far as it takes.

    Limits that rational arithmetic would not have: probabilities are computed in double precision, so the probability of a
    value is off by a relative error of some 2**-49. Over a million coordinates that moves a round's epsilon by a few 1e-9.
    The running time depends on the values drawn; it is not a constant-time sampler.
    """
    if not (0.0 <= sigma <= _LARGEST_SIGMA):
        raise ConfigError(f"noise of standard deviation {sigma} in integer units: must be between 0 and 2**46")
    out = np.zeros(n, dtype=np.int64)
    if sigma * sigma < 2.0**-12:
        # Zero, and any sigma so small that another value than 0 has probability below 2 exp(-2**11).
        return out
    bits = max(0, round(math.log2(sigma)))
    scale = float(1 << bits)
    per_square = -0.5 / (sigma * sigma)
    shift = sigma * sigma / (2.0 * scale * scale)
    field = np.uint64((1 << bits) - 1)
    filled = 0
    while filled < n:
        # About twice as many proposals as are missing: with large sigma 0.41 to 0.48 of them are kept.
        m = min(_CHUNK, 2 * (n - filled) + 64)
        words = source.words(3 * m)
        place, tail, coin = words[:m], words[m : 2 * m], words[2 * m :]
        v = np.floor(-np.log(fraction(tail)))
        for at in np.flatnonzero(tail < _SMALL):
            v[at] = math.floor(-_log_uniform(int(tail[at]), source))
        y = v * scale
        y += (place & field).view(np.int64).astype(np.float64)
        log_keep = y * y
        log_keep *= per_square
        log_keep += v
        log_keep -= shift
        # Rounding can leave a certain acceptance at exp(1e-16) instead of 1: always kept, as it should be.
        heads = fraction(coin) < np.exp(log_keep)
        for at in np.flatnonzero(coin < _SMALL):
            heads[at] = _log_uniform(int(coin[at]), source) < log_keep[at]
        kept = np.flatnonzero(heads)
        size, sign = y.take(kept).astype(np.int64), place.take(kept).view(np.int64) >> 63  # sign: 0 or -1
        # Zero has one sign only; counted twice it would be twice as likely.
        values = ((size ^ sign) - sign)[(size != 0) | (sign == 0)][: n - filled]
        out[filled : filled + values.size] = values
        filled += values.size
    return out


def _log_uniform(word: int, source: WordSource) -> float:
    """log of a uniform number that begins with this word of 64 bits, to all the digits that a double has."""
    bits = 64
    while word == 0:
        word, bits = int(source.words(1)[0]), bits + 64
    return math.log(word + float(fraction(source.words(1))[0])) - bits * math.log(2.0)


def sum_divergence(sigma_int_per_party: float, parties: int) -> float:
    """tau of KLS: how far the sum of `parties` discrete Gaussians, each of standard deviation `sigma_int_per_party`, is
    from one discrete Gaussian of the whole variance; see `sum_multiplier` for what it costs.

    tau = 10 sum_{k=1}^{n-1} exp(-2 pi**2 sigma**2 k / (k + 1)). For twenty parties it is 6e-7 at sigma = 1.3 and
    nothing at all (below 1e-37) from sigma = 3 on. The theorem needs sigma >= 1/2; below, the answer is infinite.
    """
    if parties < 2:
        return 0.0
    if not sigma_int_per_party >= 0.5:
        return math.inf
    k = np.arange(1, parties, dtype=np.float64)
    return 10.0 * float(np.sum(np.exp(-2.0 * (math.pi * sigma_int_per_party) ** 2 * k / (k + 1.0))))


def sum_multiplier(multiplier: float, divergence: float, dimension: int) -> float:
    """The noise multiplier that a sum of discrete Gaussians may be accounted with, as if it were one.

    `multiplier` is standard deviation over sensitivity of the sum, `divergence` is tau. KLS bound the Renyi divergence
    of order alpha by alpha/2 (1/multiplier + tau sqrt(d))**2, which is that of a multiplier 1 / (1/multiplier + tau
    sqrt(d)).
    """
    if multiplier <= 0.0 or math.isinf(divergence):
        return 0.0
    return 1.0 / (1.0 / multiplier + divergence * math.sqrt(dimension))
