"""What the server does with a round's summed gradients."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedmpi.config import Settings
from fedmpi.recsys.layout import curvature


@dataclass(frozen=True)
class StepSettings(Settings):
    """Of methods whose server takes one of these steps."""

    optimizer: Literal["sgd", "adam", "counted"] = "sgd"
    """the server's steps: plain, MMF algorithm 2; Adam; or over the number of raters, with momentum"""


class Sgd:
    """Q <- Q - gamma * sum, MMF algorithm 2."""

    def __init__(self, rate: float):
        self.rate = rate

    def step(self, values: np.ndarray, gradient: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
        return values - self.rate * gradient

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def load(self, state: dict[str, np.ndarray]) -> None:
        pass


class Adam(Sgd):
    """Kingma and Ba 2015, with their constants. Scales each coordinate by its own history, which raw ratings need."""

    def __init__(self, rate: float, first_decay: float = 0.9, second_decay: float = 0.999, tiny: float = 1e-8):
        """How fast the means of the gradient and of its square forget, and what keeps their quotient finite."""
        super().__init__(rate)
        self._first_decay, self._second_decay, self._tiny = first_decay, second_decay, tiny
        self._state = {"first": np.zeros(0), "second": np.zeros(0), "steps": np.zeros(1)}

    def step(self, values, gradient, counts):
        if not self._state["first"].size:
            self._state |= {"first": np.zeros_like(gradient), "second": np.zeros_like(gradient)}
        first, second = self._state["first"], self._state["second"]
        self._state["steps"] = self._state["steps"] + 1
        done = float(self._state["steps"][0])
        first *= self._first_decay
        first += (1 - self._first_decay) * gradient
        second *= self._second_decay
        second += (1 - self._second_decay) * np.square(gradient)
        root = np.sqrt(second / (1 - self._second_decay**done)) + self._tiny
        return values - self.rate * (first / (1 - self._first_decay**done)) / root

    def state(self):
        return {name: values.copy() for name, values in self._state.items()}

    def load(self, state):
        self._state = {name: np.array(values) for name, values in state.items()}


class Counted(Sgd):
    """A step over the number of raters, with momentum: M <- beta M + sum / (n_i + c); Q <- Q - gamma M.

    n_i is what the first sum counted, whoever is in this one. An item's curvature grows with its raters, so this is a Newton step with the
    curvature of an average rater; it converges in tens of rounds where a fixed rate takes hundreds.
    """

    def __init__(self, rate: float, momentum: float, prior: float):
        super().__init__(rate)
        self._momentum, self._prior = momentum, prior
        self._velocity = np.zeros(0)

    def step(self, values, gradient, counts):
        scaled = gradient / curvature(counts, self._prior)[:, None]
        self._velocity = scaled if not self._velocity.size else self._momentum * self._velocity + scaled
        return values - self.rate * self._velocity

    def state(self):
        return {"velocity": self._velocity.copy()}

    def load(self, state):
        self._velocity = np.array(state["velocity"])
