"""PPSGD (Bietti 2022): an additive model. A party predicts with w + v_i.

Shared: w, the whole network, dense. Local: v_i, an offset to every weight of the network, zero at first and kept from round
to round. Noised: w's update. Both are trained at once: a step's gradient at w + v_i moves w at the learning rates and v_i
at `personal_rate` (their alpha) times those; only w's part leaves. Tests use w + v_i as it is, nothing is fine-tuned.
`personal_rate` 0 leaves every v_i at zero: the shared model is then that of DP-FedAvg-fb, bit for bit.
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
    fine_tunes = False

    @dataclass(frozen=True)
    class Settings(PersonalMethod.Settings):
        personal_rate: NonNegative = 1.0
        """learning rates of a party's own offset over those of the shared weights; 0 leaves no offset"""

    settings: Settings

    def first_personal(self) -> torch.Tensor:
        return self.net.weights.new_zeros(self.dimension)

    def weights_of(self, party: int, theta: torch.Tensor) -> torch.Tensor:
        return theta + self.personal(party)

    def work(self, party: int, theta: np.ndarray, round: int) -> LocalUpdate:
        received, offset = self.net.from_numpy(theta), self.personal(party)
        shared = received.clone()
        self.net.load(shared + offset)

        def move(gradient: torch.Tensor) -> None:
            step = self.rates * gradient
            shared.sub_(step)
            offset.sub_(step, alpha=self.settings.personal_rate)
            self.net.load(shared + offset)

        loss = self.train_all(party, round, move)
        return LocalUpdate(party, self.net.to_numpy(shared - received), None, {"loss": loss})
