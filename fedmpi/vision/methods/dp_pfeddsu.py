"""DP-pFedDSU: personalised learning with dynamically sparsified updates (reparameterisation + dynamic adaptive norm).

Shared: the extractor; in its last k convolution layers only a share S of the weights. Local: head and running
statistics. Noised: the update on its support. With k = 0 or S = 1 reparameterisation is off, with lambda = 0 the
adaptive norm is off; both off is CENTAUR, bit for bit.
"""

import numpy as np
import torch
from torch.nn import functional as F

from fedmpi.vision.methods._extractor import ExtractorMethod
from fedmpi.vision.reparam import kept, public_support, sparse_spans, topk_masks
from fedmpi.vision.training import batches


class Method(ExtractorMethod):
    supports = ("own", "union", "shared", "dense")
    pays_below, measured_with = 1.7, "dp-pfeddsu"

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        self.support_rule = config.aggregation.support
        self.spans = sparse_spans(self.net.conv_spans, self.training.sparse_layers, self.training.density)
        self._theta = torch.empty_like(self.net.weights)
        self._masks = torch.ones_like(self.net.weights)

    def public_support(self, theta: np.ndarray) -> np.ndarray | None:
        if self.support_rule != "shared":
            return None
        return public_support(theta, self.spans, self.training.density)

    def support_size(self) -> int:
        if self.support_rule in ("dense", "union"):  # a union can grow to everything
            return self.dimension
        dropped = sum(size - kept(size, self.training.density) for size in (s.stop - s.start for s in self.spans))
        return self.dimension - dropped

    def forward_weights(self, theta):
        self._set_masks(theta)
        return theta * self._masks  # DSU (7)

    def train_extractor(self, data, head, theta, rng):
        net, settings, current = self.net, self.training, self._theta
        current.copy_(theta)
        self._set_masks(theta)
        net.module.train()
        moving = self.support_rule != "shared"  # shared: M^s = Top-k(theta^t) for all s
        through_mask = settings.gradient == "masked"
        total, seen, penalty = 0.0, 0, 0.0
        for epoch in range(settings.ext_epochs):
            for batch in batches(len(data.train_y), settings.batch_size, rng):
                if moving:
                    self._set_masks(current)  # DSU (6)
                net.load(current)
                self._mask(net.weights)  # DSU (8)
                net.gradients.zero_()
                images = self.augmented(data.train_x[batch], rng)
                loss = F.cross_entropy(head(net.module(images)), data.train_y[batch])
                loss.backward()
                if through_mask:
                    self._mask(net.gradients)
                if settings.dan_weight:
                    penalty = self._adaptive_norm(current, theta)
                current.add_(net.gradients, alpha=-settings.ext_lr)
                if epoch == settings.ext_epochs - 1:
                    total, seen = total + float(loss.detach()) * len(batch), seen + len(batch)
        if moving:
            self._set_masks(current)  # M^tau
        update = net.to_numpy((current - theta) * self._masks)  # DSU (11), with the parentheses of DSU (10)
        figures = {"loss": total / max(seen, 1), "penalty": penalty}
        return *self._on_support(update, theta), figures

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
        half = self.training.dan_weight / 2
        if norm > 0 and away != 0:
            self.net.gradients.add_(moved, alpha=half * (1 if away > 0 else -1) / norm)
        return half * abs(away)

    def _set_masks(self, theta: torch.Tensor) -> None:
        if self.support_rule == "shared" and self.spans:
            chosen = public_support(self.net.to_numpy(theta), self.spans, self.training.density)
            self._masks.zero_()
            self._masks[torch.from_numpy(chosen).to(self._masks.device)] = 1
        else:
            topk_masks(theta, self.spans, self.training.density, self._masks)

    def _mask(self, vector: torch.Tensor) -> None:
        """vector * M, only where M is not 1 throughout."""
        for span in self.spans:
            vector[span].mul_(self._masks[span])
