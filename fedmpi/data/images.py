"""Image data sets as plain arrays: what a data set is, and what its loaders have in common.

The loaders stand in cifar.py, idx.py and femnist.py; the one that needs no file is here. Only the preparation step runs
them. scikit-learn, torch and torchvision are imported inside the functions that need them, because a rank that maps
prepared files must not wait for their import.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedmpi.errors import ConfigError, DataError

#: Keeps the operators of `import_torchvision_datasets` defined: they vanish with the object that defined them.
_defined_operators: list[Any] = []


@dataclass(frozen=True)
class ImageSet:
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

        def smaller(x: np.ndarray | None) -> np.ndarray | None:
            if x is None:
                return None
            shape = (-1, x.shape[1], height // factor, factor, width // factor, factor)
            blocks = (x[first : first + 4096].reshape(shape) for first in range(0, len(x), 4096))
            return np.concatenate([np.rint(block.mean((3, 5), np.float32)).astype(np.uint8) for block in blocks])

        return replace(self, train_x=smaller(self.train_x), test_x=smaller(self.test_x))


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


def cache_dir() -> Path:
    return Path(os.environ.get("FEDMPI_CACHE") or "~/.cache/fedmpi").expanduser()


def import_torchvision_datasets() -> ModuleType:
    """`torchvision.datasets`, also where a CUDA build of torchvision meets a CPU build of torch.

    There torchvision's C++ extension does not load, and its import fails because it refers to an operator that the
    extension would have registered. Reading data sets needs none of them, so the two it asks for are only declared.
    """
    try:
        try:
            return importlib.import_module("torchvision.datasets")
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
        import torch

        library = torch.library.Library("torchvision", "DEF")
        _defined_operators.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision.datasets")
    except ModuleNotFoundError as error:
        # with the constraints, or pip takes torchvision's newest and replaces torch by a build that fits it
        raise DataError(
            f"{error.name or 'torchvision'} is not installed; in the clone of fedmpi: "
            "pip install -c launch/constraints.txt -e '.[images]'"
        ) from error
    except Exception as error:
        # whatever a broken installation throws at import, the user must mend the installation
        reason = one_line(error)
        raise DataError(f"torchvision cannot be imported ({reason}): install the build that fits torch") from error


# --- what comes with a library ---------------------------------------------------------------------------------------


def load_digits(source: Source, data_dir: str | None) -> ImageSet:
    """scikit-learn's 8×8 digits. They come with the library: no files, no download, no official test split."""
    try:
        from sklearn.datasets import load_digits as sklearn_load_digits
    except ImportError as error:
        raise DataError(
            "scikit-learn is not installed; in the clone of fedmpi: pip install -c launch/constraints.txt -e ."
        ) from error
    bunch = sklearn_load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    x, y = checked(source, x, bunch.target, "scikit-learn's digits")
    return ImageSet(source.name, x, y, None, None, source.num_classes)


# --- common to the loaders -------------------------------------------------------------------------------------------


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def folder_of(source: Source, data_dir: str | None) -> Path:
    """The user's folder, which must hold a whole layout, or where downloads go."""
    if data_dir is None:
        return cache_dir() / "downloads"
    folder = Path(data_dir).expanduser()
    source.locate(folder)
    return folder


def download(source: Source, folder: Path, fetch: Callable[[], Any]) -> None:
    """Fetch under a lock: two processes that unpack into one folder would damage each other's files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: fetch all the same
                fcntl.flock(lock, fcntl.LOCK_EX)
            fetch()
    except Exception as error:
        # the network, a proxy, the disk and the archive can each fail in their own way
        raise DataError(
            f"{source.name} could not be downloaded into {folder} ({one_line(error)}): {source.how_to_get}, "
            "and give that folder as data_dir"
        ) from error


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
