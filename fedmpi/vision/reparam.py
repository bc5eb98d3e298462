"""Reparameterisation training: per-layer Top-k masks, DSU (6) to (8).

The two functions must pick the same coordinates from the same weights on every rank; both take the ceil(S * layer size)
largest magnitudes of a layer, the numpy one with ties broken by position because server and parties have to agree.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def kept(size: int, density: float) -> int:
    """ceil(S * |layer|); guarded so that 0.05 * 36864 = 1843.2 rounds up once and 0.05 * 20 = 1.0000000000000002 does not."""
    return min(size, math.ceil(density * size - 1e-9))


def sparse_spans(conv_spans: list[slice], layers: int, density: float) -> list[slice]:
    """The last k convolution layers, DSU (8) as its text reads; none when k = 0 or S = 1."""
    return conv_spans[len(conv_spans) - min(layers, len(conv_spans)) :] if density < 1 and layers else []


def public_support(theta: np.ndarray, spans: list[slice], density: float) -> np.ndarray | None:
    """Support `shared`: Top-k of the public theta^t, DSU (6) to the letter, as sorted coordinates; None: all."""
    if not spans:
        return None
    keep = np.ones(theta.size, bool)
    for span in spans:
        magnitude = np.abs(theta[span])
        count = kept(magnitude.size, density)
        last = np.partition(magnitude, magnitude.size - count)[magnitude.size - count]
        chosen = magnitude > last
        # Ties at the threshold are broken by position, the same on every rank.
        chosen[np.flatnonzero(magnitude == last)[: count - np.count_nonzero(chosen)]] = True
        keep[span] = chosen
    return np.flatnonzero(keep)


def topk_masks(theta: torch.Tensor, spans: list[slice], density: float, masks: torch.Tensor) -> None:
    """Write M^s of the current weights into `masks` (1 kept, 0 not), which is all ones outside `spans`."""
    for span in spans:
        layer = theta[span].abs()
        mask = masks[span]
        mask.zero_()
        mask[layer.topk(kept(layer.numel(), density), sorted=False).indices] = 1
