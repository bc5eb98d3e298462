"""The pieces of local work that methods share: a party's data, its head, and the head's training on cached features."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from fedmpi.data.images.store import Shard


def normalised(pixels: np.ndarray, mean: tuple, std: tuple, device: torch.device) -> torch.Tensor:
    """Images of pixels 0 to 255 as the network takes them."""
    centre, spread = (np.array(values, np.float32)[:, None, None] for values in (mean, std))
    scaled = (np.asarray(pixels, np.float32) / 255 - centre) / spread
    images = torch.from_numpy(np.ascontiguousarray(scaled, np.float32)).to(device)
    # Channels last: convolutions keep the layout of their input, and run a fifth faster in this one.
    return images.contiguous(memory_format=torch.channels_last)


@dataclass
class PartyData:
    """One party's shard on its device, normalised."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor

    @classmethod
    def load(cls, shard: Shard, mean: tuple, std: tuple, device: torch.device) -> "PartyData":
        def images(values):
            return normalised(values, mean, std, device)

        def labels(values):
            return torch.from_numpy(np.array(values, np.int64)).to(device)

        return cls(images(shard.train_x), labels(shard.train_y), images(shard.test_x), labels(shard.test_y))


@dataclass
class Head:
    """The linear classifier on the features."""

    weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def new(cls, features: int, classes: int, rng: np.random.Generator, device: torch.device | str) -> "Head":
        weight = rng.standard_normal((classes, features), np.float32) / np.float32(features**0.5)
        return cls(torch.from_numpy(weight).to(device), torch.zeros(classes, device=device))

    def copy(self) -> "Head":
        return Head(self.weight.clone(), self.bias.clone())

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return F.linear(features, self.weight, self.bias)

    @torch.no_grad()
    def train(
        self,
        features: torch.Tensor,
        labels: torch.Tensor,
        epochs: int,
        size: int,
        rate: float,
        rng: np.random.Generator,
    ) -> float:
        """Phase 1: SGD over cached features, in place. Returns the mean loss of the last epoch, of no epoch the head's own.

        The gradient of softmax regression is written out: autograd's bookkeeping costs more than these small products.
        """
        targets = F.one_hot(labels, self.bias.numel()).to(features.dtype)
        loss = 0.0 if epochs else float(F.cross_entropy(self(features), labels))
        for epoch in range(epochs):
            total, seen = 0.0, 0
            for batch in batches(len(labels), size, rng):
                batch = batch.to(features.device)
                x, y = features[batch], targets[batch]
                log_p = F.log_softmax(self(x), dim=1)
                if epoch == epochs - 1:
                    total -= float((log_p * y).sum())
                    seen += len(batch)
                error = (log_p.exp() - y) / len(batch)
                self.weight.sub_(error.T @ x, alpha=rate)
                self.bias.sub_(error.sum(0), alpha=rate)
            loss = total / max(seen, 1)
        return loss

    @torch.no_grad()
    def test(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[int, float]:
        """(correct, mean loss)"""
        logits = self(features)
        return int((logits.argmax(1) == labels).sum()), float(F.cross_entropy(logits, labels))


def batches(count: int, size: int, rng: np.random.Generator):
    """Index batches of one epoch. A last batch of one is left out: batch normalisation cannot use it."""
    order = torch.from_numpy(rng.permutation(count))
    for start in range(0, count, size):
        batch = order[start : start + size]
        if len(batch) > 1 or count == 1:
            yield batch
