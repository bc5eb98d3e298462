"""Prepared ratings on disk: one folder per split, in which the ratings of neighbouring parties lie side by side.

Every rank maps the folder and touches only the block of parties that it hosts. Ratings are rows sorted by party and then
by item: {train,test}_items.npy and {train,test}_values.npy, party p's from {train,test}_offsets.npy[p] to [p + 1].

Small arrays have one checksum each, in meta.json. Ratings and user features have one for every group of 64 parties, in
checksums.npy, so that a rank reads and verifies little more than its own block, however many parties there are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedmpi.data.folder import checksum, damaged, write_array
from fedmpi.data.prepared import Prepared
from fedmpi.data.ratings.source import RatingSet, Scale
from fedmpi.data.ratings.split import Shares
from fedmpi.errors import DataError

#: Parties of a group, which share a checksum.
GROUP = 64

#: Arrays that are small: verified whole.
_WHOLE = {
    "train_offsets": np.int64,
    "test_offsets": np.int64,
    "item_features": np.float32,
    "rater_counts": np.int32,
    "user_ids": np.int64,
    "item_ids": np.int64,
    "checksums": np.uint32,
}
#: Arrays with rows of every party, one party after the other: verified group by group.
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


def _verified_whole(stem: str) -> functools.cached_property[np.ndarray]:
    """A small array as a property. It is copied: it stays readable whatever happens to the file."""

    def read(store: RatingStore) -> np.ndarray:
        array = np.array(store.map(stem))
        if checksum(array) != store.checksums[stem]:
            raise damaged(store.file(stem), "wrong checksum")
        array.flags.writeable = False
        return array

    return functools.cached_property(read)


@dataclass(frozen=True, eq=False)
class RatingStore(Prepared):
    task = "recommendation"
    dtypes = _WHOLE | _BY_PARTY

    parties: int
    num_items: int  # of the item file, rated or not
    scale: Scale
    evaluate_on: Literal["test", "validation"]  # what the arrays called test hold
    edges: tuple[float, ...] | None  # listening counts that part the ratings, where ratings are made of them
    optimum_rmse: float | None  # generated: of the best possible prediction of the ratings called test
    rescued: int  # parties all of whose ratings had been drawn for testing; one went back to training
    item_feature_names: tuple[str, ...]
    user_feature_names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", Scale(*self.scale))  # meta.json knows no names

    train_offsets = _verified_whole("train_offsets")
    test_offsets = _verified_whole("test_offsets")
    item_features = _verified_whole("item_features")
    rater_counts = _verified_whole("rater_counts")  # training ratings of each item over all parties
    user_ids = _verified_whole("user_ids")  # the official id of each party's user
    item_ids = _verified_whole("item_ids")
    _group_checksums = _verified_whole("checksums")  # a row for each group, a column for each array of _BY_PARTY

    def party(self, party: int) -> RatingBlock:
        return self.block(party, party + 1)

    def block(self, first: int, last: int) -> RatingBlock:
        if not 0 <= first < last <= self.parties:
            asked = f"party {first}" if last == first + 1 else f"parties {first} to {last - 1}"
            raise DataError(f"{asked}: {self.path} holds parties 0 to {self.parties - 1}")
        train, test = self.train_offsets[first : last + 1], self.test_offsets[first : last + 1]
        rows = {stem: self._slice(stem, first, last) for stem in _BY_PARTY}
        return RatingBlock(first=first, last=last, train_offsets=train - train[0], test_offsets=test - test[0], **rows)

    def _bounds(self, stem: str) -> np.ndarray:
        """The first row of every party, and one past the last."""
        if stem == "user_features":
            return np.arange(self.parties + 1)
        return self.train_offsets if stem.startswith("train") else self.test_offsets

    def shape(self, stem: str) -> tuple[int, ...]:
        known = {
            "train_offsets": (self.parties + 1,),
            "test_offsets": (self.parties + 1,),
            "item_features": (self.num_items, len(self.item_feature_names)),
            "user_features": (self.parties, len(self.user_feature_names)),
            "rater_counts": (self.num_items,),
            "user_ids": (self.parties,),
            "item_ids": (self.num_items,),
            "checksums": (-(-self.parties // GROUP), len(_BY_PARTY)),
        }
        return known[stem] if stem in known else (int(self._bounds(stem)[-1]),)

    def _slice(self, stem: str, first: int, last: int) -> np.ndarray:
        bounds = self._bounds(stem)
        # mapped anew for each block: reading a map of a file that was cut short since `open` would kill the process
        array = np.asarray(self.map(stem))
        wanted = self._group_checksums[:, list(_BY_PARTY).index(stem)]
        for group, start, stop in _groups(first, last, self.parties):
            if checksum(array[bounds[start] : bounds[stop]]) != wanted[group]:
                raise damaged(self.file(stem), f"wrong checksum of parties {start} to {stop - 1}")
        return array[bounds[first] : bounds[last]]


def _groups(first: int, last: int, parties: int) -> Iterator[tuple[int, int, int]]:
    """Number, first party and one past the last party of each group that holds any of the parties `first` to `last` - 1."""
    for group in range(first // GROUP, -(-last // GROUP)):
        yield group, group * GROUP, min((group + 1) * GROUP, parties)


def write(folder: Path, data: RatingSet, shares: Shares, evaluate_on: str) -> dict[str, Any]:
    """Write the arrays; give back what meta.json says of them."""
    parties, num_items = len(shares.users), len(data.item_ids)
    whole = {
        "train_offsets": shares.train.offsets,
        "test_offsets": shares.test.offsets,
        "item_features": data.item_features.values,
        "rater_counts": np.bincount(shares.train.items, minlength=num_items),
        "user_ids": data.user_ids[shares.users],
        "item_ids": data.item_ids,
    }
    # with the first row of every party, and one past the last
    by_party = {
        "train_items": (shares.train.items, shares.train.offsets),
        "train_values": (shares.train.values, shares.train.offsets),
        "test_items": (shares.test.items, shares.test.offsets),
        "test_values": (shares.test.values, shares.test.offsets),
        "user_features": (data.user_features.values[shares.users], np.arange(parties + 1)),
    }
    group_checksums = []
    for stem, (array, bounds) in by_party.items():
        rows = (array[bounds[start] : bounds[stop]] for _, start, stop in _groups(0, parties, parties))
        group_checksums.append(write_array(folder / f"{stem}.npy", _BY_PARTY[stem], array.shape, rows))
    whole["checksums"] = np.array(group_checksums).T
    checksums = {}
    for stem, dtype in _WHOLE.items():
        array = np.ascontiguousarray(whole[stem], dtype=dtype)
        (checksums[stem],) = write_array(folder / f"{stem}.npy", dtype, array.shape, [array])
    return {
        "parties": parties,
        "num_items": num_items,
        "scale": data.scale,
        "evaluate_on": evaluate_on,
        "edges": shares.edges,
        "optimum_rmse": shares.optimum_rmse,
        "rescued": shares.rescued,
        "item_feature_names": data.item_features.names,
        "user_feature_names": data.user_features.names,
        "checksums": checksums,
    }
