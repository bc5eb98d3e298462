"""PMTL-FT (Hu 2021): mean-regularised multi-task learning, then fine-tuning.

Shared: the mean, the whole network, dense. Local: w_i, a network of the party's own that starts at the common initial
weights and is kept from round to round. Noised: w_i's distance from the mean.

A round goes on from the party's w_i, by SGD on its loss + (mu/2) ||w_i - mean||^2 with the mean as it was received; what
leaves is w_i - mean. Without clipping and noise the new mean is the mean of the w_i. For a test a party tunes a copy of
w_i's head, `head_epochs` on w_i's features; the mean acts through the pull alone. With mu = 0 the w_i never learn of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.algorithm import LocalUpdate
from fedmpi.config import NonNegative
from fedmpi.vision.methods._whole import PersonalMethod

if TYPE_CHECKING:
    import torch


class Method(PersonalMethod):
    report_columns = ("loss", "penalty")

    @dataclass(frozen=True)
    class Settings(PersonalMethod.Settings):
        mu: NonNegative = 0.1
        """how strongly a party's own network is pulled to the mean, (mu/2) ||w_i - mean||^2"""

    settings: Settings

    def first_personal(self) -> torch.Tensor:
        return self.net.from_numpy(self.initial())

    def weights_of(self, party: int, theta: torch.Tensor) -> torch.Tensor:
        return self.personal(party)

    def work(self, party: int, theta: np.ndarray, round: int) -> LocalUpdate:
        mean, own, mu = self.net.from_numpy(theta), self.personal(party), self.settings.mu
        self.net.load(own)

        def move(gradient: torch.Tensor) -> None:
            self.descend(gradient.add_(self.net.weights - mean, alpha=mu))

        loss = self.train_all(party, round, move)
        own.copy_(self.net.weights)
        distance = own - mean
        penalty = mu / 2 * float(distance.norm()) ** 2
        return LocalUpdate(party, self.net.to_numpy(distance), None, {"loss": loss, "penalty": penalty})
