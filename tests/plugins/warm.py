"""A method of a user's own with two settings, in one file: --method warm:Method with this folder on PYTHONPATH."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedmpi.config import NonNegative
from fedmpi.vision.methods import centaur


class Method(centaur.Method):
    @dataclass(frozen=True)
    class Settings(centaur.Method.Settings):
        warmth: NonNegative = 0.5
        """what the server's step is multiplied by,
        in every round"""
        mood: Literal["calm", "wild"] = "calm"
        """wild: twice as much"""

    settings: Settings

    def step(self, theta, total, rate, support):
        factor = self.settings.warmth * (2 if self.settings.mood == "wild" else 1)
        return super().step(theta, total, rate * factor, support)
