"""CIFAR-10 and CIFAR-100, from the published pickles or from the published binary files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedmpi.data import one_line
from fedmpi.data.images.libraries import import_torchvision_datasets
from fedmpi.data.images.source import ImageSet, Source, checked
from fedmpi.errors import DataError

PIXELS = 3 * 32 * 32

#: Images in each binary file. Its size is all that shows whether one was cut short: it has no header and no checksum.
RECORDS = {"train.bin": 50_000, "test.bin": 10_000}
RECORDS_OF_A_BATCH = 10_000

#: Label bytes before the pixels of a binary record, each below its bound. The last of them is the class.
LABELS = {"cifar10": (10,), "cifar100": (20, 100)}


def load_cifar(source: Source, data_dir: str | None) -> ImageSet:
    folder = source.folder(data_dir)
    if data_dir is not None:
        paths = source.locate(folder)
        if paths[0].suffix == ".bin":
            return _load_binary(source, paths)
    return _load_pickles(source, folder, fetch=data_dir is None)


# --- pickles ---------------------------------------------------------------------------------------------------------


def _load_pickles(source: Source, folder: Path, fetch: bool) -> ImageSet:
    """torchvision compares every file with its published MD5 before it unpickles anything."""
    datasets = import_torchvision_datasets()
    reader = getattr(datasets, source.name.upper())
    if fetch:
        with source.downloading():
            reader(str(folder), download=True)
    parts = []
    for train in (True, False):
        try:
            part = reader(str(folder), train=train, download=False)
            # torchvision shows the images channels last
            parts.append(checked(source, part.data.transpose(0, 3, 1, 2), part.targets, folder / reader.base_folder))
        except DataError:
            raise
        except Exception as error:
            raise DataError(_fault(source, datasets, reader, folder, error)) from error
    return ImageSet(source.name, *parts[0], *parts[1], source.num_classes)


def _fault(source: Source, datasets: ModuleType, reader: Any, folder: Path, error: Exception) -> str:
    """torchvision says only that something is wrong; this says which file."""
    files = [*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])]
    for name, md5 in files:
        path = folder / reader.base_folder / name
        if not datasets.utils.check_integrity(str(path), md5):
            return f"{path} is damaged: its MD5 is not the published {md5}; {source.how_to_get}"
    return f"{source.name}: {folder / reader.base_folder} cannot be read ({one_line(error)}): {source.how_to_get}"


# --- binary files ----------------------------------------------------------------------------------------------------


def _load_binary(source: Source, paths: list[Path]) -> ImageSet:
    """Records of label bytes and then the red, green and blue plane; the last file is the test set."""
    labels = len(LABELS[source.name])
    parts = []
    for files in (paths[:-1], paths[-1:]):
        records = np.concatenate([_records(source, path) for path in files])
        x = records[:, labels:].reshape(-1, *source.shape)
        parts.append(checked(source, x, records[:, labels - 1], files[0].parent))
    return ImageSet(source.name, *parts[0], *parts[1], source.num_classes)


def _records(source: Source, path: Path) -> np.ndarray:
    bounds = LABELS[source.name]
    count, width = RECORDS.get(path.name, RECORDS_OF_A_BATCH), len(bounds) + PIXELS
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{source.name}: {path} cannot be read ({one_line(error)})") from error
    if content.size != count * width:
        raise DataError(
            f"{source.name}: {path} has {content.size} bytes, that is {content.size // width} records of {width} and "
            f"{content.size % width} bytes, expected {count} records; {source.how_to_get}"
        )
    records = content.reshape(count, width)
    for column, bound in enumerate(bounds):
        wrong = np.flatnonzero(records[:, column] >= bound)
        if len(wrong):
            raise DataError(
                f"{source.name}: record {wrong[0]} of {path} has label {records[wrong[0], column]}, expected 0 to "
                f"{bound - 1}; {source.how_to_get}"
            )
    return records
