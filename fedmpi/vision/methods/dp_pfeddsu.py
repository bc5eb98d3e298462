"""DP-pFedDSU: personalised learning with dynamically sparsified updates (reparameterisation + dynamic adaptive norm).

Shared: the extractor; in its last k convolution layers only a share S of the weights. Local: head and running
statistics. Noised: the update on its support. With k = 0 or S = 1 reparameterisation is off, with lambda = 0 the
adaptive norm is off; both off is CENTAUR, bit for bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedmpi.config import CountOrZero, Fraction, NonNegative
from fedmpi.vision.architecture import conv_spans
from fedmpi.vision.methods._extractor import ExtractorMethod
from fedmpi.vision.reparam import kept, public_support, sparse_spans, topk_masks

if TYPE_CHECKING:
    import torch


class Method(ExtractorMethod):
    supports = ("own", "union", "shared", "dense")
    pays_below, measured_with = 1.7, "dp-pfeddsu"

    @dataclass(frozen=True)
    class Settings(ExtractorMethod.Settings):
        sparse_layers: CountOrZero = 4
        """k: the last k convolution layers are sparsified; 0 switches reparameterisation off"""
        density: Fraction = 0.05
        """S: share of a sparsified layer's weights that stay; 1 switches reparameterisation off"""
        dan_weight: NonNegative = 0.2
        """lambda of the dynamic adaptive norm, DSU (10); 0 switches it off"""
        gradient: Literal["masked", "straight-through"] = "masked"
        """gradient of the masked weights: through the mask, or dense"""

    settings: Settings

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        self.support_rule = config.aggregation.support
        spans = conv_spans(self.settings.network, store.image_shape[0])
        self.spans = sparse_spans(spans, self.settings.sparse_layers, self.settings.density)

    @functools.cached_property
    def _theta(self) -> torch.Tensor:
        """Room for the weights that are trained."""
        return self.net.weights.clone()

    @functools.cached_property
    def _masks(self) -> torch.Tensor:
        return self.net.weights.new_ones(self.dimension)

    def public_support(self, theta: np.ndarray) -> np.ndarray | None:
        if self.support_rule != "shared":
            return None
        return public_support(theta, self.spans, self.settings.density)

    def support_size(self) -> int:
        if self.support_rule in ("dense", "union"):  # a union can grow to everything
            return self.dimension
        dropped = sum(size - kept(size, self.settings.density) for size in (s.stop - s.start for s in self.spans))
        return self.dimension - dropped

    def forward_weights(self, theta):
        self._set_masks(theta)
        return theta * self._masks  # DSU (7)

    def train_extractor(self, data, head, theta, rng):
        net, settings, current = self.net, self.settings, self._theta
        current.copy_(theta)
        self._set_masks(theta)
        moving = self.support_rule != "shared"  # shared: M^s = Top-k(theta^t) for all s
        penalty = 0.0

        def scores(images: torch.Tensor) -> torch.Tensor:
            if moving:
                self._set_masks(current)  # DSU (6)
            net.load(current)
            self._mask(net.weights)  # DSU (8)
            return head(net.module(images))

        def move(gradient: torch.Tensor) -> None:
            nonlocal penalty
            if settings.gradient == "masked":
                self._mask(gradient)
            if settings.dan_weight:
                penalty = self._adaptive_norm(current, theta)
            current.add_(gradient, alpha=-settings.ext_lr)

        loss = self.train(data, rng, scores, move, settings.ext_epochs)
        if moving:
            self._set_masks(current)  # M^tau
        update = net.to_numpy((current - theta) * self._masks)  # DSU (11), with the parentheses of DSU (10)
        return *self._on_support(update, theta), {"loss": loss, "penalty": penalty}

    def _on_support(self, update: np.ndarray, theta: torch.Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        everything = self.support_rule != "union" and self.support_size() == self.dimension
        if everything or not self.spans:
            return update, None
        chosen = np.flatnonzero(self.net.to_numpy(self._masks))
        return update[chosen], chosen if self.support_rule in ("own", "union") else None

    def _adaptive_norm(self, current: torch.Tensor, theta: torch.Tensor) -> float:
        """Add the gradient of DSU (10)'s term, lambda/2 * | ||(theta - theta^{t,0}) * M|| - C |; 0 at norm 0."""
        moved = current - theta
        self._mask(moved)
        norm = float(moved.norm())
        away = norm - self.config.privacy.clip
        half = self.settings.dan_weight / 2
        if norm > 0 and away != 0:
            self.net.gradients.add_(moved, alpha=half * (1 if away > 0 else -1) / norm)
        return half * abs(away)

    def _set_masks(self, theta: torch.Tensor) -> None:
        if self.support_rule == "shared" and self.spans:
            keep = np.zeros(self.dimension, np.float32)
            keep[public_support(self.net.to_numpy(theta), self.spans, self.settings.density)] = 1
            self._masks.copy_(self.net.from_numpy(keep))
        else:
            topk_masks(theta, self.spans, self.settings.density, self._masks)

    def _mask(self, vector: torch.Tensor) -> None:
        """vector * M, only where M is not 1 throughout."""
        for span in self.spans:
            vector[span].mul_(self._masks[span])
