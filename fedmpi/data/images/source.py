"""What an image data set is: what is known of it before a file is opened, and what its loader gives.

The loaders stand in cifar.py, idx.py, femnist.py and libraries.py, and catalog.py lists the data sets with their loaders.
Only the preparation step runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.data.cache import downloading, downloads
from fedmpi.errors import ConfigError, DataError


@dataclass(frozen=True)
class ImageSet:
    """All samples as plain arrays."""

    name: str
    train_x: np.ndarray  # uint8, (samples, channels, height, width)
    train_y: np.ndarray  # int64
    test_x: np.ndarray | None  # None: the data set has no official test split
    test_y: np.ndarray | None
    num_classes: int
    train_writers: np.ndarray | None = None  # who made each sample, as text; None: the data set does not say
    test_writers: np.ndarray | None = None

    def shrunk(self, factor: int) -> ImageSet:
        """The same images with every factor x factor pixels as one, their mean, rounded to nearest."""
        if factor == 1:
            return self
        height, width = self.train_x.shape[2:]
        if height % factor or width % factor:
            raise ConfigError(f"shrink = {factor}: must divide the {height} x {width} pixels of {self.name}")

        def smaller(x: np.ndarray) -> np.ndarray:
            shape = (-1, x.shape[1], height // factor, factor, width // factor, factor)
            blocks = (x[first : first + 4096].reshape(shape) for first in range(0, len(x), 4096))
            return np.concatenate([np.rint(block.mean((3, 5), np.float32)).astype(np.uint8) for block in blocks])

        test_x = None if self.test_x is None else smaller(self.test_x)
        return replace(self, train_x=smaller(self.train_x), test_x=test_x)


@dataclass(frozen=True)
class Source:
    """What is known of a data set before any of its files is opened."""

    name: str
    shape: tuple[int, int, int]
    num_classes: int
    has_test: bool
    terms: str
    how_to_get: str
    #: Official layouts, each a tuple of paths under the data folder; the first complete one is read. Empty: no files.
    layouts: tuple[tuple[str, ...], ...]
    loader: Callable[[Source, str | None], ImageSet]
    first_label: int = 0  # in the files; classes are counted from 0 everywhere else
    has_writers: bool = False
    # what augmentation may do to an image
    margin: int = 2  # pixels that it may be moved by
    background: int = 0  # the pixel value that moves in from outside
    mirrors: bool = False  # whether its mirror image shows the same class

    def load(self, data_dir: str | None) -> ImageSet:
        return self.loader(self, data_dir)

    def locate(self, folder: Path) -> list[Path]:
        """The official files under `folder`, or a DataError that names the first missing one."""
        if not self.layouts:
            return []
        found = [[path for path in (folder / name for name in layout) if path.is_file()] for layout in self.layouts]
        for layout, paths in zip(self.layouts, found):
            if len(paths) == len(layout):
                return paths
        # speak of the layout that is there in part, or of the first
        nearest = max(range(len(found)), key=lambda index: len(found[index]))
        missing = next(path for path in (folder / name for name in self.layouts[nearest]) if path not in found[nearest])
        raise DataError(f"{self.name}: {missing} is missing; expected in {folder}: {self.how_to_get}")

    def folder(self, data_dir: str | None) -> Path:
        """The user's folder, or where downloads go."""
        return downloads() if data_dir is None else Path(data_dir).expanduser()

    def downloading(self) -> AbstractContextManager[Path]:
        return downloading(self.name, f"{self.how_to_get}, and give that folder as data_dir")


def checked(source: Source, x: np.ndarray, y: Any, where: object) -> tuple[np.ndarray, np.ndarray]:
    """The arrays in the form that ImageSet promises, or a DataError: a checksum does not cover every format."""
    y = np.asarray(y, dtype=np.int64)
    if x.dtype != np.uint8 or x.shape[1:] != source.shape or y.shape != (len(x),) or len(x) == 0:
        raise DataError(
            f"{source.name}: {where} holds {x.dtype} images of shape {x.shape} and {len(y)} labels, "
            f"expected as many labels as uint8 images of shape {source.shape}"
        )
    first, last = source.first_label, source.first_label + source.num_classes - 1
    if y.min() < first or y.max() > last:
        raise DataError(f"{source.name}: {where} has labels {y.min()} to {y.max()}, expected {first} to {last}")
    return np.ascontiguousarray(x), y - first
