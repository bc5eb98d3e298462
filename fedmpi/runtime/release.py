"""From a party's update to what may leave it: clip, round, add its share of the noise. DSU (12) and (13)."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from fedmpi.config import Config
from fedmpi.errors import ProtocolError
from fedmpi.privacy.encoding import Encoding
from fedmpi.privacy.noise import clip, discrete_gaussian, round_conditionally
from fedmpi.privacy.statement import noise_to_signal
from fedmpi.randomness.sources import source
from fedmpi.randomness.words import WordSource

ROWS = 1 << 14  # encoded at a time: they stay in the cache


@dataclass(frozen=True)
class Release:
    """The rule of a run: the encoding, the noise multiplier, and where randomness comes from."""

    encoding: Encoding
    multiplier: float  # sigma: noise of the whole sum over its sensitivity
    seed: int
    entropy: str
    margin: float = 0.0  # share of the cohort whose noise may be lost
    shortens: bool = True  # False: an update longer than the bound ends the run

    @classmethod
    def of(cls, config: Config, encoding: Encoding, multiplier: float, shortens: bool = True) -> "Release":
        return cls(encoding, multiplier, config.run.seed, config.privacy.entropy, config.privacy.noise_margin, shortens)

    def share(self, cohort: int) -> float:
        """One party's noise deviation in steps: n_t such shares, less the margin, make sigma times the sensitivity."""
        return self.multiplier * self.encoding.sensitivity / math.sqrt(cohort * (1 - self.margin))

    @property
    def summed(self) -> float:
        """The multiplier of a sum that nobody is missing from: the margin is in it."""
        return self.multiplier / math.sqrt(1 - self.margin)

    def noise_ratio(self, config: Config) -> float:
        """R of this run, from public settings alone."""
        run, q = config.run, config.privacy.sampling
        return noise_to_signal(self.summed, q, run.parties, self.encoding.dimension, run.rounds)

    def over(self, dimension: int) -> "Release":
        """The same rule over another number of coordinates, for a support that is found in the round."""
        return dataclasses.replace(self, encoding=dataclasses.replace(self.encoding, dimension=dimension))

    def encode(self, update: np.ndarray, party: int, round: int, cohort: int) -> tuple[np.ndarray, float]:
        """(the update in Z_{2^b}, its norm before clipping)"""
        clipped, norm = clip(update, self.encoding.clip, party=party)  # DSU (12)
        if norm > self.encoding.clip and not self.shortens:
            raise ProtocolError(
                f"the update has norm {norm:.3g}, more than the {self.encoding.clip:g} that a method without clipping can "
                "send; did training diverge?",
                party=party,
                phase="encode",
            )
        steps = round_conditionally(
            clipped * self.encoding.scale, self.encoding.steps, self._source("rounding", party, round), party=party
        )
        if self.multiplier > 0:
            # DSU (13), as integers after the encoding: what the accountant's proof speaks about.
            steps += discrete_gaussian(self.share(cohort), steps.size, self._source("noise", party, round))
        return self.encoding.wrap(steps), norm

    def encode_rows(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows without noise: each coordinate cut to [-C, C] and rounded to the nearest step; (steps, how many of a row's
        values were cut).

        Rounding to nearest is a function of the value alone, so all parties of a rank are encoded at once. It errs by
        half a step at most, and no proof about noise depends on it, because there is none.
        """
        bound, scale = self.encoding.clip, np.asarray(self.encoding.scale, values.dtype)
        steps = np.empty(values.shape, np.int32)
        cut = np.zeros(values.shape[0], np.int64)
        for first in range(0, len(values), ROWS):
            at = slice(first, first + ROWS)
            chunk = values[at] * scale
            largest = np.abs(chunk).max(initial=0)
            if not largest <= self.encoding.steps:  # not finite, or out of range
                if not np.isfinite(chunk).all():
                    raise ProtocolError(
                        "an update holds a value that is not a finite number; it was not sent", phase="encode"
                    )
                cut[at] = (np.abs(values[at]) > bound).sum(axis=1)
                np.clip(chunk, -self.encoding.steps, self.encoding.steps, out=chunk)
            steps[at] = np.rint(chunk, out=chunk)
        return steps, cut

    def _source(self, purpose: str, party: int, round: int) -> WordSource:
        return source(self.entropy, self.seed, purpose, party, round)
