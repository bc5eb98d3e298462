"""Prepared images on disk: one folder per partition, in which every party's samples are one contiguous slice.

A folder holds train_x.npy, train_y.npy, test_x.npy, test_y.npy and meta.json. Every rank maps it and touches only the
slices of the parties it hosts. With a validation fraction, the files called test hold validation samples, and no file
holds a test sample.

Mean and standard deviation per channel are those of the whole training set (pixels scaled to 0..1), as image models
usually take them. They are treated as public, like the model's architecture: no party's privacy budget covers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.data.folder import checksum, damaged, write_array
from fedmpi.data.images.partition import Shares
from fedmpi.data.images.source import ImageSet
from fedmpi.data.prepared import Prepared
from fedmpi.errors import DataError


@dataclass(frozen=True, eq=False)
class Shard:
    """One party's samples. The arrays are read-only views of the mapped files."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Store(Prepared):
    task = "classification"
    dtypes = {"train_x": np.uint8, "train_y": np.int64, "test_x": np.uint8, "test_y": np.int64}

    num_classes: int
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]  # per channel, pixels scaled to 0..1
    std: tuple[float, ...]
    classes: tuple[tuple[int, ...], ...]  # of each party
    train_offsets: tuple[int, ...]  # party p holds rows train_offsets[p] to train_offsets[p + 1]
    test_offsets: tuple[int, ...]

    @property
    def parties(self) -> int:
        return len(self.classes)

    def shard(self, party: int) -> Shard:
        if not 0 <= party < self.parties:
            raise DataError(f"party {party}: {self.path} holds parties 0 to {self.parties - 1}")
        return Shard(**{stem: self._slice(stem, party) for stem in self.dtypes}, classes=self.classes[party])

    def _offsets(self, stem: str) -> tuple[int, ...]:
        return self.train_offsets if stem.startswith("train") else self.test_offsets

    def shape(self, stem: str) -> tuple[int, ...]:
        rows = self._offsets(stem)[-1]
        return (rows, *self.image_shape) if stem.endswith("x") else (rows,)

    def _slice(self, stem: str, party: int) -> np.ndarray:
        offsets = self._offsets(stem)
        # mapped anew for each shard: reading a map of a file that was cut short since `open` would kill the process
        rows = np.asarray(self.map(stem)[offsets[party] : offsets[party + 1]])
        if checksum(rows) != self.checksums[stem][party]:
            raise damaged(self.file(stem), f"wrong checksum of the samples of party {party}")
        return rows


def write(folder: Path, data: ImageSet, shares: Shares) -> dict[str, Any]:
    """Write the arrays; give back what meta.json says of them, with a checksum of each party's slice."""
    # without a copy where nothing was held out
    mean, std = _channel_statistics(data.train_x if shares.public.all() else data.train_x[shares.public])
    test_x, test_y = (data.test_x, data.test_y) if shares.own_test else (data.train_x, data.train_y)
    assert test_x is not None and test_y is not None  # or no test index could point there
    arrays = {
        "train_x": (data.train_x, shares.train),
        "train_y": (data.train_y, shares.train),
        "test_x": (test_x, shares.test),
        "test_y": (test_y, shares.test),
    }
    checksums = {}
    for stem, (array, parts) in arrays.items():
        shape = (sum(map(len, parts)), *array.shape[1:])
        checksums[stem] = write_array(folder / f"{stem}.npy", array.dtype, shape, (array[part] for part in parts))
    return {
        "num_classes": data.num_classes,
        "image_shape": data.train_x.shape[1:],
        "mean": mean,
        "std": std,
        "classes": shares.classes,
        "train_offsets": _offsets(shares.train),
        "test_offsets": _offsets(shares.test),
        "checksums": checksums,
    }


def _channel_statistics(x: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel from counts of the 256 pixel values: no float copy of the data."""
    values = np.arange(256) / 255
    means, stds = [], []
    for channel in range(x.shape[1]):
        # in blocks: bincount widens its input to eight bytes a pixel
        blocks = (x[first : first + 4096, channel].ravel() for first in range(0, len(x), 4096))
        share = sum(np.bincount(block, minlength=256) for block in blocks) / x[:, channel].size
        mean = float(share @ values)
        means.append(mean)
        # a constant channel has nothing to scale
        stds.append(float(np.sqrt(share @ (values - mean) ** 2)) or 1.0)
    return means, stds


def _offsets(parts: list[np.ndarray]) -> list[int]:
    return [0, *np.cumsum([len(part) for part in parts]).tolist()]
