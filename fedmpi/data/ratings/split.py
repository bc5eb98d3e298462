"""Which ratings are for training and which for testing, and ratings made from listening counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedmpi.data.prepared import keyed_rng

TRAIN, VALIDATION, TEST = 0, 1, 2

_BINS = 5


@dataclass(frozen=True, eq=False)
class Side:
    """The ratings of one side of the split: those of party p are offsets[p] to offsets[p + 1], items ascending."""

    offsets: np.ndarray  # int64
    items: np.ndarray  # int32
    values: np.ndarray  # float32


@dataclass(frozen=True, eq=False)
class Shares:
    """What the parties hold. With validation, `test` holds validation ratings and no test rating is anywhere."""

    train: Side
    test: Side
    users: np.ndarray  # row of the rating set that each party is
    rescued: int  # parties that `split` gave a training rating back
    edges: list[float] | None  # listening counts that part the ratings, where ratings are made of them
    optimum_rmse: float | None  # generated: of the best possible prediction of the test ratings


def split(
    users: np.ndarray, num_users: int, test_fraction: float, validation_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """TRAIN, VALIDATION or TEST for every rating, and which users were rescued.

    Test ratings are drawn uniformly from all ratings, validation ratings from what is left. A user all of whose
    ratings were drawn is rescued: the one drawn last goes back, so that every user has a training rating. The test
    ratings are the same with and without validation.
    """
    parts = np.full(len(users), TRAIN, dtype=np.uint8)
    rescued = np.zeros(num_users, dtype=bool)
    bounds = np.searchsorted(users, np.arange(num_users + 1))
    for code, fraction in ((TEST, test_fraction), (VALIDATION, validation_fraction)):
        if not fraction:
            continue
        lot = keyed_rng(seed, "ratings", "split", code).random(len(users))
        left = np.flatnonzero(parts == TRAIN)
        count = round(fraction * len(left))
        parts[left[np.argsort(lot[left], kind="stable")[:count]]] = code
        kept = np.bincount(users[parts == TRAIN], minlength=num_users)
        for user in np.flatnonzero(kept == 0):
            own = np.arange(bounds[user], bounds[user + 1])
            drawn = own[parts[own] == code]
            parts[drawn[np.argmax(lot[drawn])]] = TRAIN
            rescued[user] = True
    return parts, rescued


def bin_counts(counts: np.ndarray, train: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Listening counts as ratings 1 to 5 by the quintiles of the training counts of all users.

    Edge j is the smallest training count c such that at least j fifths of the training counts are c or less. A rating
    is 1 plus the number of edges below the count, so equal counts get equal ratings. The edges are the same for all
    users: one who listens a lot rates high, as one who listens little rates low.
    """
    ordered = np.sort(counts[train])
    ranks = [-(-j * len(ordered) // _BINS) - 1 for j in range(1, _BINS)]  # whole numbers: no rounding to argue about
    edges = ordered[ranks]
    return (1 + np.searchsorted(edges, counts, side="left")).astype(np.float32), edges.tolist()
