"""Who holds which samples: pure functions from labels and a generator to index arrays, one per party.

Four schemes. `classes`: every party holds exactly s classes, and each class is shared out evenly among its holders.
`dirichlet`: each class is shared out in random proportions, the more uneven the smaller alpha is.
Both come in two steps, first the assignment (or the proportions), then the split, so that the test data of a party can
follow the classes of its training data. `writers`: a party is one of the people who made the samples, and has theirs.
`drawn`: each party draws s classes' samples for itself, so that there may be more parties than the samples would go round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedmpi.errors import ConfigError, DataError

#: Redraws of the Dirichlet proportions before giving up; a draw costs well under a millisecond.
MAX_TRIES = 1000


@dataclass(frozen=True)
class Shares:
    """Indices per party. With validation, `test` holds validation samples and no test sample is anywhere."""

    train: list[np.ndarray]
    test: list[np.ndarray]
    classes: list[list[int]]  # classes of each party's training samples, ascending
    public: np.ndarray  # training rows that were held out for nobody's test or validation, as a mask
    own_test: bool  # the test indices point into the data set's own test split, not into its training arrays


def check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha = {alpha}: must be a finite number above 0")


def check_parties(parties: int) -> None:
    if parties < 1:
        raise ConfigError(f"parties = {parties}: must be at least 1")


def check_classes_per_party(classes_per_party: int, num_classes: int) -> None:
    if not 1 <= classes_per_party <= num_classes:
        raise ConfigError(f"classes_per_party = {classes_per_party}: must be 1 to {num_classes}, the number of classes")


# --- every party holds exactly s classes -----------------------------------------------------------------------------


def assign_classes(
    parties: int, classes_per_party: int, num_classes: int, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Give every party exactly `classes_per_party` distinct classes; classes differ by at most 1 in their holders.

    Each party in turn takes the classes with fewest holders so far, ties broken at random. Numbers of holders that lie
    within 1 of each other stay so: no class is taken beyond the others before all of them have caught up.
    """
    check_parties(parties)
    check_classes_per_party(classes_per_party, num_classes)
    holders = np.zeros(num_classes, dtype=np.int64)
    assignment = []
    for _ in range(parties):
        fewest_first = np.lexsort((rng.random(num_classes), holders))
        taken = fewest_first[:classes_per_party]
        holders[taken] += 1
        assignment.append(tuple(sorted(int(c) for c in taken)))
    return assignment


def split_by_classes(
    labels: np.ndarray, assignment: Sequence[Sequence[int]], rng: np.random.Generator
) -> list[np.ndarray]:
    """Shuffle the samples of each class and share them out evenly (sizes differ by at most 1) among its holders.

    Covers all samples of the classes that someone holds. Each party's indices come back in ascending order.
    """
    parts: list[list[np.ndarray]] = [[] for _ in assignment]
    for c in sorted({c for held in assignment for c in held}):
        holders = np.array([party for party, held in enumerate(assignment) if c in held])
        samples = np.flatnonzero(labels == c)
        if len(samples) < len(holders):
            raise DataError(
                f"class {c} has {len(samples)} samples for {len(holders)} parties: "
                "use fewer parties or a smaller classes_per_party"
            )
        # the holders are permuted too, or the surplus sample would always go to the lowest party
        pieces = np.array_split(rng.permutation(samples), len(holders))
        for party, piece in zip(rng.permutation(holders), pieces):
            parts[party].append(piece)
    return [_joined(pieces) for pieces in parts]


def draw_for_parties(
    labels: np.ndarray, pool: np.ndarray, assignment: Sequence[Sequence[int]], count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """For every party `count` samples of the pool, as many of each of its classes as of the others, or one more. No party
    has a sample twice; two parties may have the same one. A class of too few samples gives all it has."""
    by_class = {c: pool[labels[pool] == c] for c in {c for held in assignment for c in held}}
    parts = []
    for held in assignment:
        quota = apportion(count, np.full(len(held), 1 / len(held)))
        parts.append(_joined([rng.permutation(by_class[c])[:n] for c, n in zip(rng.permutation(held), quota)]))
    return parts


# --- Dirichlet proportions -------------------------------------------------------------------------------------------


def dirichlet_proportions(num_classes: int, parties: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """One row per class: the share of the class that each party gets. Small alpha is uneven, large alpha is even."""
    check_parties(parties)
    check_alpha(alpha)
    return rng.dirichlet(np.full(parties, float(alpha)), size=num_classes)


def apportion(total: int, shares: np.ndarray) -> np.ndarray:
    """`total` as integers in proportion to `shares` (sum 1) by largest remainder; a share of 0 gets 0."""
    ideal = total * shares
    counts: np.ndarray = np.floor(ideal).astype(np.int64)
    by_remainder = np.argsort(counts - ideal, kind="stable")
    counts[by_remainder[: total - int(counts.sum())]] += 1
    return counts


def counts_by_proportions(class_counts: np.ndarray, proportions: np.ndarray) -> np.ndarray:
    """How many samples of each class (row) each party (column) gets; every row adds up to the class's count."""
    counts = np.zeros(proportions.shape, dtype=np.int64)
    for c, total in enumerate(class_counts):
        if total == 0:
            continue
        if proportions[c].sum() == 0:
            raise DataError(f"class {c} has {total} samples but no party has a share of it")
        counts[c] = apportion(int(total), proportions[c])
    return counts


def split_by_proportions(labels: np.ndarray, proportions: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle the samples of each class and cut them by its row of `proportions`. Covers every sample."""
    num_classes, parties = proportions.shape
    counts = counts_by_proportions(_class_counts(labels, num_classes), proportions)
    parts: list[list[np.ndarray]] = [[] for _ in range(parties)]
    for c in range(num_classes):
        shuffled = rng.permutation(np.flatnonzero(labels == c))
        for party, piece in enumerate(np.split(shuffled, np.cumsum(counts[c])[:-1])):
            parts[party].append(piece)
    return [_joined(pieces) for pieces in parts]


def draw_proportions(
    labels: np.ndarray,
    num_classes: int,
    parties: int,
    alpha: float,
    minimum: int,
    rng: np.random.Generator,
    test_labels: np.ndarray | None = None,
) -> np.ndarray:
    """Dirichlet proportions that give every party `minimum` training samples (and a test sample, if there are any).

    What comes back is the proportions as the training samples realise them. So a class of which a party has no training
    sample has share 0, and the same proportions applied to the test set never test a party on a class it cannot know.
    """
    train = _class_counts(labels, num_classes)
    if parties * minimum > train.sum():
        raise DataError(
            f"{train.sum()} samples cannot give {parties} parties {minimum} each: use at most "
            f"{train.sum() // minimum} parties"
        )
    for _ in range(MAX_TRIES):
        counts = counts_by_proportions(train, dirichlet_proportions(num_classes, parties, alpha, rng))
        if counts.sum(axis=0).min() < minimum:
            continue
        realised: np.ndarray = counts / np.maximum(train, 1)[:, None]
        if test_labels is not None:
            test = counts_by_proportions(_class_counts(test_labels, num_classes), realised)
            if test.sum(axis=0).min() < 1:
                continue
        return realised
    raise DataError(
        f"alpha = {alpha} left one of {parties} parties below {minimum} samples in each of {MAX_TRIES} draws: "
        "use a larger alpha or fewer parties"
    )


# --- a party is a writer ---------------------------------------------------------------------------------------------


def choose_writers(train: np.ndarray, test: np.ndarray, parties: int, rng: np.random.Generator) -> np.ndarray:
    """As many of the writers with training and test samples as there are parties, in ascending order."""
    check_parties(parties)
    both = np.intersect1d(train, test)
    if parties > len(both):
        raise DataError(
            f"{len(both)} writers with training and test samples are too few for {parties} parties: use at most "
            f"{len(both)} parties"
        )
    return np.sort(rng.permutation(both)[:parties])


def split_by_writers(writers: np.ndarray, chosen: np.ndarray) -> list[np.ndarray]:
    """The samples of each chosen writer, in ascending order; `chosen` is sorted."""
    party = np.minimum(np.searchsorted(chosen, writers), len(chosen) - 1)
    samples = np.flatnonzero(chosen[party] == writers)
    party = party[samples]
    bounds = np.cumsum(np.bincount(party, minlength=len(chosen)))[:-1]
    return np.split(samples[np.argsort(party, kind="stable")], bounds)


# --- picks within one party ------------------------------------------------------------------------------------------


def hold_out(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Mark `fraction` of each class, but at least one sample and not all, wherever the class has two or more."""
    marked = np.zeros(len(labels), dtype=bool)
    for c in np.unique(labels):
        samples = rng.permutation(np.flatnonzero(labels == c))
        if len(samples) >= 2:
            marked[samples[: min(max(round(fraction * len(samples)), 1), len(samples) - 1)]] = True
    return marked


def thin_out(labels: np.ndarray, keep: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of `keep` samples, each class in proportion and with at least one if `keep` allows; all if too few."""
    if keep >= len(labels):
        return np.arange(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    floor = 1 if keep >= len(classes) else 0
    spare = counts - floor
    quota = floor + apportion(keep - floor * len(classes), spare / spare.sum())
    picks = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, quota)]
    return _joined(picks)


def _class_counts(labels: np.ndarray, num_classes: int) -> np.ndarray:
    return np.bincount(labels, minlength=num_classes)


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return np.sort(np.concatenate(pieces)) if pieces else np.empty(0, dtype=np.int64)
