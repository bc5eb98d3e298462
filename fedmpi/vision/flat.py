"""A network whose parameters, gradients and running statistics are views into flat vectors.

The shared vector is then one tensor: loading it, masking it, stepping it and taking a norm are single vector operations
instead of one per layer, and parties on one rank swap state instead of rebuilding a model.
"""

import numpy as np
import torch
from torch import nn

from fedmpi.vision.models import Classifier
from fedmpi.vision.training import Head


class FlatNetwork:
    """`module` is what the vector holds, here an extractor; `extractor` is the part of it that makes features."""

    def __init__(self, module: nn.Module, device: torch.device):
        self.module = self.extractor = module.to(device)
        self.device = device
        parameters = list(module.parameters())
        self.weights = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.gradients = torch.zeros_like(self.weights)
        at = 0
        for parameter in parameters:
            span = slice(at, at + parameter.numel())
            parameter.data = self.weights[span].view_as(parameter)
            parameter.grad = self.gradients[span].view_as(parameter)
            at = span.stop
        self.statistics = self._flatten_statistics()

    @property
    def dimension(self) -> int:
        return self.weights.numel()

    def load(self, theta: torch.Tensor) -> None:
        self.weights.copy_(theta)

    def named(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        """The vector by the names that its pieces have in torch; an extractor's are the same with and without a head."""
        found, at = {}, 0
        for name, parameter in self.module.named_parameters():
            found[name.removeprefix("extractor.")] = theta[at : at + parameter.numel()].reshape(parameter.shape)
            at += parameter.numel()
        return found

    def reset_statistics(self) -> None:
        """Back to the values of a new network: mean 0, variance 1."""
        for layer in self._norm_layers():
            layer.reset_running_stats()

    @torch.no_grad()
    def refresh_statistics(self, batches) -> None:
        """Running statistics of these batches alone, as plain averages: what the current weights see, nothing older."""
        layers = list(self._norm_layers())
        if not layers:
            return
        momenta = [layer.momentum for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # cumulative average
        self.module.train()
        for batch in batches:
            self.extractor(batch)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum

    @torch.no_grad()
    def features(self, batches) -> torch.Tensor:
        self.module.eval()
        return torch.cat([self.extractor(batch) for batch in batches])

    def to_numpy(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().cpu().numpy()

    def from_numpy(self, array: np.ndarray) -> torch.Tensor:
        # A copy: arrays off the wire are read-only, and torch must never write into a received buffer.
        return torch.from_numpy(np.array(array, np.float32)).to(self.device)

    def _norm_layers(self):
        return (layer for layer in self.module.modules() if isinstance(layer, nn.BatchNorm2d))

    def _flatten_statistics(self) -> torch.Tensor:
        layers = list(self._norm_layers())
        sizes = [layer.num_features for layer in layers]
        flat = torch.zeros(2 * sum(sizes), device=self.device)
        at = 0
        for layer, size in zip(layers, sizes, strict=True):
            layer.running_mean = flat[at : at + size]
            layer.running_var = flat[at + size : at + 2 * size]
            at += 2 * size
            layer.reset_running_stats()
        return flat


class FlatClassifier(FlatNetwork):
    """Extractor and head in one vector, the head at its end."""

    def __init__(self, module: Classifier, device: torch.device):
        super().__init__(module, device)
        self.extractor, self._head = module.extractor, module.head
        self.head_start = self.dimension - module.head.weight.numel() - module.head.bias.numel()

    def head(self) -> Head:
        """A copy of the head that is loaded."""
        return Head(self._head.weight.detach(), self._head.bias.detach()).copy()
