"""Models of a rating from features: linear, factorisation machine, neural network. MMF 4.1: one-, two- and high-order.

A model is a flat parameter vector and two functions over a batch of parties: (B, P) parameters, (B, L, f) features of their
ratings. Private models have a vector for each party; federated context models have the same one for all. Everything is
numpy in float64 and computed party by party within a batch, so that bits do not depend on placement; for models of this
size that is also faster than starting torch on every rank.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from fedmpi.config import Count, Settings


@dataclass(frozen=True)
class ModelSettings(Settings):
    """Of methods that have one of these, for each party or for all."""

    mask_rank: Count = 4
    """private or shared factorisation machine: rank of its pairs"""
    mask_hidden: Count = 16
    """private or shared neural network: hidden units"""


class Model(ABC):
    def __init__(self, features: int):
        self.features = features

    @property
    @abstractmethod
    def size(self) -> int:
        """P"""

    @abstractmethod
    def named(self, parameters: np.ndarray) -> dict[str, np.ndarray]:
        """One model's (P,) parameters by what they are."""

    @abstractmethod
    def start(self, rng: np.random.Generator) -> np.ndarray:
        """(P,) parameters before training, the same for every party."""

    @abstractmethod
    def predict(self, parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
        """(B, L)"""

    @abstractmethod
    def gradient(self, parameters: np.ndarray, x: np.ndarray, slope: np.ndarray) -> np.ndarray:
        """(B, P): the derivative of sum(slope * predict), slope being (B, L) and zero where there is no rating."""


class Linear(Model):
    """c + w . x"""

    @property
    def size(self):
        return 1 + self.features

    def named(self, parameters):
        return {"constant": parameters[:1], "weights": parameters[1 : 1 + self.features]}

    def start(self, rng):
        return np.zeros(self.size)

    def predict(self, parameters, x):
        return parameters[:, :1] + np.matmul(x, parameters[:, 1:, None])[:, :, 0]

    def gradient(self, parameters, x, slope):
        weights = np.matmul(x.transpose(0, 2, 1), slope[:, :, None])[:, :, 0]
        return np.concatenate((slope.sum(axis=1, keepdims=True), weights), axis=1)


class FactorisationMachine(Linear):
    """c + w . x + sum over pairs a < b of (v_a . v_b) x_a x_b, Rendle 2010."""

    def __init__(self, features: int, rank: int):
        super().__init__(features)
        self.rank = rank

    @property
    def size(self):
        return 1 + self.features + self.features * self.rank

    def named(self, parameters):
        pairs = parameters[1 + self.features :].reshape(self.features, self.rank)
        return super().named(parameters) | {"pairs": pairs}

    def start(self, rng):
        pairs = 0.1 * rng.standard_normal(self.features * self.rank)
        return np.concatenate((np.zeros(1 + self.features), pairs))

    def _split(self, parameters):
        linear = parameters[:, : 1 + self.features]
        return linear, parameters[:, 1 + self.features :].reshape(-1, self.features, self.rank)

    def predict(self, parameters, x):
        linear, v = self._split(parameters)
        together = np.square(np.matmul(x, v)).sum(axis=2)
        alone = np.matmul(np.square(x), np.square(v).sum(axis=2)[:, :, None])[:, :, 0]
        return super().predict(linear, x) + 0.5 * (together - alone)

    def gradient(self, parameters, x, slope):
        linear, v = self._split(parameters)
        together = np.matmul(x, v) * slope[:, :, None]
        alone = np.matmul(np.square(x).transpose(0, 2, 1), slope[:, :, None])
        pairs = np.matmul(x.transpose(0, 2, 1), together) - v * alone
        return np.concatenate((super().gradient(linear, x, slope), pairs.reshape(len(x), -1)), axis=1)


class Network(Model):
    """c + u . tanh(W x + b), one hidden layer."""

    def __init__(self, features: int, hidden: int):
        super().__init__(features)
        self.hidden = hidden

    @property
    def size(self):
        return 1 + self.hidden + self.hidden + self.features * self.hidden

    def named(self, parameters):
        constant, outer, shift, inner = np.split(parameters, np.cumsum((1, self.hidden, self.hidden)))
        return {"constant": constant, "outer": outer, "shift": shift, "inner": inner.reshape(-1, self.hidden)}

    def start(self, rng):
        inner = rng.standard_normal(self.features * self.hidden) / np.sqrt(self.features)
        outer = 0.1 * rng.standard_normal(self.hidden)
        return np.concatenate((np.zeros(1), outer, np.zeros(self.hidden), inner))

    def active(self, hidden, x):
        """(B, L, h) from the hidden layer's parameters, [b, W]."""
        shift, inner = hidden[:, : self.hidden], hidden[:, self.hidden :].reshape(-1, self.features, self.hidden)
        return np.tanh(np.matmul(x, inner) + shift[:, None, :])

    def predict(self, parameters, x):
        outer, hidden = parameters[:, 1 : 1 + self.hidden], parameters[:, 1 + self.hidden :]
        return parameters[:, :1] + np.matmul(self.active(hidden, x), outer[:, :, None])[:, :, 0]

    def gradient(self, parameters, x, slope):
        outer, hidden = parameters[:, 1 : 1 + self.hidden], parameters[:, 1 + self.hidden :]
        active = self.active(hidden, x)
        to_outer = np.matmul(active.transpose(0, 2, 1), slope[:, :, None])[:, :, 0]
        before = (1.0 - np.square(active)) * outer[:, None, :] * slope[:, :, None]
        to_inner = np.matmul(x.transpose(0, 2, 1), before).reshape(len(x), -1)
        return np.concatenate((slope.sum(axis=1, keepdims=True), to_outer, before.sum(axis=1), to_inner), axis=1)


def make(kind: str, features: int, rank: int, hidden: int) -> Model:
    if kind == "lr":
        return Linear(features)
    return FactorisationMachine(features, rank) if kind == "fm" else Network(features, hidden)
