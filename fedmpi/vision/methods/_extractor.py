"""What every method with a shared extractor and a local head has in common.

A subclass says how the forward weights come from theta (`forward_weights`) and how the extractor is trained
(`train_extractor`, on batches that went through `augmented`); everything else — phase 1, evaluation, the local-only
reference, party state — is here.
"""

import os
from abc import abstractmethod

import numpy as np
import torch
from torch.nn import functional as F

from fedmpi.algorithm import Algorithm, LocalUpdate, References, Score
from fedmpi.config import Config
from fedmpi.data.store import Store
from fedmpi.privacy.words import SeededWords
from fedmpi.vision.augment import Augmentation
from fedmpi.vision.device import pick_device
from fedmpi.vision.flat import FlatExtractor
from fedmpi.vision.models import build_extractor, initialise
from fedmpi.vision.training import Head, PartyData, batches, test_head, train_head

EVALUATION_BATCH = 256


class ExtractorMethod(Algorithm):
    task = "classification"

    def __init__(self, config: Config, store: Store, device: str = "cpu"):
        self.config = config
        self.training = config.training
        self.seed = config.run.seed
        self.store = store
        extractor = build_extractor(config.model.network, store.image_shape[0], config.model.norm)
        initialise(extractor, torch.Generator().manual_seed(int(self._rng("initial", 0, 0).integers(2**63))))
        self.feature_count = extractor.features
        self.net = FlatExtractor(extractor, torch.device(device))
        self._augmentation = Augmentation.of(store, self.net.device) if self.training.augment else None
        self._initial = self.net.to_numpy(self.net.weights).copy()
        self._data: dict[int, PartyData] = {}
        self._heads: dict[int, Head] = {}
        self._statistics: dict[int, torch.Tensor] = {}

    @classmethod
    def pick_device(cls, setting: str, threads: int) -> str:
        torch.set_num_threads(threads)
        return pick_device(setting, os.environ)

    @property
    def data_fingerprint(self) -> int:
        return self.store.fingerprint

    @property
    def dimension(self) -> int:
        return self.net.dimension

    def initial(self) -> np.ndarray:
        return self._initial.copy()

    def augmented(self, images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """A batch as the extractor is to see it in training; without --augment the batch itself, and nothing is drawn."""
        return images if self._augmentation is None else self._augmentation(images, rng)

    # ---- what a method decides ----

    @abstractmethod
    def forward_weights(self, theta: torch.Tensor) -> torch.Tensor:
        """The weights of the forward pass for a received theta."""

    @abstractmethod
    def train_extractor(self, data: PartyData, head: Head, theta: torch.Tensor, rng) -> tuple:
        """Phase 2: (update on its support, that support or None if it is public, figures: loss and penalty)."""

    # ---- the round ----

    def local_work(self, party: int, theta: np.ndarray, round: int) -> LocalUpdate:
        data, head = self._party(party)
        received = self.net.from_numpy(theta)
        self.net.statistics.copy_(self._statistics[party])
        rng = self._rng("train", party, round)
        head_loss = self._tune_head(head, data, received, rng)
        values, support, figures = self.train_extractor(data, head, received, rng)
        self._statistics[party] = self.net.statistics.clone()
        return LocalUpdate(values, support, {"head_loss": head_loss, **figures})

    def evaluate(self, party: int, theta: np.ndarray, round: int) -> Score:
        data, head = self._party(party)
        head = head.copy()
        self._tune_head(head, data, self.net.from_numpy(theta), self._rng("evaluate", party, round))
        correct, loss = self._test(head, data)
        return Score(correct, len(data.test_y), loss)

    def references(self, party: int, theta: np.ndarray) -> References:
        """Heads keep training over a run's rounds; the untrained extractor's head gets as many epochs, or the comparison
        would credit the extractor with what the head learnt."""
        data, head = self._party(party)
        head, received = head.copy(), self.net.from_numpy(theta)
        self._tune_head(head, data, received, self._rng("untrained", party, 0), self.config.run.rounds + 1)
        untrained, _ = self._test(head, data)
        alone = self._train_alone(party, data, received) if self.config.evaluation.local_epochs else -1
        return References(untrained, alone, len(data.test_y))

    def _test(self, head: Head, data: PartyData) -> tuple[int, float]:
        return test_head(head, self.net.features(data.test_x.split(EVALUATION_BATCH)), data.test_y)

    def _tune_head(self, head: Head, data: PartyData, theta: torch.Tensor, rng, rounds: int = 1) -> float:
        """Phase 1, as often as in `rounds` rounds. The extractor does not move, so its features are computed once."""
        self.net.load(self.forward_weights(theta))
        self.net.refresh_statistics(data.train_x.split(EVALUATION_BATCH))
        features = self.net.features(data.train_x.split(EVALUATION_BATCH))
        settings = self.training
        return train_head(
            head, features, data.train_y, rounds * settings.head_epochs, settings.batch_size, settings.head_lr, rng
        )

    def _train_alone(self, party: int, data: PartyData, theta: torch.Tensor) -> int:
        """The local-only reference: extractor and head trained together on the party's data alone, nothing sent."""
        rng = self._rng("local-only", party, 0)
        head = self._new_head(party)
        self.net.load(theta)
        self.net.reset_statistics()
        self.net.module.train()
        settings = self.training
        head.weight.requires_grad_(True)
        head.bias.requires_grad_(True)
        own = [(self.net.weights, self.net.gradients, settings.ext_lr)]
        for _ in range(self.config.evaluation.local_epochs):
            for batch in batches(len(data.train_y), settings.batch_size, rng):
                self.net.gradients.zero_()
                head.weight.grad = head.bias.grad = None
                images = self.augmented(data.train_x[batch], rng)
                loss = F.cross_entropy(head(self.net.module(images)), data.train_y[batch])
                loss.backward()
                steps = [*own, *((p.detach(), p.grad, settings.head_lr) for p in (head.weight, head.bias))]
                for values, gradient, rate in steps:
                    values.sub_(gradient, alpha=rate)
        self.net.refresh_statistics(data.train_x.split(EVALUATION_BATCH))
        return self._test(head, data)[0]

    # ---- state ----

    def party_state(self, party: int) -> dict[str, np.ndarray]:
        _, head = self._party(party)
        to_numpy = self.net.to_numpy
        return {
            "head_weight": to_numpy(head.weight).copy(),
            "head_bias": to_numpy(head.bias).copy(),
            "statistics": to_numpy(self._statistics[party]).copy(),
        }

    def load_party_state(self, party: int, state: dict[str, np.ndarray]) -> None:
        put = self.net.from_numpy
        self._heads[party] = Head(put(state["head_weight"]), put(state["head_bias"]))
        self._statistics[party] = put(state["statistics"])

    def _party(self, party: int) -> tuple[PartyData, Head]:
        if party not in self._data:
            shard = self.store.shard(party)
            self._data[party] = PartyData.load(shard, self.store.mean, self.store.std, self.net.device)
        if party not in self._heads:
            self._heads[party] = self._new_head(party)
            self.net.reset_statistics()
            self._statistics[party] = self.net.statistics.clone()
        return self._data[party], self._heads[party]

    def _new_head(self, party: int) -> Head:
        return Head.new(self.feature_count, self.store.num_classes, self._rng("head", party, 0), self.net.device)

    def _rng(self, purpose: str, party: int, round: int) -> np.random.Generator:
        return SeededWords(self.seed, purpose, party, round).generator()
