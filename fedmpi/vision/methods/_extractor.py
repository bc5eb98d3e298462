"""What every method with a shared extractor and a local head has in common.

A subclass says how the forward weights come from theta (`forward_weights`) and how the extractor is trained
(`train_extractor`, on batches that went through `augmented`); everything else — phase 1, evaluation, party state — is here.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.algorithm import LocalUpdate
from fedmpi.vision.base import ImageMethod

if TYPE_CHECKING:
    import torch

    from fedmpi.vision.training import Head, PartyData


class ExtractorMethod(ImageMethod):
    def __init__(self, config, store, device: str = "cpu"):
        super().__init__(config, store, device)
        self._heads: dict[int, Head] = {}
        self._statistics: dict[int, torch.Tensor] = {}

    @abstractmethod
    def train_extractor(self, data: PartyData, head: Head, theta: torch.Tensor, rng) -> tuple:
        """Phase 2: (update on its support, that support or None if it is public, figures: loss and penalty)."""

    # ---- the round ----

    def work(self, party: int, theta: np.ndarray, round: int) -> LocalUpdate:
        data, head = self._party(party)
        received = self.net.from_numpy(theta)
        self.net.statistics.copy_(self._statistics[party])
        rng = self._rng("train", party, round)
        head_loss = self._tune_head(head, data, received, rng)
        values, support, figures = self.train_extractor(data, head, received, rng)
        self._statistics[party] = self.net.statistics.clone()
        return LocalUpdate(party, values, support, {"head_loss": head_loss, **figures})

    def make_ready(self, party: int, theta: np.ndarray, round: int) -> Head:
        return self.make_ready_at_home(party, theta, round)

    def make_ready_at_home(self, party: int, theta: np.ndarray, round: int, rounds: int = 0, purpose: str = "") -> Head:
        """Load the extractor that the party has after `rounds` rounds of local work from theta which it keeps to itself, and
        tune a head on it; `purpose` names the randomness of that work, whose updates must be dense. Leaves no trace."""
        data, head = self._party(party)
        head, own = head.copy(), self.net.from_numpy(theta)
        for step in range(1, rounds + 1):
            rng = self._rng(purpose, party, step)
            self._tune_head(head, data, own, rng)
            update, _, _ = self.train_extractor(data, head, own, rng)
            own += self.net.from_numpy(update)
        self._tune_head(head, data, own, self._rng("evaluate", party, round))
        return head

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
        from fedmpi.vision.training import Head

        put = self.net.from_numpy
        self._heads[party] = Head(put(state["head_weight"]), put(state["head_bias"]))
        self._statistics[party] = put(state["statistics"])

    def _party(self, party: int) -> tuple[PartyData, Head]:
        if party not in self._heads:
            self._heads[party] = self._first_head(self.net.device)
            self.net.reset_statistics()
            self._statistics[party] = self.net.statistics.clone()
        return self._shard(party), self._heads[party]
