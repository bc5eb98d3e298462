"""The recovery attack, MMF 4.2.1 and table 2: stretch the masked ratings to the range of the true ones.

The observer has the masked ratings r_ui - f_u(i) of a party, MMF (11), and is assumed to know the lowest and the
highest rating that the party gave. A rating counts as recovered at error level g if the guess is off by less than g
steps of the rating scale (MMF prints the strict inequality, and alpha where g is meant).

A table with large g says little alone: knowing the range, one gets far by guessing its middle for every item. The same
functions on constant masked ratings give exactly that baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpi.attacks.parties import BINS, Floats, Ints, layout, reduce_by_party, shares_by_bin
from fedmpi.errors import ConfigError

LEVELS = (1, 2, 3, 4, 5)

# Far above the rounding of a few float64 operations, far below any error that matters: being off by exactly g steps is
# a miss, whichever way the last bit fell.
_SLACK = 1e-9


def _stretch(offsets: Ints, masked: Floats, lowest: Floats, highest: Floats) -> Floats:
    counts = np.diff(offsets)
    low = reduce_by_party(np.minimum, offsets, masked, 0.0)
    width = reduce_by_party(np.maximum, offsets, masked, 0.0) - low
    flat = width <= 0.0
    share = (masked - np.repeat(low, counts)) / np.repeat(np.where(flat, 1.0, width), counts)
    share[np.repeat(flat, counts)] = 0.5
    # Not low + share * (high - low): this form meets both ends exactly.
    found: Floats = np.repeat(lowest, counts) * (1.0 - share) + np.repeat(highest, counts) * share
    return found


def _recovered(distance: Floats, level: float, step: float) -> NDArray[np.bool_]:
    return distance < level * step * (1.0 - _SLACK)


def recovery_hits(
    offsets: Ints, masked: Floats, ratings: Floats, levels: Sequence[float] = LEVELS, step: float = 1.0
) -> Floats:
    """How many ratings of each party the attack recovers at each error level: (levels, parties), int64."""
    if not step > 0.0:
        raise ConfigError(f"rating step {step}: must be positive")
    offsets, masked, ratings = layout(offsets, masked, ratings)
    # What the observer is assumed to know of the truth, and no more.
    lowest = reduce_by_party(np.minimum, offsets, ratings, 0.0)
    highest = reduce_by_party(np.maximum, offsets, ratings, 0.0)
    distance = np.abs(_stretch(offsets, masked, lowest, highest) - ratings)
    return np.stack(
        [reduce_by_party(np.add, offsets, _recovered(distance, g, step).astype(np.int64), 0) for g in levels]
    )


def recovery_table(
    offsets: Ints, masked: Floats, ratings: Floats, levels: Sequence[float] = LEVELS, step: float = 1.0
) -> Floats:
    """MMF table 2: the proportion of parties whose recovery rate falls into each of the five bins, a row for each
    level. Parties without ratings are left out."""
    hits = recovery_hits(offsets, masked, ratings, levels, step)
    counts = np.diff(np.asarray(offsets, dtype=np.int64))
    return np.stack([shares_by_bin(row, counts) for row in hits]) if len(hits) else np.empty((0, BINS))
