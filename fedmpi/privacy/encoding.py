"""Fixed-point encoding: a clipped float vector as integers modulo 2^b, so that sums are exact in any order.

C is cut into `steps` integer steps; a coordinate takes b bits, b being the smallest width in which the sum of all
parties' signals cannot wrap and their noise wraps with probability at most 2^-40 in the whole run.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedmpi.errors import ConfigError
from fedmpi.privacy.noise import rounded_norm_bound

WRAP_BOUND = 2.0**-40  # probability, over the whole run, that noise carries any coordinate of a sum around
FINEST = 2**20  # steps in C where there is no noise to hide the rounding
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
    *, clip: float, dimension: int, parties: int, multiplier: float, rounds: int, bits: int = 0, steps: int = 0
) -> Encoding:
    """The encoding of a run; ConfigError if the asked width could wrap.

    Without a given width, steps are the fewest powers of two for which rounding lengthens an update by less than 1 %:
    finer ones would only carry the noise's own digits.
    """
    if bits and not NARROWEST <= bits <= WIDEST:
        raise ConfigError(f"bits = {bits}: must be 0 (chosen for you) or {NARROWEST} to {WIDEST}")

    def needed(steps: int) -> int:
        return needed_bits(steps, dimension, parties, multiplier, rounds)

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
    else:
        steps = FINEST
        if multiplier > 0:
            steps = max(1 << 12, 1 << math.ceil(math.log2(4 * math.sqrt(dimension))))
        bits = max(NARROWEST, needed(steps))
    if bits > WIDEST:
        raise ConfigError(f"parties = {parties}: their sum needs {bits} bits, at most {WIDEST} are possible")
    return Encoding(clip, steps, bits, dimension)


def needed_bits(steps: int, dimension: int, parties: int, multiplier: float, rounds: int) -> int:
    """Bits of a signed sum: every signal at its bound, plus noise out to where its tail is below WRAP_BOUND.

    The noise of a sum is subgaussian with deviation multiplier * sensitivity, so P(|noise| > z s) <= 2 exp(-z^2 / 2); the
    union runs over every coordinate of every round, and twice for a party's own value, which is never wider.
    """
    signal = parties * steps
    tail = math.sqrt(2 * math.log(4 * dimension * rounds / WRAP_BOUND))
    bound = signal + tail * multiplier * rounded_norm_bound(steps, dimension)
    return 1 + math.ceil(math.log2(bound + 1))
