"""What a rating data set is: what is known of it before a file is opened, where its files are, what its loader gives.

A data set is read from the folder that its archive unpacks to, or from the archive itself, which is never unpacked to
disk. Only the preparation step comes here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from fedmpi.data import one_line
from fedmpi.data.cache import downloading
from fedmpi.data.ratings.features import Features
from fedmpi.errors import DataError


class Scale(NamedTuple):
    lowest: float
    highest: float
    step: float


class Counts(NamedTuple):
    """What the official files hold. users: those with a rating. tags: applications of a tag, 0 where there is no file."""

    ratings: int
    users: int
    items: int
    tags: int


@dataclass(frozen=True)
class Files:
    """The official files of one data set, unpacked in a folder or packed in `root`, the archive."""

    root: Path
    members: dict[str, str]  # official file name to path under the root

    @property
    def packed(self) -> bool:
        return self.root.is_file()

    def label(self, name: str) -> str:
        """What to call the file in a message."""
        return f"{self.members[name]} in {self.root}" if self.packed else str(self.root / self.members[name])

    def paths(self) -> list[Path]:
        return [self.root] if self.packed else [self.root / member for member in self.members.values()]

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with contextlib.ExitStack() as stack:
                if self.packed:
                    archive = stack.enter_context(zipfile.ZipFile(self.root))
                    yield stack.enter_context(archive.open(self.members[name]))
                else:
                    yield stack.enter_context(open(self.root / self.members[name], "rb"))
        except (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
            # an archive that is cut short, encrypted, or fails its checksum
            raise DataError(f"{self.label(name)} cannot be read ({one_line(error)}): get the file anew") from error


@dataclass(frozen=True, eq=False)
class RatingSet:
    """All ratings, sorted by user and then by item; no pair occurs twice."""

    scale: Scale
    users: np.ndarray  # int32, row of user_ids; every user occurs
    items: np.ndarray  # int32, row of item_ids
    values: np.ndarray  # float32; where the files hold listening counts, these, made ratings after the split
    user_ids: np.ndarray  # int64, ascending, as in the official files
    item_ids: np.ndarray
    user_features: Features
    item_features: Features
    expected: np.ndarray | None = None  # generated: mean of each rating given everything but its noise


@dataclass(frozen=True)
class RatingSource:
    """What is known of a data set before any of its files is opened."""

    name: str
    scale: Scale
    terms: str
    loader: Callable[[RatingSource, Files, int, bool], RatingSet] | None = None  # None: drawn at random, no files
    files: tuple[str, ...] = ()  # the one with the ratings first, the one with the items second
    header: bytes | None = None  # of the file with the ratings
    folder: str = ""  # that the archive unpacks to
    url: str = ""
    md5: str | None = None  # of the archive, where one is published
    counts: Counts = Counts(0, 0, 0, 0)
    opening: bytes = b""  # the first line with a rating in the official file
    has_tags: bool = False
    holds_listens: bool = False  # its files say how often a user listened, from which ratings are made

    @property
    def archive(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def how_to_get(self) -> str:
        return f"put {self.url} there"

    def load(self, data_dir: str | None, *, tag_components: int = 20, complete: bool | None = None) -> RatingSet:
        """The data set from `data_dir`, or from the download in the cache.

        complete: whether the numbers of ratings, users, items and tags must be the official ones. None: they must if the
        first rating is the official file's first, so that an official file that was cut short is noticed while other data
        in the same format is welcome.
        """
        assert self.loader is not None, f"{self.name} has no files"
        files = self.fetch() if data_dir is None else self.find(data_dir)
        if complete is None:
            with files.open(self.files[0]) as stream:
                complete = self.opening in [stream.readline(200).rstrip(b"\r\n") for _ in range(2)]
        return self.loader(self, files, tag_components, complete)

    def find(self, data_dir: str | os.PathLike[str]) -> Files:
        """`data_dir`: the folder that holds the official folder, that folder, the archive, or a folder with the archive."""
        given = Path(data_dir).expanduser()
        if given.is_file():
            return self._in_archive(given)
        for root in (given / self.folder, given):
            missing = [name for name in self.files if not (root / name).is_file()]
            if not missing:
                return Files(root, {name: name for name in self.files})
            if (root / self.files[0]).is_file():
                raise DataError(f"{self.name}: {root / missing[0]} is missing; expected in {given}: {self.how_to_get}")
        if (given / self.archive).is_file():
            return self._in_archive(given / self.archive)
        missing_file = given / self.folder / self.files[0]
        raise DataError(f"{self.name}: {missing_file} is missing; expected in {given}: {self.how_to_get}")

    def fetch(self) -> Files:
        """The archive in the cache, downloaded first if it is not there. The terms go to standard error before that."""
        otherwise = f"download {self.url} where you can, and give its folder as --data-dir"
        with downloading(self.name, otherwise) as folder:
            target = folder / self.archive
            if not target.is_file():
                print(f"fedmpi: downloading {self.url} ({self.terms})", file=sys.stderr, flush=True)
                self._download(target)
        return self._in_archive(target)

    def _in_archive(self, path: Path) -> Files:
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} cannot be read ({one_line(error)}): expected {self.archive}") from error
        members = {}
        for name in self.files:
            # with or without the official folder around it; the outermost, where a tool added files of its own
            found = [member for member in names if member.rsplit("/", 1)[-1] == name]
            if not found:
                raise DataError(f"{self.name}: {path} holds no {name}: expected {self.archive}")
            members[name] = min(found, key=lambda member: (member.count("/"), "__MACOSX" in member, member))
        return Files(path, members)

    def _download(self, target: Path) -> None:
        import urllib.request  # with what it brings 25 ms, and every rank imports this file

        scratch = target.with_name(f"{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        digest = hashlib.md5(usedforsecurity=False)
        try:
            with urllib.request.urlopen(self.url, timeout=60) as response, open(scratch, "wb") as stream:
                while chunk := response.read(1 << 20):
                    digest.update(chunk)
                    stream.write(chunk)
            if self.md5 and digest.hexdigest() != self.md5:
                raise DataError(f"the MD5 of what came is {digest.hexdigest()}, not the published {self.md5}")
            if not zipfile.is_zipfile(scratch):
                raise DataError("what came is not a zip archive")
            scratch.rename(target)
        finally:
            scratch.unlink(missing_ok=True)
