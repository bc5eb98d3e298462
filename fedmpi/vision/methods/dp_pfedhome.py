"""DP-pFedHome: share as far as the noise lets anything through, and finish at home. Not in the paper.

Shared: the whole extractor, dense. Local: head and running statistics; for a test, an extractor of the party's own. Noised:
the shared extractor's update.

CENTAUR with two changes, both from R, the norm of a run's noise over the most that its clipped updates can carry
(`noise_ratio`), which is arithmetic on public settings. Up to R = `noise_budget` nothing changes: it is CENTAUR, bit for bit.
Beyond,

- the server takes the noised mean times noise_budget / R, so that noise never moves the extractor further than the budget
  allows. That is done to what everybody may see, and costs no privacy;
- a party is tested with its own extractor, after `home_rounds` rounds of local work from the shared one that it keeps to
  itself: by default as many as the run has, so that it never trains less than a party alone would. Training on its own data
  repairs what noise has broken, and keeps what was learnt from the others.

With very much noise the shared extractor stays where it was drawn, and a party is as good as it is alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.config import CountOrZero, Positive
from fedmpi.vision.methods import centaur

if TYPE_CHECKING:
    from fedmpi.vision.training import Head


class Method(centaur.Method):
    pays_below, measured_with = 20.0, "dp-pfedhome"

    @dataclass(frozen=True)
    class Settings(centaur.Method.Settings):
        noise_budget: Positive = 4.0
        """how much noise a run may have over the most that its updates can carry; beyond, the server's step is damped"""
        home_rounds: CountOrZero = 0
        """rounds of local work that a party adds for itself before a test, where noise exceeds the budget; 0: as many as
        --rounds, which a party alone would have had"""

    settings: Settings

    @property
    def damping(self) -> float:
        """What the server's step is multiplied by; below 1 a party finishes at home."""
        return min(1.0, self.settings.noise_budget / self.noise_ratio) if self.noise_ratio else 1.0

    def step(self, theta: np.ndarray, total: np.ndarray, rate: float, support: np.ndarray | None) -> np.ndarray:
        return super().step(theta, total, rate * self.damping, support)

    def make_ready(self, party: int, theta: np.ndarray, round: int) -> Head:
        rounds = self.settings.home_rounds or self.config.run.rounds
        return self.make_ready_at_home(party, theta, round, rounds if self.damping < 1 else 0, "home")
