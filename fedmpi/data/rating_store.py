"""Prepared ratings on disk: one folder per split, in which the ratings of neighbouring parties lie side by side.

`prepare_ratings` writes the folder once; every rank then maps it and touches only the block of parties that it hosts.
Ratings are rows sorted by party and then by item: {train,test}_items.npy and {train,test}_values.npy, party p's from
{train,test}_offsets.npy[p] to [p + 1]. Small arrays are verified whole; ratings and user features have a checksum for
every 64 parties, in checksums.npy, so that opening does not depend on how many there are.
"""

from __future__ import annotations

import functools
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedmpi.data import rating_sources
from fedmpi.data.folder import canonical, damaged, map_array, read_meta, write_array, write_meta, written_whole
from fedmpi.data.images import one_line
from fedmpi.data.rating_plan import Part, RatingPlan, RatingSpec, make_rating_plan
from fedmpi.data.rating_sources import Scale
from fedmpi.data.ratings import RatingSet
from fedmpi.errors import DataError

__all__ = ["RATING_SETS", "RatingBlock", "RatingSpec", "RatingStore", "Scale", "prepare_ratings"]

RATING_SETS = tuple(rating_sources.known())

#: Part of every folder's name: a change of layout, or of the rule that splits ratings, makes a new folder.
FORMAT = 1

#: Parties that share a checksum.
CHECKED = 64

_WHOLE = {
    "train_offsets": np.int64,
    "test_offsets": np.int64,
    "item_features": np.float32,
    "rater_counts": np.int32,
    "user_ids": np.int64,
    "item_ids": np.int64,
    "checksums": np.uint32,
}
_BY_PARTY = {
    "train_items": np.int32,
    "train_values": np.float32,
    "test_items": np.int32,
    "test_values": np.float32,
    "user_features": np.float32,
}


@dataclass(frozen=True, eq=False)
class RatingBlock:
    """The parties from `first` up to but not including `last`. Arrays are read-only; items ascend within a party."""

    first: int
    last: int
    train_offsets: np.ndarray  # int64, from 0: party first + p holds train_offsets[p] to train_offsets[p + 1]
    train_items: np.ndarray  # int32, row of item_features
    train_values: np.ndarray  # float32, on the scale
    test_offsets: np.ndarray
    test_items: np.ndarray
    test_values: np.ndarray
    user_features: np.ndarray  # float32, a row for each party

    @property
    def parties(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, eq=False)
class RatingStore:
    path: Path
    dataset: str
    parties: int
    num_items: int  # of the item file, rated or not
    scale: Scale
    evaluate_on: Literal["test", "validation"]  # what the arrays called test hold
    edges: tuple[float, ...] | None  # lastfm: listening counts that part the ratings
    optimum_rmse: float | None  # generated: of the best possible prediction of the ratings called test
    rescued: int  # parties all of whose ratings had been drawn for testing; one went back to training
    item_feature_names: tuple[str, ...]
    user_feature_names: tuple[str, ...]
    checksums: dict[str, int]  # CRC-32 of each array that is verified whole, by file stem

    @property
    def fingerprint(self) -> int:
        """CRC-32 over all checksums: equal on two hosts that prepared the same data."""
        return zlib.crc32(canonical(self.checksums))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RatingStore:
        """Read meta.json and the offsets and check every header; no rating is read."""
        folder = Path(path)
        meta = read_meta(folder, FORMAT)
        store = cls(
            path=folder,
            dataset=meta["spec"]["dataset"],
            parties=meta["parties"],
            num_items=meta["num_items"],
            scale=Scale(*meta["scale"]),
            evaluate_on=meta["evaluate_on"],
            edges=None if meta["edges"] is None else tuple(meta["edges"]),
            optimum_rmse=meta["optimum_rmse"],
            rescued=meta["rescued"],
            item_feature_names=tuple(meta["item_feature_names"]),
            user_feature_names=tuple(meta["user_feature_names"]),
            checksums=meta["checksums"],
        )
        for stem in (*_WHOLE, *_BY_PARTY):
            store._map(stem)
        return store

    # Small arrays are copied: they stay readable whatever happens to the files.

    @functools.cached_property
    def train_offsets(self) -> np.ndarray:
        return self._whole("train_offsets")

    @functools.cached_property
    def test_offsets(self) -> np.ndarray:
        return self._whole("test_offsets")

    @functools.cached_property
    def item_features(self) -> np.ndarray:
        return self._whole("item_features")

    @functools.cached_property
    def rater_counts(self) -> np.ndarray:
        """Training ratings of each item over all parties."""
        return self._whole("rater_counts")

    @functools.cached_property
    def user_ids(self) -> np.ndarray:
        """The official id of each party's user."""
        return self._whole("user_ids")

    @functools.cached_property
    def item_ids(self) -> np.ndarray:
        return self._whole("item_ids")

    def party(self, party: int) -> RatingBlock:
        return self.block(party, party + 1)

    def block(self, first: int, last: int) -> RatingBlock:
        if not 0 <= first < last <= self.parties:
            asked = f"party {first}" if last == first + 1 else f"parties {first} to {last - 1}"
            raise DataError(f"{asked}: {self.path} holds parties 0 to {self.parties - 1}")
        train, test = self.train_offsets[first : last + 1], self.test_offsets[first : last + 1]
        rows = {stem: self._slice(stem, first, last) for stem in _BY_PARTY}
        return RatingBlock(first=first, last=last, train_offsets=train - train[0], test_offsets=test - test[0], **rows)

    @functools.cached_property
    def _block_checksums(self) -> dict[str, np.ndarray]:
        return dict(zip(_BY_PARTY, self._whole("checksums").T))

    def _bounds(self, stem: str) -> np.ndarray:
        """The first row of every party, and one past the last."""
        if stem == "user_features":
            return np.arange(self.parties + 1)
        return self.train_offsets if stem.startswith("train") else self.test_offsets

    def _shape(self, stem: str) -> tuple[int, ...]:
        match stem:
            case "train_offsets" | "test_offsets":
                return (self.parties + 1,)
            case "item_features":
                return (self.num_items, len(self.item_feature_names))
            case "user_features":
                return (self.parties, len(self.user_feature_names))
            case "user_ids":
                return (self.parties,)
            case "rater_counts" | "item_ids":
                return (self.num_items,)
            case "checksums":
                return (-(-self.parties // CHECKED), len(_BY_PARTY))
            case _:
                return (int(self._bounds(stem)[-1]),)

    def _map(self, stem: str) -> np.ndarray:
        return map_array(self.path / f"{stem}.npy", (_WHOLE | _BY_PARTY)[stem], self._shape(stem))

    def _whole(self, stem: str) -> np.ndarray:
        array = np.array(self._map(stem))
        if zlib.crc32(array) != self.checksums[stem]:
            raise damaged(self.path / f"{stem}.npy", "wrong checksum")
        array.flags.writeable = False
        return array

    def _slice(self, stem: str, first: int, last: int) -> np.ndarray:
        bounds = self._bounds(stem)
        # mapped anew for each block: reading a map of a file that was cut short since `open` would kill the process
        array = np.asarray(self._map(stem))
        for start in range(first - first % CHECKED, last, CHECKED):
            stop = min(start + CHECKED, self.parties)
            if zlib.crc32(array[bounds[start] : bounds[stop]]) != self._block_checksums[stem][start // CHECKED]:
                raise damaged(self.path / f"{stem}.npy", f"wrong checksum of parties {start} to {stop - 1}")
        return array[bounds[first] : bounds[last]]


def prepare_ratings(spec: RatingSpec, root: str | os.PathLike[str]) -> Path:
    """The folder of this split under `root`, written first if it is not there yet.

    Any number of processes may call this at once: the first to finish puts its folder in place, the others use it.
    """
    try:
        key = canonical({"format": FORMAT, "spec": spec.canonical(), "source": spec.fingerprint()})
        folder = Path(root).expanduser() / f"{spec.dataset}-{hashlib.sha256(key).hexdigest()[:12]}"
        if not folder.exists():
            data = spec.load()
            _write(spec, data, make_rating_plan(spec, data), folder)
    except OSError as error:
        raise DataError(f"{spec.dataset} cannot be prepared under {root}: {one_line(error)}") from error
    RatingStore.open(folder)
    return folder


def _write(spec: RatingSpec, data: RatingSet, plan: RatingPlan, folder: Path) -> None:
    parties, num_items = len(plan.users), len(data.item_ids)
    user_features = data.user_features.values[plan.users]
    whole = {
        "train_offsets": plan.train.offsets,
        "test_offsets": plan.test.offsets,
        "item_features": data.item_features.values,
        "rater_counts": np.bincount(plan.train.items, minlength=num_items),
        "user_ids": data.user_ids[plan.users],
        "item_ids": data.item_ids,
    }
    by_party = {**_arrays("train", plan.train), **_arrays("test", plan.test)}
    by_party["user_features"] = (user_features, np.arange(parties + 1))
    starts = [*range(0, parties, CHECKED), parties]
    with written_whole(folder) as scratch:
        checksums: dict[str, Any] = {}
        for stem, (array, bounds) in by_party.items():
            cuts = bounds[starts]
            blocks = (array[first:last] for first, last in zip(cuts, cuts[1:]))
            checksums[stem] = write_array(scratch / f"{stem}.npy", _BY_PARTY[stem], array.shape, blocks)
        whole["checksums"] = np.stack([np.array(checksums[stem]) for stem in _BY_PARTY], axis=1)
        sums = {}
        for stem, dtype in _WHOLE.items():
            array = np.ascontiguousarray(whole[stem], dtype=dtype)
            (sums[stem],) = write_array(scratch / f"{stem}.npy", dtype, array.shape, [array])
        meta = {
            "format": FORMAT,
            "spec": spec.canonical(),
            "parties": parties,
            "num_items": num_items,
            "scale": data.scale,
            "evaluate_on": spec.evaluate_on,
            "edges": plan.edges,
            "optimum_rmse": plan.optimum_rmse,
            "rescued": plan.rescued,
            "item_feature_names": data.item_features.names,
            "user_feature_names": data.user_features.names,
            "checksums": sums,
        }
        write_meta(scratch, meta)


def _arrays(side: str, part: Part) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {f"{side}_items": (part.items, part.offsets), f"{side}_values": (part.values, part.offsets)}
