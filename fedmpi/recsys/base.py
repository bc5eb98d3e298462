"""What every rating method has in common: its data, its scores, its private models."""

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedmpi.algorithm import RowAlgorithm
from fedmpi.config import Config
from fedmpi.data.ratings.store import RatingBlock, RatingStore
from fedmpi.randomness.words import SeededWords


class RatingMethod(RowAlgorithm):
    """Every user is a party. A rank holds the ratings of a block of them, flat, party after party."""

    @dataclass(frozen=True)
    class Settings(RowAlgorithm.Settings):
        rating_centre: float = 3.5
        """where biases and constants start from and are pulled to: a public guess of the mean rating"""

    settings: Settings
    block: RatingBlock  # of the hosted parties, once there are any

    task = "recommendation"
    scores = ("rmse", "mae")
    score_columns = reference_columns = 3
    reference_scores: tuple[str, ...] = ("rmse_party_mean",)
    report_columns = ("squared_error", "ratings")

    def __init__(self, config: Config, store: RatingStore, device: str = "cpu"):
        assert isinstance(config.method, self.Settings)
        self.config, self.settings = config, config.method
        self.store = store
        self.seed = config.run.seed

    @property
    def data_fingerprint(self) -> int:
        return self.store.fingerprint

    def host(self, parties: tuple[int, ...]) -> None:
        self.block = self.store.block(parties[0], parties[-1] + 1)

    # ---- the hosted parties' ratings ----

    @cached_property
    def train_users(self) -> np.ndarray:
        return np.repeat(np.arange(self.block.parties), np.diff(self.block.train_offsets))

    @cached_property
    def test_users(self) -> np.ndarray:
        return np.repeat(np.arange(self.block.parties), np.diff(self.block.test_offsets))

    def local(self, parties: tuple[int, ...]) -> np.ndarray:
        """Indices of parties within the block."""
        return np.asarray(parties) - self.block.first

    # ---- scores ----

    @abstractmethod
    def predictions(self, theta: np.ndarray) -> np.ndarray:
        """What the parties predict for their test ratings, by theta and what they hold themselves."""

    def evaluate_all(self, parties, theta, round):
        return self._errors(self.predictions(theta))[self.local(parties)]

    def references_all(self, parties, theta):
        means = np.add.reduceat(self.block.train_values.astype(np.float64), self.block.train_offsets[:-1])
        means /= np.diff(self.block.train_offsets)
        return self._errors(means[self.test_users])[self.local(parties)]

    def _errors(self, predicted: np.ndarray) -> np.ndarray:
        """Per party: squared errors, absolute errors, number of test ratings."""
        scale = self.store.scale
        error = np.clip(predicted, scale.lowest, scale.highest) - self.block.test_values
        size = self.block.parties
        columns = (np.square(error), np.abs(error), np.ones(len(error)))
        return np.stack([np.bincount(self.test_users, weights, size) for weights in columns], axis=1)

    def plausible(self, figures, round):
        """Squared and absolute errors, neither beyond the scale, and how many there are: one for an item at most."""
        span = self.store.scale.highest - self.store.scale.lowest
        squared, absolute, numbers = (figures[:, column::3] for column in range(3))
        most = numbers * (1 + 1e-9)  # sums of floats
        possible = (numbers >= 0) & (numbers <= self.store.num_items) & (numbers == np.rint(numbers))
        possible &= (squared >= 0) & (squared <= most * span**2) & (absolute >= 0) & (absolute <= most * span)
        return possible.all(axis=1)

    def summarise(self, total):
        squared, absolute, number = total[:3]
        return {"rmse": float(np.sqrt(squared / number)), "mae": float(absolute / number)}

    def summarise_references(self, total):
        found = {"rmse_party_mean": self.summarise(total)["rmse"]}
        return found if self.store.optimum_rmse is None else found | {"rmse_optimum": self.store.optimum_rmse}

    def summarise_training(self, rows):
        squared, number = rows.sum(axis=0)
        return {"train_rmse": float(np.sqrt(squared / number))}

    def training_figures(self, errors: np.ndarray) -> np.ndarray:
        size = self.block.parties
        return np.stack(
            [np.bincount(self.train_users, weights, size) for weights in (np.square(errors), np.ones(len(errors)))],
            axis=1,
        )

    # ---- what a finished run leaves ----

    def model_facts(self):
        return {
            "predicts": "ratings",
            "items": self.store.num_items,
            "scale": list(self.store.scale),
            "item_feature_names": list(self.store.item_feature_names),
            "user_feature_names": list(self.store.user_feature_names),
            "settings": dataclasses.asdict(self.settings),
        }

    def model_arrays(self, theta):
        return {"item_ids": self.store.item_ids}

    def rng(self, purpose: str, party: int = 0, round: int = 0) -> np.random.Generator:
        return SeededWords(self.seed, purpose, party, round).generator()
