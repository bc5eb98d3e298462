"""Files with a hash over all that is in them: what was damaged or changed since is found by whoever reads it.

A seal finds damage and slips: half a file, a flipped bit, a number edited by hand, a file of another run put in its place. It does not
hold against an owner who changes a file and computes the seal anew: there is no secret in it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.errors import DataError
from fedmpi.files import PARSING, write_arrays, write_json

SEAL = "seal"


class Refused(DataError):
    """A file that is not what was sealed, in words that come behind the file's name."""

    def __init__(self, what: str, changed: bool = False):
        super().__init__(what)
        self.changed = changed  # whether it is a sealed file that somebody or something changed


def vector_sha256(theta: np.ndarray) -> str:
    """A model's name: over the little-endian float32 bytes of its shared vector."""
    return hashlib.sha256(np.ascontiguousarray(theta, "<f4").tobytes()).hexdigest()


def write_sealed(path: Path, arrays: dict[str, np.ndarray]) -> str:
    """Returns the seal."""
    seal = _seal(arrays)
    write_arrays(path, arrays | {SEAL: np.array(seal)})
    return seal


def read_sealed(path: Path) -> dict[str, np.ndarray]:
    """What `write_sealed` wrote, without its seal; DataError for anything else. Nothing in it is ever executed."""
    try:
        return open_sealed(path)[0]
    except Refused as error:
        hint = "; take the run's own file" if error.changed else ""
        raise DataError(f"{path} {error}{hint}") from None


def open_sealed(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """(arrays, their seal); Refused, whose words do not name the file."""
    try:
        with PARSING, np.load(path, allow_pickle=False) as content:
            arrays = dict(content)
    except OSError as error:
        raise Refused(f"cannot be read ({error.strerror or error})".splitlines()[0]) from None
    except Exception as error:  # zipfile, zlib and numpy raise their own kinds for a damaged archive
        raise Refused(f"is damaged ({type(error).__name__})", changed=True) from None
    return arrays, _check(arrays.pop(SEAL, None), arrays, _seal)


def write_sealed_json(path: Path, content: dict[str, Any]) -> None:
    write_json(path, {SEAL: _seal_json(content)} | content)


def open_sealed_json(path: Path) -> dict[str, Any]:
    """What `write_sealed_json` wrote; Refused, whose words do not name the file, for anything else."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise Refused(f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise Refused("is damaged (not JSON)", changed=True) from None
    if not isinstance(content, dict):
        raise Refused("is damaged (not an object)", changed=True)
    _check(content.pop(SEAL, None), content, _seal_json)
    return content


def _check(seal: Any, content: Any, made: Any) -> str:
    if seal is None:
        raise Refused("has no seal: it was not written by a run of fedmpi, or by one of an earlier version")
    found: str = made(content)
    if str(seal) != found:
        raise Refused("was changed since the run wrote it (its seal does not match)", changed=True)
    return found


def _seal(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        values = np.asarray(arrays[name])
        digest.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def _seal_json(content: dict[str, Any]) -> str:
    """Over the values, however they are laid out."""
    as_read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
