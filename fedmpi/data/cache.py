"""Where fedmpi keeps what it can make or fetch again, and how downloads get there."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from fedmpi.data import one_line
from fedmpi.errors import DataError


def cache_folder(chosen: str | None = None) -> Path:
    """The folder that the user chose, or that the environment names, or the usual one."""
    return Path(chosen or os.environ.get("FEDMPI_CACHE") or "~/.cache/fedmpi").expanduser()


def downloads() -> Path:
    return cache_folder() / "downloads"


@contextlib.contextmanager
def downloading(name: str, otherwise: str) -> Iterator[Path]:
    """The folder to download data set `name` into, under a lock: two processes that unpack there at once would damage each
    other's files. `otherwise`: what the user can do where the download fails."""
    folder = downloads()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: fetch all the same
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    except Exception as error:
        # the network, a proxy, the disk and the archive can each fail in their own way
        raise DataError(f"{name} could not be downloaded into {folder} ({one_line(error)}): {otherwise}") from error
