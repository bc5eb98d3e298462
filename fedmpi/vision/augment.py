"""Augmentation: each image of a batch moved by a few pixels, and mirrored where that keeps its class."""

from dataclasses import dataclass

import numpy as np
import torch

from fedmpi.data.images import catalog
from fedmpi.data.images.store import Store


@dataclass(frozen=True, eq=False)
class Augmentation:
    margin: int  # pixels that an image may be moved by, either way
    mirrors: bool
    border: torch.Tensor  # of each channel: what moves in from outside, in the units of the images

    @classmethod
    def of(cls, store: Store, device: torch.device) -> "Augmentation":
        """What the data set allows; outside of an image lies its background, normalised as the image is."""
        source = catalog.get(store.dataset)
        mean, std = np.array(store.mean, np.float32), np.array(store.std, np.float32)
        border = (np.float32(source.background) / 255 - mean) / std
        return cls(source.margin, source.mirrors, torch.from_numpy(border).to(device))

    def __call__(self, images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        """The same as padding by the margin and cropping at random. Every draw comes from `rng`, on the CPU: a party's
        images do not depend on the rank or the device that works on them."""
        count, channels, height, width = images.shape
        margin = self.margin
        down, right = torch.from_numpy(rng.integers(0, 2 * margin + 1, (2, count))).to(images.device)
        rows = down[:, None] + torch.arange(height, device=images.device)
        columns = right[:, None] + torch.arange(width, device=images.device)
        if self.mirrors:
            mirrored = torch.from_numpy(rng.integers(0, 2, count, dtype=bool)).to(images.device)
            columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        padded = self.border[:, None, None].expand(count, -1, height + 2 * margin, width + 2 * margin).clone()
        padded[:, :, margin : margin + height, margin : margin + width] = images
        each = torch.arange(count, device=images.device)[:, None, None]
        # indices on both sides of a slice: its dimension, the channels, comes out last
        return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
