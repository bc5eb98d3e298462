"""What sums give away of a party that was missing once: everything that the sums before and after hold of it.

A secure sum hides who added what. It does not hide who is in it, and two sums that differ by one party differ by what that
party sends. Two things are seen:

    counts   where raters are counted anew in every round, the counts of a round with the party less those of a round
             without it are 1 for each of its items and 0 elsewhere: its whole list, exactly. Counted once, they are not.
    sums     late in a run the sums hardly change from round to round, so that the mean of those before and after is what
             the sum would have been with the party in it. The difference is the party's gradients, row for row: its items
             are the rows that are not about zero, and from there on the attacks on gradients in the clear apply.

Neither asks how many raters an item has. The remedy for the second is noise, or not to open such a sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpi.attacks.gradient_leak import place_on_grid
from fedmpi.attacks.parties import Floats
from fedmpi.errors import DataError


def items_from_counts(present: Floats, missing: Floats) -> NDArray[np.intp]:
    """The items of whoever is in the first round's counts and not in the second's."""
    present, missing = np.asarray(present, np.float64), np.asarray(missing, np.float64)
    if present.shape != missing.shape or present.ndim != 1:
        raise DataError(f"counts of shape {present.shape} cannot be compared with counts of shape {missing.shape}")
    return np.flatnonzero(present - missing > 0.5)


def missing_gradients(before: Floats, during: Floats, after: Floats, answer: float | Floats = 0.0) -> Floats:
    """What the party that is only in the first and the last of three rounds' sums, (items, columns), would have sent in the
    second.

    `answer`: the server steps by the sum without the party, and the next sum answers to that: it holds this share of what
    was missing once more, for each item. Whoever took the step knows it; 0 leaves it in.
    """
    before, during, after = (np.asarray(sums, np.float64) for sums in (before, during, after))
    if not before.shape == during.shape == after.shape or before.ndim != 2:
        raise DataError("the sums of three rounds must be of the same items and columns")
    more = 1.0 + np.broadcast_to(np.asarray(answer, np.float64), before.shape[:1]) / 2.0
    return ((before + after) / 2.0 - during) / more[:, None]


def rated_rows(gradients: Floats, quiet: Floats) -> NDArray[np.intp]:
    """Which rows of `missing_gradients` are the party's. `quiet`: the same of three rounds in which nobody was missing, which
    says how much of a row is the sums' own movement.

    Rows are measured by that, and cut in two where the two parts are most alike within themselves, on a logarithmic scale:
    errors of ratings differ by factors, and so does what is left of interpolation.
    """
    sizes, moves = (np.linalg.norm(rows, axis=1) for rows in (gradients, quiet))
    sent = np.flatnonzero(sizes > 0.0)
    if sent.size < 2:
        return sent
    ratios = np.log(sizes[sent] / (moves[sent] + max(np.median(moves[sent]), np.finfo(float).tiny)))
    order = np.argsort(ratios, kind="stable")
    return np.sort(sent[order[_cut(ratios[order]) :]])


def _cut(ascending: Floats) -> int:
    """How many of the values come before the cut that leaves the least squares within both parts."""
    below = np.arange(1, ascending.size)
    sums, squares = np.cumsum(ascending), np.cumsum(np.square(ascending))
    left = squares[:-1] - np.square(sums[:-1]) / below
    right = squares[-1] - squares[:-1] - np.square(sums[-1] - sums[:-1]) / (ascending.size - below)
    return int(below[np.argmin(left + right)])


def level_on_grid(ratings: Floats, grid: Floats) -> Floats:
    """Ratings whose common constant is known badly, moved to an evenly spaced grid.

    What errors say of a party's own offset is wrong by as many times their own error as it has ratings. The grid gives the
    constant up to whole steps; of the levels at which every rating is on the grid, the nearest is taken.
    """
    if not np.size(ratings):
        return np.array(ratings, np.float64)
    top, grid = place_on_grid(ratings, grid), np.unique(np.asarray(grid, np.float64))
    step = grid[1] - grid[0]
    room = max(int(np.rint((top.min() - grid[0]) / step)), 0)
    down = np.clip(np.rint(np.mean(top - ratings) / step), 0, room)
    found: Floats = top - step * down
    return found
