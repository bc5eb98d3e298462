"""The privacy indicator J of MMF 3.3, and what its sample bound is worth.

J is the mean squared error of a party's private model, MMF (13); on the ratings that the model was fitted to it is the
empirical one, MMF (15). The two are the same function on different ratings: pass what was fitted, or what was held out.

The theorem says: the fitted model's J is within a `gap` of the best in its class, with probability 1 - delta, if the
party has enough ratings. The gap and delta are statistics of learning. They are not the parameters of differential
privacy, which MMF does not provide, and nothing here is named after them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedmpi.attacks.parties import Floats, Ints, layout, reduce_by_party
from fedmpi.errors import ConfigError


def indicator(offsets: Ints, masked: Floats, scale_range: tuple[float, float] | None = None) -> Floats:
    """J of every party from its masked ratings r - f(i); NaN without ratings.

    `scale_range` is the (lowest, highest) rating of the scale: J is then that of ratings mapped to [0, 1], as the
    theorem assumes (the model's predictions are mapped along, so a masked rating is only divided). None: in squared
    rating units.
    """
    offsets, masked = layout(offsets, masked)
    counts = np.diff(offsets)
    total = reduce_by_party(np.add, offsets, np.square(masked / _width(scale_range)), 0.0)
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)


def within_assumption(masked: Floats, scale_range: tuple[float, float]) -> float:
    """The share of masked ratings whose scaled square is in [0, 1], which the theorem assumes of all: a model may
    predict beyond the scale."""
    masked = np.asarray(masked, dtype=np.float64)
    return float(np.mean(np.abs(masked) <= _width(scale_range))) if masked.size else float("nan")


def _width(scale_range: tuple[float, float] | None) -> float:
    if scale_range is None:
        return 1.0
    lowest, highest = scale_range
    if not (math.isfinite(lowest) and math.isfinite(highest) and lowest < highest):
        raise ConfigError(f"rating scale from {lowest} to {highest}: must be finite and rise")
    return float(highest) - float(lowest)


@dataclass(frozen=True)
class SampleBound:
    """How many ratings a party needs: so that the empirical J of every model in the class is within the gap of its
    true J, MMF (18); and so that the fitted model's J is within the gap of the best one's, MMF (23) corrected."""

    uniform: int
    best: int


def hypotheses_of(parameters: int, bits: int = 32) -> int:
    """The size of a class of models with that many parameters of `bits` bits: as many as there are bit patterns. An
    int, because no float could hold it."""
    if parameters < 0 or bits < 1:
        raise ConfigError(f"{parameters} parameters of {bits} bits: must be none or more, of at least one bit")
    return 1 << (bits * parameters)


def sample_bound(hypotheses: int, delta: float, gap: float) -> SampleBound:
    """MMF (18), log(2|F|/delta) / (2 gap^2), and MMF (23). The latter puts gap/2 into the former, which makes
    2 log(2|F|/delta) / gap^2; the 2 printed below the line is too much. Both for ratings in [0, 1]."""
    if not gap > 0.0:
        raise ConfigError(f"gap {gap}: must be positive")
    size = _log_size(hypotheses, delta)
    return SampleBound(math.ceil(size / (2.0 * gap * gap)), math.ceil(2.0 * size / (gap * gap)))


def smallest_gap(n: int, hypotheses: int, delta: float) -> float:
    """The gap to the best model in the class that n ratings vouch for: MMF (23), corrected, solved for it. J lies in
    [0, 1], so a gap of 1 or more says nothing."""
    if n < 1:
        return math.inf
    return math.sqrt(2.0 * _log_size(hypotheses, delta) / n)


def _log_size(hypotheses: int, delta: float) -> float:
    if hypotheses < 1:
        raise ConfigError(f"a class of {hypotheses} models: must hold at least one")
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"failure probability {delta}: must be between 0 and 1")
    return math.log(2) + math.log(hypotheses) - math.log(delta)


def bound_in_words(n: int, parameters: int, delta: float = 0.05, gap: float = 0.1) -> str:
    """What the theorem says for a party with n ratings and a model of that many float32 parameters. One line."""
    hypotheses = hypotheses_of(parameters)
    reached, needed = smallest_gap(n, hypotheses, delta), sample_bound(hypotheses, delta, gap).best
    verdict = "vacuous, because no J is above 1" if reached >= 1.0 else "J is at most 1"
    return (
        f"{n} ratings, {parameters} float32 parameters: with probability {1.0 - delta:g} the model's J is within a gap of "
        f"{reached:.3g} of the best in its class ({verdict}); a gap of {gap:g} takes {needed:,} ratings"
    )
