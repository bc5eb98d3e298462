"""What rating data sets there are, on which terms, where their official files lie, and how to get them.

A data set is read from the folder that its archive unpacks to, or from the archive itself, which is never unpacked to
disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import sys
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedmpi.data.images import cache_dir, one_line
from fedmpi.errors import ConfigError, DataError


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
class RatingSource:
    """What is known of a data set before any of its files is opened."""

    name: str
    scale: Scale
    terms: str
    how_to_get: str = ""
    folder: str = ""  # that the archive unpacks to
    url: str = ""
    md5: str | None = None  # of the archive, where one is published
    files: tuple[str, ...] = ()  # the file with the ratings first; empty: no files
    counts: Counts | None = None
    opening: bytes = b""  # the first line with a rating in the official file
    has_tags: bool = False

    @property
    def archive(self) -> str:
        return self.url.rsplit("/", 1)[-1]


_GROUPLENS = "https://files.grouplens.org/datasets"
_MOVIELENS_TERMS = (
    "research use only, no redistribution, no commercial use without permission; cite Harper and Konstan 2015, "
    "The MovieLens Datasets: History and Context"
)


def _movielens(name: str, folder: str, md5: str, **rest: object) -> RatingSource:
    url = f"{_GROUPLENS}/movielens/{name}.zip"
    return RatingSource(
        name=name, terms=_MOVIELENS_TERMS, how_to_get=f"put {url} there", folder=folder, url=url, md5=md5, **rest
    )


_LASTFM_URL = f"{_GROUPLENS}/hetrec2011/hetrec2011-lastfm-2k.zip"
_SOURCES = (
    RatingSource(
        name="generated", scale=Scale(1.0, 5.0, 1.0), terms="none: drawn at random", how_to_get="needs no file"
    ),
    _movielens(
        "ml-100k",
        folder="ml-100k",
        md5="0e33842e24a9c977be4e0107933c0723",
        scale=Scale(1.0, 5.0, 1.0),
        files=("u.data", "u.item", "u.user", "u.genre"),
        counts=Counts(100_000, 943, 1_682, 0),
        opening=b"196\t242\t3\t881250949",
    ),
    _movielens(
        "ml-1m",
        folder="ml-1m",
        md5="c4d9eecfca2ab87c1945afe126590906",
        scale=Scale(1.0, 5.0, 1.0),
        files=("ratings.dat", "movies.dat", "users.dat"),
        counts=Counts(1_000_209, 6_040, 3_883, 0),  # 3,706 of the films are rated
        opening=b"1::1193::5::978300760",
    ),
    _movielens(
        "ml-10m",
        folder="ml-10M100K",
        md5="ce571fd55effeba0271552578f2648bd",
        scale=Scale(0.5, 5.0, 0.5),
        files=("ratings.dat", "movies.dat", "tags.dat"),
        counts=Counts(10_000_054, 69_878, 10_681, 95_580),  # ids go up to 71,567; the others only applied tags
        opening=b"1::122::5::838985046",
        has_tags=True,
    ),
    RatingSource(
        name="lastfm",
        scale=Scale(1.0, 5.0, 1.0),  # after binning; the files hold listening counts
        terms="non-commercial use, not for redistribution; cite Cantador, Brusilovsky and Kuflik 2011, HetRec",
        how_to_get=f"put {_LASTFM_URL} there",
        folder="hetrec2011-lastfm-2k",
        url=_LASTFM_URL,
        files=("user_artists.dat", "artists.dat", "user_taggedartists.dat", "tags.dat"),
        counts=Counts(92_834, 1_892, 17_632, 186_479),
        opening=b"2\t51\t13883",
        has_tags=True,
    ),
)
_BY_NAME = {source.name: source for source in _SOURCES}


def known() -> list[str]:
    return sorted(_BY_NAME)


def get(name: str) -> RatingSource:
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        raise ConfigError(f"dataset = {name!r}: must be one of {', '.join(known())}") from None


# --- where the files are ---------------------------------------------------------------------------------------------


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

    def stats(self) -> list[tuple[str, int, int]]:
        """Name, size and time, so that replaced files are not taken for the old ones."""
        paths = [self.root] if self.packed else [self.root / member for member in self.members.values()]
        return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
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


def find_files(source: RatingSource, data_dir: str | os.PathLike[str]) -> Files:
    """`data_dir`: the folder that holds the official folder, that folder, the archive, or a folder with the archive."""
    given = Path(data_dir).expanduser()
    if given.is_file():
        return _in_archive(source, given)
    for root in (given / source.folder, given):
        missing = [name for name in source.files if not (root / name).is_file()]
        if not missing:
            return Files(root, {name: name for name in source.files})
        if (root / source.files[0]).is_file():
            raise DataError(f"{source.name}: {root / missing[0]} is missing; expected in {given}: {source.how_to_get}")
    if (given / source.archive).is_file():
        return _in_archive(source, given / source.archive)
    missing_file = given / source.folder / source.files[0]
    raise DataError(f"{source.name}: {missing_file} is missing; expected in {given}: {source.how_to_get}")


def _in_archive(source: RatingSource, path: Path) -> Files:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}): expected {source.archive}") from error
    members = {}
    for name in source.files:
        # with or without the official folder around it; the outermost, where a tool added files of its own
        found = [member for member in names if member.rsplit("/", 1)[-1] == name]
        if not found:
            raise DataError(f"{source.name}: {path} holds no {name}: expected {source.archive}")
        members[name] = min(found, key=lambda member: (member.count("/"), "__MACOSX" in member, member))
    return Files(path, members)


def fetch(source: RatingSource) -> Files:
    """The archive in the cache, downloaded first if it is not there. The terms go to standard error before that."""
    folder = cache_dir() / "downloads"
    target = folder / source.archive
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: fetch all the same
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                print(f"fedmpi: downloading {source.url} ({source.terms})", file=sys.stderr, flush=True)
                _download(source, target)
    except Exception as error:
        # the network, a proxy and the disk can each fail in their own way
        raise DataError(
            f"{source.name} could not be downloaded into {folder} ({one_line(error)}): download {source.url} where you "
            "can, and give its folder as --data-dir"
        ) from error
    return _in_archive(source, target)


def _download(source: RatingSource, target: Path) -> None:
    scratch = target.with_name(f"{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with urllib.request.urlopen(source.url, timeout=60) as response, open(scratch, "wb") as stream:
            while chunk := response.read(1 << 20):
                digest.update(chunk)
                stream.write(chunk)
        if source.md5 and digest.hexdigest() != source.md5:
            raise DataError(f"the MD5 of what came is {digest.hexdigest()}, not the published {source.md5}")
        if not zipfile.is_zipfile(scratch):
            raise DataError("what came is not a zip archive")
        scratch.rename(target)
    finally:
        scratch.unlink(missing_ok=True)
