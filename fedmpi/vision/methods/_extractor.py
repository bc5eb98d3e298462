"""What every method with a shared extractor and a local head has in common.

A subclass says how the forward weights come from theta (`forward_weights`) and how the extractor is trained
(`train_extractor`, on batches that went through `augmented`), and where parties keep weights of their own, which ones they
work with (`weights_of`); everything else — phase 1, evaluation, party state — is here.
"""

from abc import abstractmethod

import numpy as np
import torch

from fedmpi.algorithm import LocalUpdate, Score
from fedmpi.vision.base import ImageMethod
from fedmpi.vision.training import Head, PartyData


class ExtractorMethod(ImageMethod):
    def __init__(self, config, store, device: str = "cpu"):
        super().__init__(config, store, device)
        self._heads: dict[int, Head] = {}
        self._statistics: dict[int, torch.Tensor] = {}

    @abstractmethod
    def train_extractor(self, data: PartyData, head: Head, theta: torch.Tensor, rng) -> tuple:
        """Phase 2: (update on its support, that support or None if it is public, figures: loss and penalty)."""

    def weights_of(self, party: int, theta: torch.Tensor) -> torch.Tensor:
        """The extractor that the party starts from and is tested with when the shared vector is theta."""
        return theta

    # ---- the round ----

    def local_work(self, party: int, theta: np.ndarray, round: int) -> LocalUpdate:
        data, head = self._party(party)
        received = self.weights_of(party, self.net.from_numpy(theta))
        self.net.statistics.copy_(self._statistics[party])
        rng = self._rng("train", party, round)
        head_loss = self._tune_head(head, data, received, rng)
        values, support, figures = self.train_extractor(data, head, received, rng)
        self._statistics[party] = self.net.statistics.clone()
        return LocalUpdate(values, support, {"head_loss": head_loss, **figures})

    def evaluate(self, party: int, theta: np.ndarray, round: int) -> Score:
        data, head = self._party(party)
        head = head.copy()
        weights = self.weights_of(party, self.net.from_numpy(theta))
        self._tune_head(head, data, weights, self._rng("evaluate", party, round))
        correct, loss = self._test(head, data)
        return Score(correct, len(data.test_y), loss)

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
        if party not in self._heads:
            self._heads[party] = self._first_head(self.net.device)
            self.net.reset_statistics()
            self._statistics[party] = self.net.statistics.clone()
        return self._shard(party), self._heads[party]
