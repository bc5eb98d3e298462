"""From a rating set and its settings to the ratings that each party trains on and is tested on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedmpi.data import generated, rating_sources
from fedmpi.data.plan import keyed_rng
from fedmpi.data.ratings import RatingSet, load_ratings
from fedmpi.errors import ConfigError, DataError

TRAIN, VALIDATION, TEST = 0, 1, 2

_GENERATED_PARTIES = 200
_GENERATED_RATINGS = 60  # of a user
_BINS = 5


@dataclass(frozen=True, kw_only=True)
class RatingSpec:
    """Everything that decides which party holds which rating, and how good a prediction of it can be."""

    dataset: str
    data_dir: str | None = None  # see rating_sources.find_files; None: download into the cache
    parties: int = 0  # users that take part, 0: all (generated: 200); fewer are drawn by the seed
    test_fraction: float = 0.2
    #: Share of the training ratings to evaluate on instead of the test ratings, which then are in no file at all.
    validation_fraction: float = 0.0
    seed: int = 0
    tag_components: int = 20  # data with tags
    complete: bool | None = None  # see ratings.load_ratings
    # dataset generated, where parties are users
    items: int = 300
    ratings: int = 0  # in total, exactly; 0: 60 a user
    rank: int = 4
    noise: float = 0.5  # standard deviation, before rounding
    data_seed: int = 0

    def __post_init__(self) -> None:
        rating_sources.get(self.dataset)
        for name in ("parties", "seed", "tag_components", "items", "ratings", "rank", "data_seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} = {value!r}: must be a whole number")
            if value < 0 and not name.endswith("seed"):
                raise ConfigError(f"{name} = {value}: must not be negative")
        for name in ("test_fraction", "validation_fraction", "noise"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ConfigError(f"{name} = {value!r}: must be a number")
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction = {self.test_fraction}: must lie between 0 and 1")
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"validation_fraction = {self.validation_fraction}: must be 0 (none) or lie below 1")
        if self.complete not in (None, True, False):
            raise ConfigError(f"complete = {self.complete!r}: must be true, false or none")
        if self.dataset == "generated":
            if not 0 <= self.noise < float("inf"):
                raise ConfigError(f"noise = {self.noise}: must be at least 0")
            generated.check_sizes(self.users_generated, self.items, self.ratings_generated)

    @property
    def evaluate_on(self) -> Literal["test", "validation"]:
        return "validation" if self.validation_fraction else "test"

    @property
    def users_generated(self) -> int:
        return self.parties or _GENERATED_PARTIES

    @property
    def ratings_generated(self) -> int:
        return self.ratings or self.users_generated * min(_GENERATED_RATINGS, self.items)

    def canonical(self) -> dict[str, Any]:
        """The settings that have an effect. data_dir is not among them: the same files may lie anywhere."""
        settings: dict[str, Any] = {
            "dataset": self.dataset,
            "parties": self.parties,
            "test_fraction": float(self.test_fraction),
            "validation_fraction": float(self.validation_fraction),
            "seed": self.seed,
        }
        if self.dataset == "generated":
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
            if rating_sources.get(self.dataset).has_tags:
                settings["tag_components"] = self.tag_components
        return settings

    def fingerprint(self) -> list[tuple[str, int, int]] | None:
        """Name, size and time of every official file; None where there is no folder to look at."""
        if self.data_dir is None or self.dataset == "generated":
            return None
        return rating_sources.find_files(rating_sources.get(self.dataset), self.data_dir).stats()

    def load(self) -> RatingSet:
        source = rating_sources.get(self.dataset)
        if self.dataset != "generated":
            return load_ratings(source, self.data_dir, tag_components=self.tag_components, complete=self.complete)
        return generated.generate_ratings(
            users=self.users_generated,
            items=self.items,
            ratings=self.ratings_generated,
            rank=self.rank,
            noise=self.noise,
            data_seed=self.data_seed,
            scale=source.scale,
        )


@dataclass(frozen=True, eq=False)
class Part:
    """The ratings of one side of the split: those of party p are offsets[p] to offsets[p + 1], items ascending."""

    offsets: np.ndarray  # int64
    items: np.ndarray  # int32
    values: np.ndarray  # float32


@dataclass(frozen=True, eq=False)
class RatingPlan:
    train: Part
    test: Part  # the validation ratings if there are any
    users: np.ndarray  # row of the rating set that each party is
    rescued: int
    edges: list[float] | None
    optimum_rmse: float | None


def make_rating_plan(spec: RatingSpec, data: RatingSet) -> RatingPlan:
    """Which side a rating is on, and its value, do not depend on how many parties there are."""
    parts, rescued = split(data.users, len(data.user_ids), spec.test_fraction, spec.validation_fraction, spec.seed)
    values, edges = data.values, None
    if data.name == "lastfm":
        values, edges = bin_counts(data.values, parts == TRAIN)
    users = choose_users(len(data.user_ids), spec)
    party = np.full(len(data.user_ids), -1, dtype=np.int32)
    party[users] = np.arange(len(users), dtype=np.int32)
    party_of_rating = party[data.users]

    def side(code: int) -> tuple[Part, np.ndarray]:
        rows = np.flatnonzero((parts == code) & (party_of_rating >= 0))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(party_of_rating[rows], minlength=len(users)))])
        return Part(offsets.astype(np.int64), data.items[rows], values[rows]), rows

    train, _ = side(TRAIN)
    test, rows = side(VALIDATION if spec.validation_fraction else TEST)
    if len(rows) == 0:
        raise DataError(f"{spec.dataset}: no {spec.evaluate_on} ratings for {len(users)} parties: use more parties")
    optimum = None
    if data.expected is not None:
        optimum = float(np.sqrt(np.mean((data.expected[rows].astype(np.float64) - test.values) ** 2)))
    return RatingPlan(train, test, users, int(rescued[users].sum()), edges, optimum)


def choose_users(num_users: int, spec: RatingSpec) -> np.ndarray:
    """Ascending. With the same seed, the users of a smaller run also take part in every larger one."""
    if spec.parties > num_users:
        raise ConfigError(f"parties = {spec.parties}: {spec.dataset} has {num_users} users with ratings")
    if spec.parties in (0, num_users):
        return np.arange(num_users)
    return np.sort(keyed_rng(spec.seed, "ratings", "parties").permutation(num_users)[: spec.parties])


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
