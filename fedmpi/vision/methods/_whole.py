"""What methods have in common that share the whole network, extractor and head in one vector.

Local work is `ext_epochs` of SGD on everything at once, the extractor at `ext_lr` and the head at `head_lr`. A subclass
says how a gradient moves the weights (`train_all` takes a function), which weights a party is tested with (`weights_of`), and
whether its head is fine-tuned before (`fine_tunes`). Running statistics are not kept: training uses those of the batch,
and a test those of the party's own training data under the weights that are tested.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.vision import architecture
from fedmpi.vision.base import ImageMethod

if TYPE_CHECKING:
    import torch

    from fedmpi.vision.flat import FlatClassifier
    from fedmpi.vision.training import Head


class WholeMethod(ImageMethod):
    supports = ("shared", "dense")  # the same here: every coordinate is sent
    report_columns: tuple[str, ...] = ("loss",)
    fine_tunes = True  # for a test, on a copy: the head, `head_epochs`
    net: FlatClassifier

    @functools.cached_property
    def rates(self) -> torch.Tensor:
        """Of each weight: the extractor's or the head's."""
        rates = self.net.weights.new_full((self.dimension,), self.settings.ext_lr)
        rates[self.net.head_start :] = self.settings.head_lr
        return rates

    @property
    def dimension(self) -> int:
        return super().dimension + architecture.head_size(self.store.num_classes)

    def _flatten(self, extractor, device):
        from fedmpi.vision.flat import FlatClassifier
        from fedmpi.vision.models import Classifier

        head = self._first_head("cpu")
        return FlatClassifier(Classifier(extractor, head.weight, head.bias), device)

    def public_support(self, theta: np.ndarray) -> None:
        return None

    def support_size(self) -> int:
        return self.dimension

    def weights_of(self, party: int, theta: torch.Tensor) -> torch.Tensor:
        """The weights that the party predicts with when the shared vector is theta."""
        return theta

    def make_ready(self, party: int, theta: np.ndarray, round: int) -> Head:
        data, weights = self._shard(party), self.weights_of(party, self.net.from_numpy(theta))
        self.net.load(weights)
        head = self.net.head()
        if self.fine_tunes:
            self._tune_head(head, data, weights, self._rng("evaluate", party, round))
        else:
            self._refresh_statistics(data)
        return head

    def train_all(self, party: int, round: int, move: Callable[[torch.Tensor], object]) -> float:
        """A round's local work from the weights that are loaded; `move` gets the gradient at `net.weights` and changes them.

        Returns the mean loss of the last epoch.
        """
        rng = self._rng("train", party, round)
        return self.train(self._shard(party), rng, self.net.module, move, self.settings.ext_epochs)

    def descend(self, gradient: torch.Tensor) -> None:
        """The plain step."""
        self.net.weights.sub_(self.rates * gradient)


class PersonalMethod(WholeMethod):
    """A method whose parties keep a vector of the network's size for themselves, from round to round."""

    def __init__(self, config, store, device: str = "cpu"):
        super().__init__(config, store, device)
        self._personal: dict[int, torch.Tensor] = {}

    @abstractmethod
    def first_personal(self) -> torch.Tensor:
        """A party's vector before its first round."""

    def personal(self, party: int) -> torch.Tensor:
        if party not in self._personal:
            self._personal[party] = self.first_personal()
        return self._personal[party]

    def party_state(self, party: int) -> dict[str, np.ndarray]:
        return {"personal": self.net.to_numpy(self.personal(party)).copy()}

    def load_party_state(self, party: int, state: dict[str, np.ndarray]) -> None:
        self._personal[party] = self.net.from_numpy(state["personal"])
