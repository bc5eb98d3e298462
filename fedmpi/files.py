"""Files of a run: a reader never sees half of one, nobody but their owner reads them, and what was written is on the disk.

A run's folder holds parties' own parts and figures that no epsilon covers, so it is its owner's alone. A file is written
beside its place, flushed to the disk and renamed into it, and the folder is flushed as well: once a call returns, what the
file stands for may happen, whatever happens to the machine. Where it cannot be written, WriteError says so in one line, and
what was there before stays.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import WriteError

# numpy reads a header with ast.literal_eval, and Python 3.11's is not safe in several threads at once: it fails with
# "AST constructor recursion depth mismatch". Ranks that are threads of one process open their files at the same time.
PARSING = threading.Lock()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses becomes a line about this file."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error) from None


def make_folder(path: Path) -> None:
    """The folder and those above it, for their owner alone; one that is there stays as it is."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)  # another rank may have been quicker
        _flush_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    _write(path, lambda stream: stream.write(text.encode()))


def write_json(path: Path, value: object) -> None:
    # allow_nan=False: an infinite epsilon must have been turned into null and a reason before it gets here.
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    named: dict[str, Any] = {**arrays}
    _write(path, lambda stream: np.savez(stream, **named))


def append_line(path: Path, line: str) -> None:
    """One more line of a log that `write_text` began."""
    with writing(path), open(path, "ab") as stream:
        stream.write(line.encode() + b"\n")
        _flush(stream)


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        make_folder(path.parent)
        try:
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
                fill(stream)
                _flush(stream)
            scratch.replace(path)
            _flush_folder(path.parent)
        finally:
            scratch.unlink(missing_ok=True)


def _flush(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _flush_folder(path: Path) -> None:
    """A rename is on the disk only once its folder is."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
