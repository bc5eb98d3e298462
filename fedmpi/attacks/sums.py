"""What a sum of gradients gives away, however securely it was added up: items that few parties rated.

The row of an item with a single rater *is* that rater's gradient. The server is not told whose it is, but it need not
be: rows of one party are multiples of the same factors, so they find each other, and from there on
`gradient_leak.leak` applies. Sums over two raters and more are not attacked here; that they resist is not claimed.

The remedy is not to send such rows (`min_raters`). A row that was not sent is zero in every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpi.attacks.gradient_leak import Leak, Observation, Undetermined, checked, leak
from fedmpi.attacks.parties import Floats, Ints
from fedmpi.errors import DataError

# Lowest count and label of each class.
_CLASSES = ((0, "0"), (1, "1"), (2, "2"), (3, "3-5"), (6, "6-10"), (11, ">10"))


@dataclass(frozen=True)
class Exposure:
    """Items with so many raters, and the ratings that these items have together."""

    raters: str
    items: int
    ratings: int


def exposure_by_raters(rater_counts: Ints) -> tuple[Exposure, ...]:
    """How many items have no, one, two, ... raters: the first rows are the ones that sums do not hide."""
    counts = np.asarray(rater_counts, dtype=np.int64)
    if counts.ndim != 1 or np.any(counts < 0):
        raise DataError("rater counts must be one row of numbers that are not negative")
    column = np.searchsorted([lowest for lowest, _ in _CLASSES], counts, side="right") - 1
    items = np.bincount(column, minlength=len(_CLASSES))
    ratings = np.zeros(len(_CLASSES), dtype=np.int64)
    np.add.at(ratings, column, counts)
    return tuple(Exposure(label, int(i), int(r)) for (_, label), i, r in zip(_CLASSES, items, ratings))


@dataclass(frozen=True)
class SumLeak:
    """Ratings that were read out of sums: of the j-th item, `items[j]`, by the unnamed party `groups[j]`."""

    items: Ints
    groups: Ints
    ratings: Floats
    leaks: tuple[Leak, ...]  # one a group
    single_rater_items: int  # that were sent, solved or not


def leak_from_sum(
    observations: Sequence[Observation],
    rater_counts: Ints,
    regularisation: float | Floats,
    grid: Floats | None = None,
    fixed: Mapping[int, float] | None = None,
    *,
    noise: float = 0.0,
    smallest_group: int | None = None,
) -> SumLeak:
    """Ratings of items with one rater, from the summed gradients of all items, (items, k), in one round or more.

    Rows are put together if they are parallel in every round: within an angle whose cosine is 1 - 1e-6, or with a
    distance from the common line that `noise` explains (the root mean square error of an entry, known to whoever knows
    the fixed-point scale). Groups of fewer than `smallest_group` items are left alone; the default is 3, and 1 with
    `fixed`, where every row gives its rating by itself. The other arguments are those of `leak`.
    """
    smallest = smallest_group if smallest_group is not None else (1 if fixed else 3)
    counts = np.asarray(rater_counts)
    rounds = [checked(observation) for observation in observations]
    if not rounds:
        raise DataError("there is no round to look at")
    if any(q_rows.shape != rounds[0][0].shape for q_rows, _ in rounds) or counts.shape != rounds[0][0].shape[:1]:
        raise DataError("every round must hold a row for each item that has a rater count, and as many factors")
    sent = np.all([np.any(gradients != 0.0, axis=1) for _, gradients in rounds], axis=0)
    single = np.flatnonzero((counts == 1) & sent)
    rows = np.stack([np.asarray(regularisation) * q_rows[single] - gradients[single] for q_rows, gradients in rounds])
    items, groups, ratings, leaks = [], [], [], list[Leak]()
    for members in _parallel_groups(rows, noise):
        if members.size < smallest:
            continue
        own = single[members]
        try:
            found = leak([Observation(q[own], g[own]) for q, g in rounds], regularisation, grid, fixed)
        except Undetermined:
            continue
        items.append(own)
        groups.append(np.full(own.size, len(leaks)))
        ratings.append(found.ratings)
        leaks.append(found)
    none = np.empty(0, dtype=np.int64)
    return SumLeak(
        np.concatenate([none, *items]),
        np.concatenate([none, *groups]),
        np.concatenate([np.empty(0), *ratings]),
        tuple(leaks),
        int(single.size),
    )


def _parallel_groups(rows: Floats, noise: float) -> list[NDArray[np.intp]]:
    """Indices of rows, (rounds, rows, k), that are parallel in every round. The longest row that is left starts the
    next group: its direction is known best."""
    widest_sine = np.sqrt(1.0 - (1.0 - 1e-6) ** 2)
    blur = 4.0 * noise * np.sqrt(rows.shape[2])
    lengths = np.linalg.norm(rows, axis=2)
    # A row that is nothing but noise in every round is parallel to anything.
    left = np.flatnonzero(np.any(lengths > max(4.0 * blur, 1e-300), axis=0))
    strength = np.min(lengths, axis=0)
    groups = []
    while left.size:
        start = left[np.argmax(strength[left])]
        together = np.ones(left.size, dtype=bool)
        for t in range(rows.shape[0]):
            if lengths[t, start] <= 4.0 * blur:
                continue  # nothing to compare with in this round
            unit = rows[t, start] / lengths[t, start]
            off = rows[t, left] - np.outer(rows[t, left] @ unit, unit)
            together &= np.linalg.norm(off, axis=1) <= np.maximum(widest_sine * lengths[t, left], blur)
        together[left == start] = True
        groups.append(left[together])
        left = left[~together]
    return groups
