"""A method without data or training, so that an attack is over in a moment: --method fedmpi.liars.toy:Method --dataset none."""

from typing import Any

import numpy as np

from fedmpi.algorithm import LocalUpdate, PartyAlgorithm, References, Score

COORDINATES = 16


class Method(PartyAlgorithm):
    """Every party moves in a direction of its own, so that a reader recognises whose update it is."""

    task = "none"
    supports = ("dense",)
    data_fingerprint = 0
    dimension = COORDINATES

    def __init__(self, config: Any, store: Any, device: str = "cpu"):
        pass

    def initial(self) -> np.ndarray:
        return np.zeros(COORDINATES, np.float32)

    def public_support(self, theta: np.ndarray) -> None:
        return None

    def support_size(self) -> int:
        return COORDINATES

    def work(self, party: int, theta: np.ndarray, round: int) -> LocalUpdate:
        return LocalUpdate(
            party, np.eye(COORDINATES)[party % COORDINATES], None, dict.fromkeys(self.report_columns, 0.0)
        )

    def evaluate(self, party: int, theta: np.ndarray, round: int) -> Score:
        return Score(1, 2, 0.0)

    def references(self, party: int, theta: np.ndarray) -> References:
        return References(0, 0, 2)
