"""Arrays in one file, with a hash over all of them: what was damaged or changed since is found by whoever reads it."""

import hashlib
from pathlib import Path

import numpy as np

from fedmpi.errors import DataError
from fedmpi.files import write_arrays

SEAL = "seal"


def vector_sha256(theta: np.ndarray) -> str:
    """A model's name: over the little-endian float32 bytes of its shared vector."""
    return hashlib.sha256(np.ascontiguousarray(theta, "<f4").tobytes()).hexdigest()


def write_sealed(path: Path, arrays: dict[str, np.ndarray]) -> None:
    write_arrays(path, arrays | {SEAL: np.array(_seal(arrays))})


def read_sealed(path: Path) -> dict[str, np.ndarray]:
    """What `write_sealed` wrote, without its seal; DataError for anything else. Nothing in it is ever executed."""
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = dict(content)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})".splitlines()[0]) from None
    except Exception as error:  # zipfile, zlib and numpy raise their own kinds for a damaged archive
        raise DataError(f"{path} is damaged ({type(error).__name__}); take the run's own file") from None
    if SEAL not in arrays:
        raise DataError(f"{path} has no seal: it was not written by a run of fedmpi")
    if str(arrays.pop(SEAL)) != _seal(arrays):
        raise DataError(f"{path} was changed since the run wrote it (its seal does not match); take the run's own file")
    return arrays


def _seal(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        values = np.asarray(arrays[name])
        digest.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()
