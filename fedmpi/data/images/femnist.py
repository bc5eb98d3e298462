"""FEMNIST, handwritten letters and digits with their writers, as the LEAF benchmark prepares it: a part, in one npz file.

Keys train_x, train_y, train_u and test_x, test_y, test_u: images of 28×28 bytes (flat or square, dark on white), labels
0 to 61, and the writer of each sample.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedmpi.data import one_line
from fedmpi.data.images.source import ImageSet, Source, checked
from fedmpi.errors import DataError


def load_femnist(source: Source, data_dir: str | None) -> ImageSet:
    if data_dir is None:
        raise DataError(
            f"{source.name} cannot be downloaded: give a folder that holds {source.layouts[0][0]} as data_dir"
        )
    (path,) = source.locate(source.folder(data_dir))
    parts, writers = [], []
    for part in ("train", "test"):
        x, y, u = _arrays(source, path, [f"{part}_{letter}" for letter in "xyu"])
        if y.dtype.kind not in "ui" or u.dtype.kind not in "USui" or u.shape != (len(x),):
            raise DataError(
                f"{source.name}: {path} holds {part}_y of {y.dtype} and {part}_u of {u.dtype} and shape {u.shape}, "
                f"expected whole numbers and the writer of each of {len(x)} images"
            )
        if x.shape[1:] in (source.shape[1:], (source.shape[1] * source.shape[2],)):
            x = x.reshape(len(x), *source.shape)
        parts.append(checked(source, x, y, f"{path}, {part}_x and {part}_y,"))
        writers.append(u.astype(np.str_))
    return ImageSet(source.name, *parts[0], *parts[1], source.num_classes, *writers)


def _arrays(source: Source, path: Path, names: list[str]) -> list[np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise DataError(f"{source.name}: {path} has no array {missing[0]}, expected {', '.join(names)}")
            arrays = [archive[name] for name in names]
    except DataError:
        raise
    except Exception as error:
        # a plain .npy, an array of objects, a damaged archive or header: each has an exception of its own
        raise DataError(f"{source.name}: {path} cannot be read ({one_line(error)})") from error
    for name, array in zip(names, arrays):
        if array.ndim == 0:
            raise DataError(f"{source.name}: {path} holds a single value as {name}, expected one for each sample")
    return arrays
