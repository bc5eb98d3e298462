"""Prepared data on disk: one folder per partition, in which every party's samples are one contiguous slice.

`prepare` writes the folder once; every rank then maps it and touches only the slices of the parties it hosts. A folder
holds train_x.npy, train_y.npy, test_x.npy, test_y.npy and meta.json. It is written beside its place and renamed into
it, so it is whole or absent; a preparation that was killed can leave a folder named *.tmp-*, which may be deleted.
Where a validation fraction is set, the files called test hold validation samples, and no file holds a test sample.

Mean and standard deviation per channel are those of the whole training set (pixels scaled to 0..1), as image models
usually take them. They are treated as public, like the model's architecture: no party's privacy budget covers them.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmpi.data import catalog
from fedmpi.data.folder import canonical, damaged, map_array, read_meta, write_array, write_meta, written_whole
from fedmpi.data.images import ImageSet, one_line
from fedmpi.data.plan import PartitionSpec, Plan, make_plan
from fedmpi.errors import DataError

__all__ = ["PartitionSpec", "Shard", "Store", "prepare"]

#: Part of every folder's name: a change of layout, or of the rule that picks samples, makes a new folder.
FORMAT = 1

_DTYPES = {"train_x": np.uint8, "train_y": np.int64, "test_x": np.uint8, "test_y": np.int64}


@dataclass(frozen=True, eq=False)
class Shard:
    """One party's samples. The arrays are read-only views of the mapped files."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Store:
    path: Path
    dataset: str
    num_classes: int
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]  # per channel, pixels scaled to 0..1
    std: tuple[float, ...]
    classes: tuple[tuple[int, ...], ...]  # of each party
    train_offsets: tuple[int, ...]  # party p holds rows train_offsets[p] to train_offsets[p + 1]
    test_offsets: tuple[int, ...]
    checksums: dict[str, list[int]]  # CRC-32 of each party's slice, by file stem

    @property
    def fingerprint(self) -> int:
        """CRC-32 over the checksums of all samples: equal on two hosts that prepared the same data."""
        return zlib.crc32(canonical(self.checksums))

    @property
    def parties(self) -> int:
        return len(self.classes)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """Read meta.json and check the four headers; no sample is read."""
        folder = Path(path)
        meta = read_meta(folder, FORMAT)
        store = cls(
            path=folder,
            dataset=meta["spec"]["dataset"],
            num_classes=meta["num_classes"],
            image_shape=tuple(meta["image_shape"]),
            mean=tuple(meta["mean"]),
            std=tuple(meta["std"]),
            classes=tuple(tuple(held) for held in meta["classes"]),
            train_offsets=tuple(meta["train_offsets"]),
            test_offsets=tuple(meta["test_offsets"]),
            checksums=meta["checksums"],
        )
        for stem in _DTYPES:
            store._map(stem)
        return store

    def shard(self, party: int) -> Shard:
        if not 0 <= party < self.parties:
            raise DataError(f"party {party}: {self.path} holds parties 0 to {self.parties - 1}")
        return Shard(**{stem: self._slice(stem, party) for stem in _DTYPES}, classes=self.classes[party])

    def _offsets(self, stem: str) -> tuple[int, ...]:
        return self.train_offsets if stem.startswith("train") else self.test_offsets

    def _map(self, stem: str) -> np.ndarray:
        rows = self._offsets(stem)[-1]
        shape = (rows, *self.image_shape) if stem.endswith("x") else (rows,)
        return map_array(self.path / f"{stem}.npy", _DTYPES[stem], shape)

    def _slice(self, stem: str, party: int) -> np.ndarray:
        offsets = self._offsets(stem)
        # mapped anew for each shard: reading a map of a file that was cut short since `open` would kill the process
        rows = np.asarray(self._map(stem)[offsets[party] : offsets[party + 1]])
        if zlib.crc32(rows) != self.checksums[stem][party]:
            raise damaged(self.path / f"{stem}.npy", f"wrong checksum of the samples of party {party}")
        return rows


def prepare(spec: PartitionSpec, root: str | os.PathLike[str]) -> Path:
    """The folder of this partition under `root`, written first if it is not there yet.

    Any number of processes may call this at once: the first to finish puts its folder in place, the others use it.
    """
    try:
        key = canonical({"format": FORMAT, "spec": spec.canonical(), "source": spec.fingerprint()})
        folder = Path(root).expanduser() / f"{spec.dataset}-{hashlib.sha256(key).hexdigest()[:12]}"
        if not folder.exists():
            data = catalog.get(spec.dataset).load(spec.data_dir).shrunk(spec.shrink)
            _write(spec, data, make_plan(spec, data), folder)
    except OSError as error:
        raise DataError(f"{spec.dataset} cannot be prepared under {root}: {one_line(error)}") from error
    Store.open(folder)
    return folder


def _write(spec: PartitionSpec, data: ImageSet, plan: Plan, folder: Path) -> None:
    with written_whole(folder) as scratch:
        # without a copy where nothing was held out
        mean, std = _channel_statistics(data.train_x if plan.public.all() else data.train_x[plan.public])
        arrays = {
            "train_x": (data.train_x, plan.train),
            "train_y": (data.train_y, plan.train),
            "test_x": (data.test_x if plan.own_test else data.train_x, plan.test),
            "test_y": (data.test_y if plan.own_test else data.train_y, plan.test),
        }
        meta = {
            "format": FORMAT,
            "spec": spec.canonical(),
            "num_classes": data.num_classes,
            "image_shape": data.train_x.shape[1:],
            "mean": mean,
            "std": std,
            "classes": plan.classes,
            "train_offsets": _offsets(plan.train),
            "test_offsets": _offsets(plan.test),
            "checksums": {stem: _write_array(scratch / f"{stem}.npy", *what) for stem, what in arrays.items()},
        }
        write_meta(scratch, meta)


def _write_array(file: Path, array: np.ndarray, parts: list[np.ndarray]) -> list[int]:
    """Write the rows of each party in turn; give back the CRC-32 of each party's bytes."""
    shape = (sum(len(part) for part in parts), *array.shape[1:])
    return write_array(file, array.dtype, shape, (array[part] for part in parts))


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
