"""The settings of a partition, and the samples that every party holds by them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.data.images import catalog, partition, store
from fedmpi.data.images.partition import Shares
from fedmpi.data.images.source import ImageSet
from fedmpi.data.prepared import Spec, keyed_rng
from fedmpi.errors import ConfigError, DataError

BY_CLASSES = ("classes", "drawn")  # every party has exactly s of them
SCHEMES = ("classes", "drawn", "dirichlet", "writers")

#: Fewest training samples of a party under the Dirichlet scheme; fewer cannot fill a batch.
MIN_SAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class PartitionSpec(Spec):
    """Everything that decides which party holds which sample. test_fraction: only for data without a test split."""

    parties: int
    scheme: str = "classes"
    classes_per_party: int = 2  # scheme classes
    alpha: float = 0.5  # scheme dirichlet
    samples_per_party: int = 0  # cap on training samples; 0: all
    shrink: int = 1  # every shrink x shrink pixels become one, their mean
    test_samples_per_party: int = 0  # cap on test samples; 0: all, or in proportion to capped training samples

    def __post_init__(self) -> None:
        source = catalog.get(self.dataset)
        self.check_numbers()
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
        self.check_fractions()
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

    def official_files(self, data_dir: str) -> list[Path]:
        source = catalog.get(self.dataset)
        return source.locate(source.folder(data_dir))

    def write(self, folder: Path) -> dict[str, Any]:
        data = catalog.get(self.dataset).load(self.data_dir).shrunk(self.shrink)
        return store.write(folder, data, deal(self, data))

    def open(self, folder: Path) -> store.Store:
        return store.Store.open(folder)


def deal(spec: PartitionSpec, data: ImageSet) -> Shares:
    """The samples of every party, by index."""
    y = data.train_y
    test_y = y if data.test_y is None or spec.validation_fraction else data.test_y  # what test indices point into
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
    classes = []
    for party in range(spec.parties):
        train[party], test[party] = _capped(spec, party, y, train[party], test_y, test[party])
        if len(train[party]) == 0 or len(test[party]) == 0:
            raise DataError(
                f"party {party} of {spec.parties} would have {len(train[party])} training and {len(test[party])} "
                f"{spec.evaluate_on} samples of {spec.dataset}: use fewer parties"
            )
        classes.append([int(c) for c in np.unique(y[train[party]])])
    return Shares(train, test, classes, public, own_test=test_y is not y)


def _held_out(
    y: np.ndarray, parts: list[np.ndarray], fraction: float, seed: int, purpose: str, public: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(what stays, what is held out) of every party's samples; what is held out is struck off `public`."""
    marks = [partition.hold_out(y[part], fraction, keyed_rng(seed, purpose, party)) for party, part in enumerate(parts)]
    held = [part[mark] for part, mark in zip(parts, marks)]
    public[np.concatenate(held)] = False
    return [part[~mark] for part, mark in zip(parts, marks)], held


def _assignment(spec: PartitionSpec, data: ImageSet) -> list[tuple[int, ...]]:
    rng = keyed_rng(spec.seed, "assignment")
    return partition.assign_classes(spec.parties, spec.classes_per_party, data.num_classes, rng)


def _draw(spec: PartitionSpec, data: ImageSet, public: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Training and test samples of every party from pools that all share. What is held out is held out of the pool, before
    anybody draws: no party is tested, or validated, on what another trains on."""
    assignment = _assignment(spec, data)
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
        assignment = _assignment(spec, data)
        train = partition.split_by_classes(data.train_y, assignment, for_train)
        return train, [] if data.test_y is None else partition.split_by_classes(data.test_y, assignment, for_test)
    if spec.scheme == "writers":
        assert data.train_writers is not None and data.test_writers is not None  # the catalog says who has them
        writers = data.train_writers, data.test_writers
        chosen = partition.choose_writers(*writers, spec.parties, keyed_rng(spec.seed, "writers"))
        return partition.split_by_writers(writers[0], chosen), partition.split_by_writers(writers[1], chosen)
    # without a test set, one sample more than there are classes makes sure that some class has two to hold one out from
    minimum = max(MIN_SAMPLES, data.num_classes + 1) if data.test_y is None else MIN_SAMPLES
    rng = keyed_rng(spec.seed, "proportions")
    proportions = partition.draw_proportions(
        data.train_y, data.num_classes, spec.parties, spec.alpha, minimum, rng, data.test_y
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
