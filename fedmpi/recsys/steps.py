"""What the server does with a round's summed gradients."""

import numpy as np

from fedmpi.recsys.layout import curvature


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

    FIRST, SECOND, TINY = 0.9, 0.999, 1e-8

    def __init__(self, rate: float):
        super().__init__(rate)
        self._state = {"first": np.zeros(0), "second": np.zeros(0), "steps": np.zeros(1)}

    def step(self, values, gradient, counts):
        if not self._state["first"].size:
            self._state |= {"first": np.zeros_like(gradient), "second": np.zeros_like(gradient)}
        first, second = self._state["first"], self._state["second"]
        self._state["steps"] = self._state["steps"] + 1
        done = float(self._state["steps"][0])
        first *= self.FIRST
        first += (1 - self.FIRST) * gradient
        second *= self.SECOND
        second += (1 - self.SECOND) * np.square(gradient)
        root = np.sqrt(second / (1 - self.SECOND**done)) + self.TINY
        return values - self.rate * (first / (1 - self.FIRST**done)) / root

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
