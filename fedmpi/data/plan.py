"""From a partition's settings and a data set's labels to the sample indices of every party."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.data import catalog, partition
from fedmpi.data.images import ImageSet
from fedmpi.errors import ConfigError, DataError
from fedmpi.randomness.words import labelled_generator

BY_CLASSES = ("classes", "drawn")  # every party has exactly s of them
SCHEMES = ("classes", "drawn", "dirichlet", "writers")

#: Fewest training samples of a party under the Dirichlet scheme; fewer cannot fill a batch.
MIN_SAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class PartitionSpec:
    """Everything that decides which party holds which sample."""

    dataset: str
    data_dir: str | None = None  # folder that contains the official layout; None: download into the cache
    parties: int
    scheme: str = "classes"
    classes_per_party: int = 2  # scheme classes
    alpha: float = 0.5  # scheme dirichlet
    test_fraction: float = 0.2  # only for data without an official test split
    validation_fraction: float = 0.0  # of the training samples, to evaluate on in place of the test samples
    samples_per_party: int = 0  # cap on training samples; 0: all
    shrink: int = 1  # every shrink x shrink pixels become one, their mean
    test_samples_per_party: int = 0  # cap on test samples; 0: all, or in proportion to capped training samples
    seed: int = 0

    def __post_init__(self) -> None:
        source = catalog.get(self.dataset)
        for name in ("parties", "classes_per_party", "samples_per_party", "test_samples_per_party", "shrink", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} = {value!r}: must be a whole number")
        for name in ("alpha", "test_fraction", "validation_fraction"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ConfigError(f"{name} = {value!r}: must be a number")
        partition.check_parties(self.parties)
        if self.shrink < 1:
            raise ConfigError(f"shrink = {self.shrink}: must be 1 (not at all) or more")
        if self.scheme not in SCHEMES:
            raise ConfigError(f"scheme = {self.scheme!r}: must be one of {', '.join(SCHEMES)}")
        if self.scheme in BY_CLASSES:
            partition.check_classes_per_party(self.classes_per_party, source.num_classes)
        elif self.scheme == "dirichlet":
            partition.check_alpha(self.alpha)
        elif not source.has_writers:
            able = ", ".join(name for name in catalog.known() if catalog.get(name).has_writers)
            raise ConfigError(f"partition = writers: {self.dataset} does not say who wrote what; only for {able}")
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction = {self.test_fraction}: must lie between 0 and 1")
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"validation_fraction = {self.validation_fraction}: must be 0 (none) or lie below 1")
        fewest = self.classes_per_party if self.scheme in BY_CLASSES else 1
        if self.scheme == "drawn" and not self.samples_per_party:
            raise ConfigError("partition = drawn: needs samples_per_party, how many each party draws")
        for name, default in (("samples_per_party", "all"), ("test_samples_per_party", "in proportion")):
            value = getattr(self, name)
            if value and value < fewest:
                raise ConfigError(
                    f"{name} = {value}: must be 0 ({default}) or at least {fewest}, one of each class of a party"
                )

    def canonical(self) -> dict[str, Any]:
        """The settings that have an effect. data_dir is not among them: the same files may lie anywhere."""
        validation = {"validation_fraction": float(self.validation_fraction)} if self.validation_fraction else {}
        return {
            "dataset": self.dataset,
            "parties": self.parties,
            "scheme": self.scheme,
            "classes_per_party": self.classes_per_party if self.scheme in BY_CLASSES else None,
            "alpha": float(self.alpha) if self.scheme == "dirichlet" else None,
            "test_fraction": None if catalog.get(self.dataset).has_test else float(self.test_fraction),
            "samples_per_party": self.samples_per_party,
            "test_samples_per_party": self.test_samples_per_party,
            "shrink": self.shrink,
            "seed": self.seed,
            **validation,
        }

    def fingerprint(self) -> list[tuple[str, int, int]] | None:
        """Name, size and time of every official file, so that replaced files are not served from old prepared ones.

        None where there is no folder to look at: what comes with scikit-learn, and downloads, whose checksums make
        them the same everywhere.
        """
        if self.data_dir is None:
            return None
        paths = catalog.get(self.dataset).locate(Path(self.data_dir).expanduser())
        stats = [(path.name, path.stat()) for path in paths]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats] or None


@dataclass(frozen=True)
class Plan:
    """Indices per party. Where a validation fraction is set, `test` holds validation samples and no test sample is anywhere."""

    train: list[np.ndarray]
    test: list[np.ndarray]
    classes: list[list[int]]  # classes of each party's training samples, ascending
    public: np.ndarray  # training rows that were held out for nobody's test or validation, as a mask
    own_test: bool  # the test indices point into the data set's own test split, not into its training arrays


def keyed_rng(seed: int, *purpose: object) -> np.random.Generator:
    """A generator for one purpose: no draw depends on how many draws were made for another."""
    return labelled_generator(seed, "partition", *purpose)


def make_plan(spec: PartitionSpec, data: ImageSet) -> Plan:
    y, own_test = data.train_y, data.test_y is not None and not spec.validation_fraction
    public = np.ones(len(y), dtype=bool)
    if spec.scheme == "drawn":
        train, test = _draw(spec, data, public)
    else:
        train, test = _split(spec, data)
        # test samples first: they are the same with and without validation
        if data.test_y is None:
            train, test = _held_out(y, train, spec.test_fraction, spec.seed, "hold-out", public)
        if spec.validation_fraction:
            train, test = _held_out(y, train, spec.validation_fraction, spec.seed, "validation", public)
    test_y = data.test_y if own_test else y
    classes = []
    for party in range(spec.parties):
        train[party], test[party] = _capped(spec, party, y, train[party], test_y, test[party])
        if len(train[party]) == 0 or len(test[party]) == 0:
            evaluated = "validation" if spec.validation_fraction else "test"
            raise DataError(
                f"party {party} of {spec.parties} would have {len(train[party])} training and {len(test[party])} {evaluated} "
                f"samples of {spec.dataset}: use fewer parties"
            )
        classes.append([int(c) for c in np.unique(y[train[party]])])
    return Plan(train, test, classes, public, own_test)


def _held_out(
    y: np.ndarray, parts: list[np.ndarray], fraction: float, seed: int, purpose: str, public: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(what stays, what is held out) of every party's samples; what is held out is struck off `public`."""
    marks = [partition.hold_out(y[part], fraction, keyed_rng(seed, purpose, party)) for party, part in enumerate(parts)]
    held = [part[mark] for part, mark in zip(parts, marks)]
    public[np.concatenate(held)] = False
    return [part[~mark] for part, mark in zip(parts, marks)], held


def _draw(spec: PartitionSpec, data: ImageSet, public: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Training and test samples of every party from pools that all share. What is held out is held out of the pool, before
    anybody draws: no party is tested, or validated, on what another trains on."""
    assignment = partition.assign_classes(
        spec.parties, spec.classes_per_party, data.num_classes, keyed_rng(spec.seed, "assignment")
    )
    y = test_y = data.train_y
    if data.test_y is None:
        held = partition.hold_out(y, spec.test_fraction, keyed_rng(spec.seed, "hold-out"))
        pool, test_pool = np.flatnonzero(~held), np.flatnonzero(held)
        public[test_pool] = False
    else:
        test_y, pool, test_pool = data.test_y, np.arange(len(y)), np.arange(len(data.test_y))
    if spec.validation_fraction:
        held = partition.hold_out(y[pool], spec.validation_fraction, keyed_rng(spec.seed, "validation"))
        test_y, pool, test_pool = y, pool[~held], pool[held]
        public[test_pool] = False
    train = partition.draw_for_parties(y, pool, assignment, spec.samples_per_party, keyed_rng(spec.seed, "train"))
    count = spec.test_samples_per_party or spec.samples_per_party
    return train, partition.draw_for_parties(test_y, test_pool, assignment, count, keyed_rng(spec.seed, "test"))


def _split(spec: PartitionSpec, data: ImageSet) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """All samples to the parties; the second list stays empty if there is no official test split."""
    for_train, for_test = keyed_rng(spec.seed, "train"), keyed_rng(spec.seed, "test")
    if spec.scheme == "classes":
        assignment = partition.assign_classes(
            spec.parties, spec.classes_per_party, data.num_classes, keyed_rng(spec.seed, "assignment")
        )
        train = partition.split_by_classes(data.train_y, assignment, for_train)
        return train, [] if data.test_y is None else partition.split_by_classes(data.test_y, assignment, for_test)
    if spec.scheme == "writers":
        chosen = partition.choose_writers(
            data.train_writers, data.test_writers, spec.parties, keyed_rng(spec.seed, "writers")
        )
        return tuple(partition.split_by_writers(of, chosen) for of in (data.train_writers, data.test_writers))
    # without a test set, one sample more than there are classes makes sure that some class has two to hold one out from
    minimum = max(MIN_SAMPLES, data.num_classes + 1) if data.test_y is None else MIN_SAMPLES
    proportions = partition.draw_proportions(
        data.train_y,
        data.num_classes,
        spec.parties,
        spec.alpha,
        minimum,
        keyed_rng(spec.seed, "proportions"),
        data.test_y,
    )
    train = partition.split_by_proportions(data.train_y, proportions, for_train)
    return train, [] if data.test_y is None else partition.split_by_proportions(data.test_y, proportions, for_test)


def _capped(
    spec: PartitionSpec, party: int, y: np.ndarray, train: np.ndarray, test_y: np.ndarray, test: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """At most `samples_per_party` training samples; test samples as their own cap says, or in proportion, but one of each
    class at least."""
    cap, share = spec.samples_per_party, 1.0
    if 0 < cap < len(train):
        share = cap / len(train)
        train = train[partition.thin_out(y[train], cap, keyed_rng(spec.seed, "cap-train", party))]
        if spec.scheme != "writers":  # whose test samples are what they wrote, of whatever class
            # a cap below the number of classes drops some from the training samples; do not test on those
            test = test[np.isin(test_y[test], y[train])]
    keep = max(spec.test_samples_per_party or round(share * len(test)), len(np.unique(test_y[test])))
    return train, test[partition.thin_out(test_y[test], keep, keyed_rng(spec.seed, "cap-test", party))]
