"""The settings of a rating data set, and the ratings that every party holds by them: a party is a user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.data.prepared import Spec, keyed_rng
from fedmpi.data.ratings import catalog, generated, store
from fedmpi.data.ratings.source import RatingSet, RatingSource
from fedmpi.data.ratings.split import TEST, TRAIN, VALIDATION, Shares, Side, bin_counts, split
from fedmpi.errors import ConfigError, DataError

_GENERATED_PARTIES = 200
_GENERATED_RATINGS = 60  # of a user


@dataclass(frozen=True, kw_only=True)
class RatingSpec(Spec):
    """Everything that decides which party holds which rating, and how good a prediction of it can be."""

    parties: int = 0  # users that take part, 0: all (generated: 200); fewer are drawn by the seed
    tag_components: int = 20  # data with tags
    complete: bool | None = None  # see RatingSource.load
    # generated data, as ratings/generated.py draws it
    items: int = 300
    ratings: int = 0  # in total, exactly; 0: 60 a user
    rank: int = 4
    noise: float = 0.5  # standard deviation, before rounding
    data_seed: int = 0

    def __post_init__(self) -> None:
        catalog.get(self.dataset)
        self.check_numbers()
        for name in ("parties", "tag_components", "items", "ratings", "rank"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must not be negative")
        self.check_fractions()
        if self.complete not in (None, True, False):
            raise ConfigError(f"complete = {self.complete!r}: must be true, false or none")
        if self.is_generated:
            if not 0 <= self.noise < float("inf"):
                raise ConfigError(f"noise = {self.noise}: must be at least 0")
            generated.check_sizes(self.users_generated, self.items, self.ratings_generated)

    @property
    def source(self) -> RatingSource:
        return catalog.get(self.dataset)

    @property
    def is_generated(self) -> bool:
        return self.source.loader is None

    @property
    def users_generated(self) -> int:
        return self.parties or _GENERATED_PARTIES

    @property
    def ratings_generated(self) -> int:
        return self.ratings or self.users_generated * min(_GENERATED_RATINGS, self.items)

    def canonical(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "dataset": self.dataset,
            "parties": self.parties,
            "test_fraction": float(self.test_fraction),
            "validation_fraction": float(self.validation_fraction),
            "seed": self.seed,
        }
        if self.is_generated:
            settings |= {
                "parties": self.users_generated,
                "items": self.items,
                "ratings": self.ratings_generated,
                "rank": self.rank,
                "noise": float(self.noise),
                "data_seed": self.data_seed,
            }
        else:
            settings["complete"] = self.complete
            if self.source.has_tags:
                settings["tag_components"] = self.tag_components
        return settings

    def official_files(self, data_dir: str) -> list[Path]:
        return [] if self.is_generated else self.source.find(data_dir).paths()

    def load(self) -> RatingSet:
        if not self.is_generated:
            return self.source.load(self.data_dir, tag_components=self.tag_components, complete=self.complete)
        return generated.generate_ratings(
            users=self.users_generated,
            items=self.items,
            ratings=self.ratings_generated,
            rank=self.rank,
            noise=self.noise,
            data_seed=self.data_seed,
            scale=self.source.scale,
        )

    def write(self, folder: Path) -> dict[str, Any]:
        data = self.load()
        return store.write(folder, data, deal(self, data), self.evaluate_on)

    def open(self, folder: Path) -> store.RatingStore:
        return store.RatingStore.open(folder)


def deal(spec: RatingSpec, data: RatingSet) -> Shares:
    """The ratings of every party. Which side a rating is on, and its value, do not depend on how many parties there are."""
    parts, rescued = split(data.users, len(data.user_ids), spec.test_fraction, spec.validation_fraction, spec.seed)
    values, edges = data.values, None
    if spec.source.holds_listens:
        values, edges = bin_counts(data.values, parts == TRAIN)
    users = choose_users(len(data.user_ids), spec)
    party = np.full(len(data.user_ids), -1, dtype=np.int32)
    party[users] = np.arange(len(users), dtype=np.int32)
    party_of_rating = party[data.users]

    def side(code: int) -> tuple[Side, np.ndarray]:
        rows = np.flatnonzero((parts == code) & (party_of_rating >= 0))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(party_of_rating[rows], minlength=len(users)))])
        return Side(offsets.astype(np.int64), data.items[rows], values[rows]), rows

    train, _ = side(TRAIN)
    test, rows = side(VALIDATION if spec.validation_fraction else TEST)
    if len(rows) == 0:
        raise DataError(f"{spec.dataset}: no {spec.evaluate_on} ratings for {len(users)} parties: use more parties")
    optimum = None
    if data.expected is not None:
        optimum = float(np.sqrt(np.mean((data.expected[rows].astype(np.float64) - test.values) ** 2)))
    return Shares(train, test, users, int(rescued[users].sum()), edges, optimum)


def choose_users(num_users: int, spec: RatingSpec) -> np.ndarray:
    """Ascending. With the same seed, the users of a smaller run also take part in every larger one."""
    if spec.parties > num_users:
        raise ConfigError(f"parties = {spec.parties}: {spec.dataset} has {num_users} users with ratings")
    if spec.parties in (0, num_users):
        return np.arange(num_users)
    return np.sort(keyed_rng(spec.seed, "ratings", "parties").permutation(num_users)[: spec.parties])
