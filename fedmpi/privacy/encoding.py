"""Fixed-point encoding: a clipped float vector as integers modulo 2^b, so that sums are exact in any order.

C is cut into `steps` integer steps; a coordinate takes b bits, b being the smallest width in which the sum of all
parties' signals cannot wrap, their noise wraps with probability at most 2^-40 in the whole run, and rounding adds at most
1 % to the noise that was asked for. `choose_encoding` has the proof.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from fedmpi.errors import ConfigError
from fedmpi.privacy.noise import rounded_norm_bound, sum_divergence

WRAP_BOUND = 2.0**-40  # probability, over the whole run, that noise carries any coordinate of a sum around
ROUNDING_COST = 0.01  # of sigma C: what rounding may add to the deviation of what is added to a sum
FINEST = 2**20  # steps in C where there is no noise to hide the rounding
MOST_STEPS = 2**30  # in C under noise: the squared norm of more would not fit an int64
NARROWEST, WIDEST = 8, 64


@dataclass(frozen=True)
class Encoding:
    clip: float
    steps: int  # integer steps in C
    bits: int
    dimension: int  # coordinates a party sends

    @property
    def scale(self) -> float:
        return self.steps / self.clip

    @property
    def sensitivity(self) -> float:
        """The largest L2 norm that an encoded update can have, in steps: rounding may lengthen a vector."""
        return rounded_norm_bound(self.steps, self.dimension)

    @property
    def own_bits(self) -> int:
        """Width of one party's value without noise, which is all that a value in the clear needs."""
        return min(self.bits, max(NARROWEST, 1 + math.ceil(math.log2(self.steps + 1))))

    def wrap(self, values: np.ndarray) -> np.ndarray:
        """Signed integers to Z_{2^b}."""
        return values.astype(np.int64).view(np.uint64) & self._mask

    def unwrap(self, values: np.ndarray) -> np.ndarray:
        """Z_{2^b} to the signed integers in [-2^(b-1), 2^(b-1))."""
        sign = np.uint64(1 << (self.bits - 1))
        unsigned: np.ndarray = ((values & self._mask) ^ sign) - sign
        return unsigned.view(np.int64)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """A sum of encodings as float64."""
        return np.asarray(total.astype(np.float64) / self.scale)

    @property
    def _mask(self) -> np.uint64:
        mask: np.uint64 = np.uint64((1 << self.bits) - 1)
        return mask


def choose_encoding(
    *,
    clip: float,
    dimension: int,
    parties: int,
    multiplier: float,
    rounds: int,
    bits: int = 0,
    steps: int = 0,
    block: int = 0,
) -> Encoding:
    """The encoding of a run; ConfigError if the asked width could wrap.

    Under noise and without a given width or grid it solves

        least b, then most steps s, such that   wrap_probability(s, b) <= WRAP_BOUND   and   rounding_cost(s) <= ROUNDING_COST

    in two bisections. The cost falls as s grows, because c'(s)/s and 1/s do; let s0 be the least s that may be taken. The bits that
    s needs never fall as s grows, because signals and noise are both longer in finer steps. So no s that may be taken needs fewer
    bits than s0, and those that fit its b are s0 up to some largest s: that one is taken, the finest grid for the same bytes.

    No epsilon changes by it. The noise is the multiplier times c'(s), whatever s is. And the cost keeps a party's share of the
    noise large enough for a sum of discrete Gaussians to be one: 1 + n / (2 sigma s)^2 <= 1.01^2 makes sigma s / sqrt(n) >= 3.5
    steps, where `sum_divergence` is below 1e-51 n.

    `block`: of the rotation that updates went through, see fedmpi.privacy.rotation; 0: none.
    """
    if bits and not NARROWEST <= bits <= WIDEST:
        raise ConfigError(f"bits = {bits}: must be 0 (chosen for you) or {NARROWEST} to {WIDEST}")

    def needed(steps: int) -> int:
        return needed_bits(steps, dimension, parties, multiplier, rounds, block)

    if steps:
        if bits and needed(steps) > bits:
            raise ConfigError(
                f"bits = {bits}: {steps} steps in the clipping bound need {needed(steps)} for {parties} parties"
            )
        bits = bits or max(NARROWEST, needed(steps))
    elif bits:
        fitting = [1 << power for power in range(2, 41) if needed(1 << power) <= bits]
        if not fitting:
            raise ConfigError(
                f"bits = {bits}: the sum of {parties} parties over {dimension} coordinates could wrap, "
                f"at least {max(NARROWEST, needed(4))} are needed"
            )
        steps = fitting[-1]
    elif multiplier > 0:
        least = least_steps(dimension, parties, multiplier)
        bits = max(NARROWEST, needed(least))
        # The grid s is element s - 1 of the range, so the number of those that fit is the largest.
        steps = bisect_right(range(1, MOST_STEPS + 1), bits, lo=least - 1, key=needed)
    else:
        steps = FINEST
        bits = max(NARROWEST, needed(steps))
    if bits > WIDEST:
        raise ConfigError(f"parties = {parties}: their sum needs {bits} bits, at most {WIDEST} are possible")
    return Encoding(clip, steps, bits, dimension)


def rounding_cost(steps: int, dimension: int, parties: int, multiplier: float) -> float:
    """By what part of sigma C the deviation of a coordinate of the sum is larger than sigma C, which it would be without rounding.

    Added to the true sum of clipped updates is, in steps, noise of deviation sigma c'(s), since rounding lengthens updates and the
    noise must hide the longer ones, and the rounding of n parties. A rounded coordinate is one of two neighbouring integers, so its
    variance is at most 1/4, also under the condition on the norm. All of it is independent, and sigma C is sigma s steps:
    cost = sqrt((c'(s)/s)^2 + n / (2 sigma s)^2) - 1. (The condition also shortens updates that are at the bound, by a part of a step.)
    """
    longer = rounded_norm_bound(steps, dimension) / steps
    return math.hypot(longer, math.sqrt(parties) / (2 * multiplier * steps)) - 1


def least_steps(dimension: int, parties: int, multiplier: float) -> int:
    """The fewest steps in C at which rounding costs no more than it may."""

    def cheap(steps: int) -> bool:
        return rounding_cost(steps, dimension, parties, multiplier) <= ROUNDING_COST

    return min(MOST_STEPS, 1 + bisect_left(range(1, MOST_STEPS + 1), True, key=cheap))


def wrap_probability(
    steps: int, bits: int, dimension: int, parties: int, multiplier: float, rounds: int, block: int = 0
) -> float:
    """A bound on the probability that any coordinate of any sum of a run wraps; 1 where signals alone could.

    A coordinate wraps if noise goes beyond what its signal leaves of 2^(b-1). Every party has at most s there, and at most c' as the
    norm of its update. So no signal of a sum is larger than n s, and the j-th largest is at most n c'/sqrt(j), or j of them would be
    longer than the sum can be. The union runs over these coordinates, j rounded down to a power of two, both signs, every round, and
    the two sums that a hybrid round may have. Who is missing from a sum takes signal and noise away, never adds any. Where parties
    choose coordinates of their own there are more of them, but one that k parties share has k/n of the variance, and at most k/n of the
    tail: not more in all.

    Updates that were rotated in blocks: before rounding, which moves a sum by less than n, a coordinate of the sum is a sum of its block's
    values under random signs, divided by sqrt(block). It is subgaussian (Hoeffding) with deviation n s / sqrt(block) at most, and so is,
    with the sum of both variances, what the independent noise makes of it.
    """
    half, signal = 1 << (bits - 1), parties * steps
    norm = rounded_norm_bound(steps, dimension)
    deviation = multiplier * norm
    if block:
        z = max(0, half - parties) / math.hypot(signal / math.sqrt(block), deviation)
        return min(1.0, 4 * rounds * dimension * math.exp(-0.5 * z * z))
    if signal >= half:
        return 1.0
    if deviation == 0:
        return 0.0
    divergence = sum_divergence(deviation / math.sqrt(parties), parties)
    found, largest = 0.0, 1
    while largest <= dimension:  # coordinates number `largest` to 2 largest - 1 of the sum, by size
        room = half - min(signal, parties * norm / math.sqrt(largest))
        found += min(largest, dimension - largest + 1) * _tail(room, deviation, divergence)
        largest *= 2
    return min(1.0, 4 * rounds * found)


def _tail(reach: float, deviation: float, divergence: float) -> float:
    """A bound on P[noise >= reach] for a sum of discrete Gaussians of this deviation in all, the smaller of two.

    Each of them is subgaussian (Canonne, Kamath, Steinke 2020), so their sum is: exp(-reach^2 / (2 deviation^2)). And one discrete
    Gaussian is at or beyond an integer m with at most the probability that a continuous one is beyond m - 1 (theirs, too), of which
    the sum's is at most exp(divergence) times as much (KLS).
    """
    z = reach / deviation
    bound = math.exp(-0.5 * z * z)
    if divergence < 1:
        bound = min(bound, math.exp(divergence) * 0.5 * math.erfc((reach - 1) / deviation / math.sqrt(2)))
    return bound


def needed_bits(steps: int, dimension: int, parties: int, multiplier: float, rounds: int, block: int = 0) -> int:
    """The fewest bits of a signed sum in which signals cannot wrap, and noise not more likely than WRAP_BOUND in the whole run."""
    bits = 1 + (parties if block else parties * steps).bit_length()
    while wrap_probability(steps, bits, dimension, parties, multiplier, rounds, block) > WRAP_BOUND:
        bits += 1
    return bits
