"""DP-pFedShallow: share the shallow layers, as many weights as the noise lets through; the rest stays at home. Not in the paper.

Shared: the first n weights of the extractor, in the order of its forward pass. Local: the weights after them, head, running
statistics. Noised: the update of those n.

It is what DP-pFedDSU says of layers (the shallow ones are global, the deep ones personal), taken one step further: deep
weights are not sparsified but not shared, so that no noise reaches them, and n is not set but follows from the budget. Over
T rounds noise of deviation sigma C / (qN) on n coordinates has norm sigma C sqrt(T n) / (qN), and what clipped updates can
carry is T C at most; n is the largest number that keeps the ratio of the two, sigma sqrt(n) / (qN sqrt(T)), at or below
`noise_budget`. That is arithmetic on public settings: the support says nothing about anybody, and epsilon holds.

Few parties or a small epsilon: next to nothing is shared, and a party is as good as it is alone. Many parties or no noise:
everything is, and it is CENTAUR, bit for bit.
"""

import math

import numpy as np
import torch

from fedmpi.algorithm import LocalUpdate
from fedmpi.config import Config
from fedmpi.privacy.accountant import calibrate
from fedmpi.vision.methods import centaur


def affordable(config: Config, dimension: int) -> int:
    """n: how many coordinates a run can share within its noise budget; 1 at least, because a run without any is none."""
    privacy, rounds = config.privacy, config.run.rounds
    sigma = calibrate(privacy.epsilon, privacy.delta, privacy.sampling, rounds, privacy.accountant)
    if sigma == 0:
        return dimension
    sigma /= math.sqrt(1 - privacy.noise_margin)
    root = config.training.noise_budget * privacy.sampling * config.run.parties * math.sqrt(rounds) / sigma
    return max(1, min(dimension, math.floor(root**2)))


class Method(centaur.Method):
    supports = ("shared",)

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        self.shared = affordable(config, self.dimension)
        self._personal: dict[int, torch.Tensor] = {}

    def public_support(self, theta: np.ndarray) -> np.ndarray | None:
        return None if self.shared == self.dimension else np.arange(self.shared)

    def support_size(self) -> int:
        return self.shared

    def personal(self, party: int) -> torch.Tensor:
        """The weights that the party keeps, as they were drawn before its first round."""
        if party not in self._personal:
            self._personal[party] = self.net.from_numpy(self._initial[self.shared :])
        return self._personal[party]

    def weights_of(self, party: int, theta: torch.Tensor) -> torch.Tensor:
        return torch.cat([theta[: self.shared], self.personal(party)])

    def local_work(self, party: int, theta: np.ndarray, round: int) -> LocalUpdate:
        update = super().local_work(party, theta, round)
        self._personal[party] = self.net.weights[self.shared :].clone()
        return LocalUpdate(update.values[: self.shared], None, update.figures)

    def party_state(self, party: int) -> dict[str, np.ndarray]:
        return super().party_state(party) | {"personal": self.net.to_numpy(self.personal(party)).copy()}

    def load_party_state(self, party: int, state: dict[str, np.ndarray]) -> None:
        super().load_party_state(party, state)
        self._personal[party] = self.net.from_numpy(state["personal"])
