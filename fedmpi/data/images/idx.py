"""Data sets in IDX files: the MNIST family and the splits of EMNIST.

An IDX file is two zero bytes, a type code, the number of dimensions, each dimension as four bytes big-endian, and then
the elements. torchvision fetches the files and compares the archives with their published MD5; they are read here.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedmpi.data import one_line
from fedmpi.data.images.libraries import import_torchvision_datasets
from fedmpi.data.images.source import ImageSet, Source, checked
from fedmpi.errors import DataError

UNSIGNED_BYTES = 0x08

#: Deflate cannot make more than this of a byte: a larger claim in a header is wrong, and nothing is allocated for it.
MOST_INFLATED = 1032

#: torchvision's class by data set.
READERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "kmnist": "KMNIST"}

#: EMNIST's own name of the split by data set.
SPLITS = {
    "emnist": "balanced",
    "emnist-byclass": "byclass",
    "emnist-letters": "letters",
    "emnist-digits": "digits",
}


def load_mnist(source: Source, data_dir: str | None) -> ImageSet:
    return _load(source, data_dir, READERS[source.name])


def load_emnist(source: Source, data_dir: str | None) -> ImageSet:
    """A split of EMNIST. Its files hold every image transposed; here they read upright."""
    return _load(source, data_dir, "EMNIST", transposed=True, split=SPLITS[source.name])


def _load(source: Source, data_dir: str | None, reader: str, transposed: bool = False, **options: str) -> ImageSet:
    """Every layout lists images and labels of the training set, then of the test set."""
    if data_dir is None:
        fetch = getattr(import_torchvision_datasets(), reader)
        with source.downloading() as folder:
            fetch(str(folder), download=True, **options)
    paths = source.locate(source.folder(data_dir))
    parts = []
    for images, labels in (paths[:2], paths[2:]):
        x, y = read_idx(source, images, 3), read_idx(source, labels, 1)
        if transposed:
            x = x.transpose(0, 2, 1)
        parts.append(checked(source, x[:, None], y, f"{images} with {labels.name}"))
    return ImageSet(source.name, *parts[0], *parts[1], source.num_classes)


def read_idx(source: Source, path: Path, dimensions: int) -> np.ndarray:
    """The bytes of a plain or packed IDX file in its shape, or a DataError that names it."""
    packed = path.suffix == ".gz"
    try:
        size = path.stat().st_size
        with gzip.open(path, "rb") if packed else open(path, "rb") as stream:
            header = stream.read(4 + 4 * dimensions)
            opening = bytes([0, 0, UNSIGNED_BYTES, dimensions])
            if header[:4] != opening or len(header) < 4 + 4 * dimensions:
                raise DataError(
                    f"{source.name}: {path} is not an IDX file of {dimensions}-dimensional bytes: it begins with "
                    f"{header[:4].hex() or 'nothing'}, expected {opening.hex()} and {dimensions} sizes"
                )
            shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
            expected = math.prod(shape)
            if expected > (MOST_INFLATED * size if packed else size):
                raise _wrong_length(source, path, shape, f"the file has only {size} bytes")
            content = stream.read(expected + 1)  # one more: the end of a packed file is where its checksum is looked at
    except (OSError, EOFError, zlib.error) as error:
        verb = "unpacked" if packed else "read"
        raise DataError(f"{source.name}: {path} cannot be {verb} ({one_line(error)}): {source.how_to_get}") from error
    if len(content) != expected:
        found = f"{len(content)} bytes" if len(content) < expected else "more"
        raise _wrong_length(source, path, shape, f"there are {found}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _wrong_length(source: Source, path: Path, shape: tuple[int, ...], found: str) -> DataError:
    claim = " x ".join(map(str, shape))
    return DataError(f"{source.name}: {path} announces {claim} bytes after its header and {found}; {source.how_to_get}")
