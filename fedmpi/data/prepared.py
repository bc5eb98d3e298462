"""Data is prepared once and kept: a `Spec` decides what each party holds, `prepare` writes that into a folder under a name
that follows from the spec, and every rank opens the folder as a `Prepared`, which maps the files."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from fedmpi.data import one_line
from fedmpi.data.folder import FORMAT, canonical_json, map_array, read_meta, write_meta, written_whole
from fedmpi.errors import ConfigError, DataError
from fedmpi.randomness.words import labelled_generator

P = TypeVar("P", bound="Prepared")


@dataclass(frozen=True, eq=False)
class Prepared(ABC):
    """An opened folder: the data of all parties. The fields of a subclass are entries of meta.json."""

    task: ClassVar[str]  # of the methods that work on such data
    dtypes: ClassVar[Mapping[str, type]]  # of its arrays, by file stem

    path: Path
    dataset: str
    checksums: dict[str, Any]  # of its arrays, by file stem

    @classmethod
    def open(cls: type[P], path: str | os.PathLike[str]) -> P:
        """Read meta.json and check the header of every array; no image and no rating is read."""
        meta = read_meta(Path(path))
        meta |= {"path": Path(path), "dataset": meta["spec"]["dataset"]}
        store = cls(**{field.name: _without_lists(meta[field.name]) for field in dataclasses.fields(cls)})
        for stem in cls.dtypes:
            store.map(stem)
        return store

    @abstractmethod
    def shape(self, stem: str) -> tuple[int, ...]:
        """What the shape of an array must be."""

    def map(self, stem: str) -> np.ndarray:
        return map_array(self.file(stem), self.dtypes[stem], self.shape(stem))

    def file(self, stem: str) -> Path:
        return self.path / f"{stem}.npy"

    @property
    def fingerprint(self) -> int:
        """CRC-32 over all checksums: equal on two hosts that prepared the same data."""
        return zlib.crc32(canonical_json(self.checksums))


@dataclass(frozen=True, kw_only=True)
class Spec(ABC):
    """Everything that decides what each party holds. A subclass calls `check_numbers` before it looks at its values."""

    dataset: str
    data_dir: str | None = None  # where the official files are; None: download them into the cache
    test_fraction: float = 0.2
    validation_fraction: float = 0.0  # of what is left for training, to evaluate on in place of the test data
    seed: int = 0

    @property
    def evaluate_on(self) -> Literal["test", "validation"]:
        return "validation" if self.validation_fraction else "test"

    @abstractmethod
    def canonical(self) -> dict[str, Any]:
        """The settings that have an effect. data_dir is not among them: the same files may lie anywhere."""

    @abstractmethod
    def official_files(self, data_dir: str) -> list[Path]:
        """The files under `data_dir` that would be read."""

    @abstractmethod
    def write(self, folder: Path) -> dict[str, Any]:
        """Write the arrays into the folder; give back what meta.json is to say of them."""

    @abstractmethod
    def open(self, folder: Path) -> Prepared:
        """The folder that this spec was prepared into."""

    def stamps(self) -> list[tuple[str, int, int]] | None:
        """Name, size and time of every official file, so that replaced files are not served from old prepared ones.

        None where there is no folder to look at: what needs no file, and downloads, which are the same everywhere.
        """
        if self.data_dir is None:
            return None
        stats = [(path.name, path.stat()) for path in self.official_files(self.data_dir)]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats] or None

    def check_numbers(self) -> None:
        """Refuse what is not of the type that its field declares."""
        for kind, allowed, wanted in (("int", (int,), "a whole number"), ("float", (int, float), "a number")):
            for name in (field.name for field in dataclasses.fields(self) if field.type == kind):
                value = getattr(self, name)
                if not isinstance(value, allowed) or isinstance(value, bool):
                    raise ConfigError(f"{name} = {value!r}: must be {wanted}")

    def check_fractions(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction = {self.test_fraction}: must lie between 0 and 1")
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"validation_fraction = {self.validation_fraction}: must be 0 (none) or lie below 1")


def prepare(spec: Spec, root: str | os.PathLike[str]) -> Path:
    """The folder of this spec under `root`, written first if it is not there yet.

    Any number of processes may call this at once: the first to finish puts its folder in place, the others use it.
    """
    try:
        key = canonical_json({"format": FORMAT, "spec": spec.canonical(), "source": spec.stamps()})
        folder = Path(root).expanduser() / f"{spec.dataset}-{hashlib.sha256(key).hexdigest()[:12]}"
        if not folder.exists():
            with written_whole(folder) as scratch:
                write_meta(scratch, {"spec": spec.canonical(), **spec.write(scratch)})
    except OSError as error:
        raise DataError(f"{spec.dataset} cannot be prepared under {root}: {one_line(error)}") from error
    spec.open(folder)
    return folder


def _without_lists(value: Any) -> Any:
    """As it was before JSON, which has no tuples."""
    return tuple(map(_without_lists, value)) if isinstance(value, list) else value


def keyed_rng(seed: int, *purpose: object) -> np.random.Generator:
    """A generator for one purpose: no draw depends on how many draws were made for another."""
    return labelled_generator(seed, "partition", *purpose)
