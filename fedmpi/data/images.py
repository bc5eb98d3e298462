"""Image data sets as plain arrays, read from their official files.

Only the preparation step comes here. scikit-learn, torch and torchvision are imported inside the functions that need
them, because a rank that maps prepared files must not wait for their import.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import importlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedmpi.errors import DataError

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

    def load(self, data_dir: str | None) -> ImageSet:
        return self.loader(self, data_dir)

    def locate(self, folder: Path) -> list[Path]:
        """The official files under `folder`, or a DataError that names the first missing one."""
        for layout in self.layouts:
            paths = [folder / name for name in layout]
            if all(path.is_file() for path in paths):
                return paths
        if not self.layouts:
            return []
        missing = next(path for path in (folder / name for name in self.layouts[0]) if not path.is_file())
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
        raise DataError(f"{error.name or 'torchvision'} is not installed: pip install 'fedmpi[images]'") from error
    except Exception as error:
        # whatever a broken installation throws at import, the user must mend the installation
        reason = one_line(error)
        raise DataError(f"torchvision cannot be imported ({reason}): install the build that fits torch") from error


# --- loaders ---------------------------------------------------------------------------------------------------------


def load_digits(source: Source, data_dir: str | None) -> ImageSet:
    """scikit-learn's 8×8 digits. They come with the library: no files, no download, no official test split."""
    try:
        from sklearn.datasets import load_digits as sklearn_load_digits
    except ImportError as error:
        raise DataError("scikit-learn is not installed: pip install scikit-learn") from error
    bunch = sklearn_load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    x, y = _checked(source, x, bunch.target, "scikit-learn's digits")
    return ImageSet(source.name, x, y, None, None, source.num_classes)


def load_cifar(source: Source, data_dir: str | None) -> ImageSet:
    """CIFAR-10 and CIFAR-100. torchvision compares every file with its published MD5 before it unpickles anything."""
    folder = _folder(source, data_dir)
    datasets = import_torchvision_datasets()
    reader = getattr(datasets, source.name.upper())
    if data_dir is None:
        _download(source, folder, lambda: reader(str(folder), download=True))
    parts = []
    for train in (True, False):
        try:
            part = reader(str(folder), train=train, download=False)
            # torchvision shows the images channels last
            parts.append(_checked(source, part.data.transpose(0, 3, 1, 2), part.targets, folder / reader.base_folder))
        except DataError:
            raise
        except Exception as error:
            raise DataError(_cifar_fault(source, datasets, reader, folder, error)) from error
    return ImageSet(source.name, *parts[0], *parts[1], source.num_classes)


def load_emnist(source: Source, data_dir: str | None) -> ImageSet:
    """EMNIST, split `balanced`. Its files hold every image transposed; here they read upright."""
    folder = _folder(source, data_dir)
    datasets = import_torchvision_datasets()
    if data_dir is None:
        _download(source, folder, lambda: datasets.EMNIST(str(folder), split="balanced", download=True))
    parts = []
    with _staged_emnist(source.locate(folder)) as staged:
        for train in (True, False):
            name = f"emnist-balanced-{'train' if train else 'test'}-*-ubyte in {folder}"
            try:
                part = datasets.EMNIST(staged, split="balanced", train=train, download=False)
            except Exception as error:
                # torchvision's reader asserts, overflows or fails to reshape, depending on which byte is wrong
                reason = one_line(error)
                raise DataError(f"{source.name}: {name} cannot be read ({reason}): {source.how_to_get}") from error
            parts.append(_checked(source, part.data.numpy().transpose(0, 2, 1)[:, None], part.targets.numpy(), name))
    return ImageSet(source.name, *parts[0], *parts[1], source.num_classes)


@contextlib.contextmanager
def _staged_emnist(paths: list[Path]) -> Iterator[str]:
    """The layout that torchvision reads, from whichever layout was found, in a temporary folder.

    The published archive holds .gz files; torchvision wants them unpacked. Linking the unpacked ones also keeps its
    reader away from converted copies that an old version may have left beside them.
    """
    with tempfile.TemporaryDirectory(prefix="fedmpi-emnist-") as root:
        raw = Path(root, "EMNIST", "raw")
        raw.mkdir(parents=True)
        for path in paths:
            if path.suffix != ".gz":
                (raw / path.name).symlink_to(path.resolve())
                continue
            try:
                with gzip.open(path, "rb") as packed, open(raw / path.stem, "wb") as plain:
                    shutil.copyfileobj(packed, plain)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{path} cannot be unpacked ({one_line(error)}): get the file anew") from error
        yield root


def _cifar_fault(source: Source, datasets: ModuleType, reader: Any, folder: Path, error: Exception) -> str:
    """torchvision says only that something is wrong; this says which file."""
    files = [*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])]
    for name, md5 in files:
        path = folder / reader.base_folder / name
        if not datasets.utils.check_integrity(str(path), md5):
            return f"{path} is damaged: its MD5 is not the published {md5}; {source.how_to_get}"
    return f"{source.name}: {folder / reader.base_folder} cannot be read ({one_line(error)}): {source.how_to_get}"


# --- common to the loaders -------------------------------------------------------------------------------------------


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _folder(source: Source, data_dir: str | None) -> Path:
    if data_dir is None:
        return cache_dir() / "downloads"
    folder = Path(data_dir).expanduser()
    source.locate(folder)
    return folder


def _download(source: Source, folder: Path, fetch: Callable[[], Any]) -> None:
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


def _checked(source: Source, x: np.ndarray, y: Any, where: object) -> tuple[np.ndarray, np.ndarray]:
    """The arrays in the form that ImageSet promises, or a DataError: a checksum does not cover every format."""
    y = np.asarray(y, dtype=np.int64)
    if x.dtype != np.uint8 or x.shape[1:] != source.shape or y.shape != (len(x),) or len(x) == 0:
        raise DataError(
            f"{source.name}: {where} holds {x.dtype} images of shape {x.shape} and {len(y)} labels, "
            f"expected as many labels as uint8 images of shape {source.shape}"
        )
    if y.min() < 0 or y.max() >= source.num_classes:
        raise DataError(
            f"{source.name}: {where} has labels {y.min()} to {y.max()}, expected 0 to {source.num_classes - 1}"
        )
    return np.ascontiguousarray(x), y
