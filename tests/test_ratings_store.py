"""Prepared ratings: what goes in comes out, it is written once, and no damaged file is served."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from rating_files import FOLDERS, RATINGS, real_data, write_archive, write_files

import fedmpi
from fedmpi.data.prepared import prepare
from fedmpi.data.ratings import spec as specs
from fedmpi.data.ratings import store as stores
from fedmpi.data.ratings.catalog import RATING_SETS
from fedmpi.data.ratings.spec import RatingSpec, deal
from fedmpi.data.ratings.store import RatingStore
from fedmpi.errors import DataError

pytestmark = pytest.mark.slow

SPEC = RatingSpec(dataset="generated", parties=150, items=40, ratings=2_000)
RATING_STEMS = ("train_items", "train_values", "test_items", "test_values")
BY_PARTY = (*RATING_STEMS, "user_features")
WHOLE = ("train_offsets", "test_offsets", "item_features", "rater_counts", "user_ids", "item_ids", "checksums")


@pytest.fixture
def prepared(tmp_path) -> Path:
    return prepare(SPEC, tmp_path / "root")


def everything(store: RatingStore) -> None:
    store.block(0, store.parties)
    for stem in ("item_features", "rater_counts", "user_ids", "item_ids"):
        getattr(store, stem)


def refused(folder: Path, read=lambda store: None) -> str:
    with pytest.raises(DataError) as caught:
        read(RatingStore.open(folder))
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- what goes in comes out ------------------------------------------------------------------------------------------


def assert_holds(store: RatingStore, spec: RatingSpec) -> None:
    data = spec.load()
    shares = deal(spec, data)
    block = store.block(0, store.parties)
    for side, part in (("train", shares.train), ("test", shares.test)):
        for field in ("offsets", "items", "values"):
            got = getattr(block, f"{side}_{field}")
            assert np.array_equal(got, getattr(part, field)) and got.dtype == getattr(part, field).dtype
    assert np.array_equal(block.user_features, data.user_features.values[shares.users])
    assert np.array_equal(store.item_features, data.item_features.values)
    assert np.array_equal(store.rater_counts, np.bincount(shares.train.items, minlength=len(data.item_ids)))
    assert np.array_equal(store.user_ids, data.user_ids[shares.users]) and np.array_equal(store.item_ids, data.item_ids)
    assert (
        store.dataset == spec.dataset and store.parties == len(shares.users) and store.num_items == len(data.item_ids)
    )
    assert store.scale == data.scale and store.scale.step in (0.5, 1.0)
    assert store.edges == (None if shares.edges is None else tuple(shares.edges))
    assert store.optimum_rmse == shares.optimum_rmse and store.rescued == shares.rescued
    assert store.evaluate_on == spec.evaluate_on
    assert store.item_feature_names == data.item_features.names
    assert store.user_feature_names == data.user_features.names


@pytest.mark.parametrize("settings", [{}, dict(validation_fraction=0.1), dict(seed=4)])
def test_round_trip(settings, tmp_path):
    spec = dataclasses.replace(SPEC, **settings)
    store = RatingStore.open(prepare(spec, tmp_path))
    assert_holds(store, spec)
    assert (store.evaluate_on == "validation") == ("validation_fraction" in settings)


@pytest.mark.parametrize("name", sorted(FOLDERS))
@pytest.mark.parametrize("settings", [{}, dict(parties=5), dict(tag_components=0)])
def test_round_trip_of_files(name, settings, tmp_path):
    write_files(name, tmp_path)
    spec = RatingSpec(dataset=name, data_dir=str(tmp_path), **settings)
    assert_holds(RatingStore.open(prepare(spec, tmp_path / "root")), spec)


@pytest.mark.parametrize("first, last", [(0, 1), (63, 65), (64, 128), (10, 140), (149, 150), (0, 150)])
def test_a_block_is_what_its_parties_hold(first, last, prepared):
    store = RatingStore.open(prepared)
    block = store.block(first, last)
    assert (block.first, block.last, block.parties) == (first, last, last - first)
    assert block.train_offsets[0] == block.test_offsets[0] == 0
    for party in range(first, last):
        alone = store.party(party)
        for side in ("train", "test"):
            offsets = getattr(block, f"{side}_offsets")
            here = slice(offsets[party - first], offsets[party - first + 1])
            for field in ("items", "values"):
                assert np.array_equal(getattr(block, f"{side}_{field}")[here], getattr(alone, f"{side}_{field}"))
            items = getattr(alone, f"{side}_items")
            assert (np.diff(items) > 0).all()
        assert len(alone.train_items) >= 1
        assert np.array_equal(block.user_features[party - first], alone.user_features[0])
    assert not block.train_values.flags.writeable and not store.item_features.flags.writeable


@pytest.mark.parametrize("first, last", [(-1, 2), (0, 151), (5, 5), (6, 5), (150, 151)])
def test_parties_that_are_not_there(first, last, prepared):
    message = refused(prepared, lambda store: store.block(first, last))
    assert message.endswith(f": {prepared} holds parties 0 to 149")


def test_sets_that_there_are():
    assert RATING_SETS == ("generated", "lastfm", "ml-100k", "ml-10m", "ml-1m")


# --- written once ----------------------------------------------------------------------------------------------------


def test_same_settings_same_bytes_other_seed_other_fingerprint(tmp_path):
    first, second = prepare(SPEC, tmp_path / "a"), prepare(SPEC, tmp_path / "b")
    assert first.name == second.name
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(["meta.json", *(f"{stem}.npy" for stem in (*WHOLE, *BY_PARTY))])
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    other = prepare(dataclasses.replace(SPEC, seed=1), tmp_path / "a")
    prints = [RatingStore.open(folder).fingerprint for folder in (first, second, other)]
    assert prints[0] == prints[1] != prints[2]


def test_the_same_data_has_the_same_fingerprint_wherever_it_came_from(tmp_path):
    write_files("ml-10m", tmp_path / "files")
    archive = write_archive("ml-10m", tmp_path / "zip")
    specs = [RatingSpec(dataset="ml-10m", data_dir=str(place)) for place in (tmp_path / "files", archive)]
    specs.append(RatingSpec(dataset="ml-10m", data_dir=str(archive), parties=12))
    folders = [prepare(spec, tmp_path / "root") for spec in specs]
    assert len(set(folders)) == 3
    assert len({RatingStore.open(folder).fingerprint for folder in folders}) == 1


def test_second_prepare_neither_imports_nor_rewrites(tmp_path):
    write_files("lastfm", tmp_path / "data")
    code = (
        "import sys, fedmpi.data.ratings.spec as s, fedmpi.data.prepared as p\n"
        "spec = s.RatingSpec(dataset='lastfm', data_dir=sys.argv[2])\n"
        "spec.open(p.prepare(spec, sys.argv[1])).block(0, 5)\n"
        "print([m for m in ('sklearn', 'scipy', 'torch') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(fedmpi.__file__).parents[1])}

    def run() -> tuple[str, dict[str, tuple[int, int]]]:
        command = [sys.executable, "-c", code, str(tmp_path / "root"), str(tmp_path / "data")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        stats = {str(path): path.stat() for path in (tmp_path / "root").rglob("*")}
        return done.stdout.strip(), {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}

    first, second = run(), run()
    assert first[0] == "['sklearn', 'scipy']" and second[0] == "[]"
    assert first[1] == second[1] and len(first[1]) == 1 + 1 + len(WHOLE) + len(BY_PARTY)


@pytest.mark.parametrize("packed", [False, True])
def test_replaced_files_are_prepared_anew_and_moved_ones_are_not(packed, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    if packed:
        file = write_archive("ml-100k", here)
    else:
        file = write_files("ml-100k", here) / RATINGS["ml-100k"]
    spec = RatingSpec(dataset="ml-100k", data_dir=str(here))
    folder = prepare(spec, tmp_path / "root")
    shutil.copytree(here, there)
    assert prepare(dataclasses.replace(spec, data_dir=str(there)), tmp_path / "root") == folder
    time = file.stat().st_mtime_ns + 1_000_000_000
    os.utime(file, ns=(time, time))
    assert prepare(spec, tmp_path / "root") != folder


def test_concurrent_prepares_end_with_one_good_folder(tmp_path):
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        folders = {task.result() for task in [pool.submit(prepare, SPEC, tmp_path) for _ in range(3)]}
    (folder,) = folders
    assert list(tmp_path.iterdir()) == [folder]
    everything(RatingStore.open(folder))


def test_the_loser_of_a_race_uses_the_winner(tmp_path, monkeypatch):
    def slow_deal(*arguments):
        # while this process deals, another one finishes
        monkeypatch.setattr(specs, "deal", deal)
        slow_deal.inode = prepare(SPEC, tmp_path).stat().st_ino
        return deal(*arguments)

    monkeypatch.setattr(specs, "deal", slow_deal)
    folder = prepare(SPEC, tmp_path)
    assert folder.stat().st_ino == slow_deal.inode and list(tmp_path.iterdir()) == [folder]


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stores, "write_array", full_disk)
    with pytest.raises(DataError, match="^generated cannot be prepared under .*No space left on device$"):
        prepare(SPEC, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_many_threads_may_open_a_store_at_once(prepared):
    with ThreadPoolExecutor(8) as pool:
        blocks = list(pool.map(lambda _: RatingStore.open(prepared).block(3, 9), range(100)))
    assert all(np.array_equal(block.train_items, blocks[0].train_items) for block in blocks)


# --- damaged folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", (*WHOLE, *BY_PARTY))
@pytest.mark.parametrize("length", [0, 100, -1])
def test_truncated_array(stem, length, prepared):
    file = prepared / f"{stem}.npy"
    file.write_bytes(file.read_bytes()[:length])
    message = refused(prepared)
    assert str(file) in message and f"delete the folder {prepared}" in message


@pytest.mark.parametrize("stem", BY_PARTY)
def test_flipped_byte_is_seen_by_the_parties_that_it_hits(stem, prepared):
    file = prepared / f"{stem}.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x10  # the last party's
    file.write_bytes(content)
    store = RatingStore.open(prepared)
    store.block(0, 128)
    message = refused(prepared, lambda store: store.party(128))
    assert message.startswith(f"{file} cannot be used (wrong checksum of parties 128 to 149): delete the folder")


@pytest.mark.parametrize("stem", WHOLE)
def test_flipped_byte_of_a_small_array(stem, prepared):
    file = prepared / f"{stem}.npy"
    content = bytearray(file.read_bytes())
    content[130] ^= 0x01
    file.write_bytes(content)
    assert refused(prepared, everything).startswith(f"{file} cannot be used (wrong checksum): delete the folder")


def test_array_cut_short_after_it_was_opened(prepared):
    store = RatingStore.open(prepared)
    os.truncate(prepared / "train_items.npy", 300)
    with pytest.raises(DataError, match="train_items.npy cannot be used"):
        store.block(0, 10)


def test_any_damage_to_the_description_is_refused_or_harmless(prepared):
    file = prepared / "meta.json"
    content = file.read_bytes()
    before = dataclasses.asdict(RatingStore.open(prepared))
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0x01
        file.write_bytes(damaged)
        try:
            assert dataclasses.asdict(RatingStore.open(prepared)) == before
        except DataError as error:
            assert str(file) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 0}'])
def test_bad_meta(content, prepared):
    (prepared / "meta.json").write_bytes(content)
    assert str(prepared / "meta.json") in refused(prepared)
    with pytest.raises(DataError):
        prepare(SPEC, prepared.parent)


def test_edited_meta(prepared):
    meta = json.loads((prepared / "meta.json").read_text())
    meta["optimum_rmse"] = 0.1
    (prepared / "meta.json").write_text(json.dumps(meta))
    assert "wrong checksum" in refused(prepared)


@pytest.mark.parametrize("name", ["meta.json", *(f"{stem}.npy" for stem in (*WHOLE, *BY_PARTY))])
def test_missing_file(name, prepared):
    (prepared / name).unlink()
    assert str(prepared / name) in refused(prepared)


def test_missing_folder(tmp_path):
    assert refused(tmp_path / "nothing") == f"{tmp_path / 'nothing'} is not a folder of prepared data: prepare it first"


# --- the official files ----------------------------------------------------------------------------------------------


def test_the_real_ml_100k(tmp_path):
    spec = RatingSpec(dataset="ml-100k", data_dir=real_data("ml-100k"))
    store = RatingStore.open(prepare(spec, tmp_path))
    block = store.block(0, 943)
    assert (store.parties, store.num_items, len(block.train_items), len(block.test_items)) == (
        943,
        1_682,
        80_000,
        20_000,
    )
    assert store.rater_counts.sum() == 80_000 and store.rescued == 0
    assert store.edges is None and store.optimum_rmse is None and store.scale == (1, 5, 1)
