"""Prepared data: what goes in comes out, it is written once, and no damaged file is served."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import fedmpi
from fedmpi.data.images import catalog, store
from fedmpi.data.images import spec as specs
from fedmpi.data.images.source import ImageSet, Source
from fedmpi.data.images.spec import PartitionSpec
from fedmpi.data.images.store import Store
from fedmpi.data.prepared import prepare
from fedmpi.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

STEMS = ("train_x", "train_y", "test_x", "test_y")


def toy_loader(with_test: bool, per_class: int = 60):
    """Every image carries its own number, so that a shard shows which samples it holds."""

    def make(count: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.arange(first, first + count)
        x = np.stack([ids >> 8, ids & 255], axis=1).astype(np.uint8).reshape(count, 2, 1, 1)
        return x, (ids % 5).astype(np.int64)

    def load(source: Source, data_dir: str | None) -> ImageSet:
        x, y = make(5 * per_class, 0)
        test = make(5 * per_class // 4, 10_000) if with_test else (None, None)
        return ImageSet(source.name, x, y, *test, 5)

    return load


def ids(x: np.ndarray) -> np.ndarray:
    return x[:, 0, 0, 0].astype(int) * 256 + x[:, 1, 0, 0]


@pytest.fixture
def toy(monkeypatch):
    """Two small data sets in the catalog: `toy` has an official test split, `toy-one` has none."""
    for name, with_test in (("toy", True), ("toy-one", False)):
        source = Source(name, (2, 1, 1), 5, with_test, "none", "made up", (), toy_loader(with_test))
        monkeypatch.setitem(catalog._BY_NAME, name, source)


@pytest.fixture
def prepared(toy, tmp_path) -> Path:
    return prepare(PartitionSpec(dataset="toy", parties=6), tmp_path / "root")


def shards(folder: Path) -> list[store.Shard]:
    opened = Store.open(folder)
    return [opened.shard(party) for party in range(opened.parties)]


def refused(folder: Path, party: int | None = None) -> str:
    """The message with which the folder, or one party's shard, is refused."""
    with pytest.raises(DataError) as caught:
        opened = Store.open(folder)
        if party is not None:
            opened.shard(party)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- what goes in comes out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["toy", "toy-one"])
@pytest.mark.parametrize("scheme", ["classes", "dirichlet"])
@pytest.mark.parametrize("cap", [0, 20])
def test_round_trip(dataset, scheme, cap, toy, tmp_path):
    spec = PartitionSpec(
        dataset=dataset, parties=4, scheme=scheme, classes_per_party=3, alpha=1.0, samples_per_party=cap
    )
    folder = prepare(spec, tmp_path)
    opened = Store.open(folder)
    data = catalog.get(dataset).load(None)
    assert opened.parties == 4 and opened.dataset == dataset and opened.num_classes == 5
    assert opened.image_shape == (2, 1, 1)
    labels = dict(zip(ids(data.train_x), data.train_y))
    if data.test_x is not None:
        labels.update(zip(ids(data.test_x), data.test_y))
    seen: list[int] = []
    for party in range(4):
        shard = opened.shard(party)
        train, test = ids(shard.train_x), ids(shard.test_x)
        assert shard.train_x.dtype == np.uint8 and shard.train_y.dtype == np.int64
        assert [labels[i] for i in train] == shard.train_y.tolist()
        assert [labels[i] for i in test] == shard.test_y.tolist()
        assert tuple(np.unique(shard.train_y)) == shard.classes == opened.classes[party]
        assert 0 < len(test) and set(shard.test_y) <= set(shard.classes)
        assert scheme == "dirichlet" or (len(shard.classes) == 3 and set(shard.test_y) == set(shard.classes))
        assert not cap or len(train) <= cap
        if data.test_x is not None:
            assert max(train) < 10_000 <= min(test)
        assert not shard.train_x.flags.writeable
        seen += [*train, *test]
    assert len(seen) == len(set(seen)), "a sample is in two places"
    if not cap:
        assert len(seen) == len(labels), "a sample was lost"


def test_normalisation_is_that_of_the_whole_training_set(toy, tmp_path):
    for cap in (0, 4):
        opened = Store.open(prepare(PartitionSpec(dataset="toy", parties=6, samples_per_party=cap), tmp_path))
        pixels = catalog.get("toy").load(None).train_x / 255
        assert np.allclose(opened.mean, pixels.mean(axis=(0, 2, 3)))
        assert np.allclose(opened.std, pixels.std(axis=(0, 2, 3)))


def test_held_out_samples_do_not_enter_the_normalisation(toy, tmp_path):
    folder = prepare(PartitionSpec(dataset="toy-one", parties=2, classes_per_party=5), tmp_path)
    train = np.concatenate([shard.train_x for shard in shards(folder)]) / 255
    assert np.allclose(Store.open(folder).mean, train.mean(axis=(0, 2, 3)))


def test_a_constant_channel_is_not_scaled():
    assert store._channel_statistics(np.zeros((3, 1, 2, 2), dtype=np.uint8)) == ([0.0], [1.0])


def test_cap_thins_training_and_test_in_proportion(toy, tmp_path):
    spec = PartitionSpec(dataset="toy", parties=2, classes_per_party=5)
    full = shards(prepare(spec, tmp_path))
    capped = shards(prepare(dataclasses.replace(spec, samples_per_party=75), tmp_path))
    for before, after in zip(full, capped):
        assert len(before.train_y) == 150 and len(after.train_y) == 75
        assert abs(len(after.test_y) - len(before.test_y) / 2) <= 1
        assert np.bincount(after.train_y).tolist() == [15] * 5
        assert set(ids(after.train_x)) < set(ids(before.train_x))


@pytest.mark.parametrize("cap", [0, 75])
def test_test_samples_have_a_cap_of_their_own(cap, toy, tmp_path):
    spec = PartitionSpec(dataset="toy", parties=2, classes_per_party=5, samples_per_party=cap)
    full = shards(prepare(dataclasses.replace(spec, samples_per_party=0), tmp_path))
    for wanted in (10, 10_000):
        capped = shards(prepare(dataclasses.replace(spec, test_samples_per_party=wanted), tmp_path))
        for before, after in zip(full, capped):
            assert len(after.train_y) == (cap or len(before.train_y)), "training samples are not its business"
            assert len(after.test_y) == min(wanted, len(before.test_y)), "not in proportion any more"
            assert set(after.test_y) == set(before.test_y) and set(ids(after.test_x)) <= set(ids(before.test_x))


def test_a_cap_below_the_number_of_classes_does_not_test_what_it_dropped(toy, tmp_path):
    spec = PartitionSpec(dataset="toy", parties=2, scheme="dirichlet", alpha=100, samples_per_party=2)
    for shard in shards(prepare(spec, tmp_path)):
        assert len(shard.train_y) == 2 and len(shard.test_y) and set(shard.test_y) <= set(shard.train_y)


def test_digits_hold_out_by_class(tmp_path):
    pytest.importorskip("sklearn")
    folder = prepare(PartitionSpec(dataset="digits", parties=5, classes_per_party=4, test_fraction=0.25), tmp_path)
    opened = Store.open(folder)
    assert opened.image_shape == (1, 8, 8)
    for shard in shards(folder):
        for c in shard.classes:
            train, test = np.count_nonzero(shard.train_y == c), np.count_nonzero(shard.test_y == c)
            assert abs(test - 0.25 * (train + test)) <= 0.5
    assert opened.train_offsets[-1] + opened.test_offsets[-1] == 1797


# --- written once ----------------------------------------------------------------------------------------------------


def test_same_settings_same_bytes_other_seed_other_samples(toy, tmp_path):
    spec = PartitionSpec(dataset="toy", parties=6)
    first, second = prepare(spec, tmp_path / "a"), prepare(spec, tmp_path / "b")
    assert first.name == second.name
    for stem in STEMS:
        assert (first / f"{stem}.npy").read_bytes() == (second / f"{stem}.npy").read_bytes()
    other = prepare(dataclasses.replace(spec, seed=1), tmp_path / "a")
    assert other != first
    assert (other / "train_x.npy").read_bytes() != (first / "train_x.npy").read_bytes()


def test_settings_without_effect_share_a_folder(toy, tmp_path):
    spec = PartitionSpec(dataset="toy", parties=6)
    folder = prepare(spec, tmp_path)
    assert prepare(dataclasses.replace(spec, alpha=3.0, test_fraction=0.4), tmp_path) == folder
    assert prepare(dataclasses.replace(spec, classes_per_party=3), tmp_path) != folder
    assert prepare(dataclasses.replace(spec, samples_per_party=7), tmp_path) != folder


def test_second_prepare_neither_imports_nor_rewrites(tmp_path):
    pytest.importorskip("sklearn")
    code = (
        "import sys, fedmpi.data.images.spec as s, fedmpi.data.prepared as p\n"
        "spec = s.PartitionSpec(dataset='digits', parties=5)\n"
        "spec.open(p.prepare(spec, sys.argv[1])).shard(0)\n"
        "print([m for m in ('sklearn', 'torch', 'torchvision') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(fedmpi.__file__).parents[1])}

    def run() -> tuple[str, dict[str, tuple[int, int]]]:
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        stats = {str(path): path.stat() for path in tmp_path.rglob("*")}
        return done.stdout.strip(), {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}

    first, second = run(), run()
    assert first[0] == "['sklearn']" and second[0] == "[]"
    assert first[1] == second[1] and len(first[1]) == 6


def test_replaced_files_are_prepared_anew_and_moved_ones_are_not(toy, tmp_path, monkeypatch):
    loads = []

    def load(source: Source, data_dir: str | None) -> ImageSet:
        loads.append(data_dir)
        return toy_loader(True)(source, data_dir)

    source = dataclasses.replace(catalog.get("toy"), layouts=(("official/batch",),), loader=load)
    monkeypatch.setitem(catalog._BY_NAME, "toy", source)
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "official").mkdir(parents=True)
    (here / "official" / "batch").write_bytes(b"one")
    spec = PartitionSpec(dataset="toy", parties=6, data_dir=str(here))
    folder = prepare(spec, tmp_path / "root")
    # copied elsewhere with its times, the file is the same
    shutil.copytree(here, there)
    assert prepare(dataclasses.replace(spec, data_dir=str(there)), tmp_path / "root") == folder
    assert loads == [str(here)]
    # of the same size but newer, or of another size but with the old time, it is not
    time = (here / "official" / "batch").stat().st_mtime_ns
    (here / "official" / "batch").write_bytes(b"two")
    os.utime(here / "official" / "batch", ns=(time, time + 1_000_000_000))
    newer = prepare(spec, tmp_path / "root")
    (here / "official" / "batch").write_bytes(b"three")
    os.utime(here / "official" / "batch", ns=(time, time))
    assert len({folder, newer, prepare(spec, tmp_path / "root")}) == 3 == len(loads)
    (here / "official" / "batch").unlink()
    with pytest.raises(DataError, match="batch is missing; expected in .*: made up$"):
        prepare(spec, tmp_path / "root")


def test_concurrent_prepares_end_with_one_good_folder(tmp_path):
    pytest.importorskip("sklearn")
    spec = PartitionSpec(dataset="digits", parties=5)
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        folders = {task.result() for task in [pool.submit(prepare, spec, tmp_path) for _ in range(3)]}
    (folder,) = folders
    assert list(tmp_path.iterdir()) == [folder]
    assert len(shards(folder)) == 5


def test_the_loser_of_a_race_uses_the_winner(toy, tmp_path, monkeypatch):
    spec, deal = PartitionSpec(dataset="toy", parties=6), specs.deal

    def slow_deal(*arguments):
        # while this process deals, another one finishes
        monkeypatch.setattr(specs, "deal", deal)
        slow_deal.winner = prepare(spec, tmp_path)
        slow_deal.inode = slow_deal.winner.stat().st_ino
        return deal(*arguments)

    monkeypatch.setattr(specs, "deal", slow_deal)
    folder = prepare(spec, tmp_path)
    assert folder == slow_deal.winner and folder.stat().st_ino == slow_deal.inode
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failed_write_leaves_nothing_behind(toy, tmp_path, monkeypatch):
    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_array", full_disk)
    with pytest.raises(DataError, match="^toy cannot be prepared under .*No space left on device$"):
        prepare(PartitionSpec(dataset="toy", parties=6), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_root_that_is_a_file(toy, tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(DataError, match="^toy cannot be prepared under "):
        prepare(PartitionSpec(dataset="toy", parties=6), tmp_path / "root")


# --- damaged folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_truncated_array(stem, length, prepared):
    file = prepared / f"{stem}.npy"
    file.write_bytes(file.read_bytes()[:length])
    message = refused(prepared)
    assert str(file) in message and f"delete the folder {prepared}" in message


@pytest.mark.parametrize("stem", STEMS)
def test_flipped_byte_is_seen_by_the_party_that_it_hits(stem, prepared):
    opened = Store.open(prepared)
    file = prepared / f"{stem}.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x10  # the last party's
    file.write_bytes(content)
    message = refused(prepared, party=5)
    assert str(file) in message and "party 5" in message and f"delete the folder {prepared}" in message
    opened.shard(4)


def test_array_cut_short_after_it_was_opened(prepared):
    opened = Store.open(prepared)
    os.truncate(prepared / "train_x.npy", 300)
    with pytest.raises(DataError, match="train_x.npy cannot be used"):
        opened.shard(0)


def test_any_damage_to_a_header_is_refused_or_harmless(prepared):
    file = prepared / "train_x.npy"
    content = file.read_bytes()
    before = shards(prepared)[0].train_x
    for position in range(128):
        for mask in (0x01, 0x80):
            damaged = bytearray(content)
            damaged[position] ^= mask
            file.write_bytes(damaged)
            try:
                assert np.array_equal(Store.open(prepared).shard(0).train_x, before)
            except DataError as error:
                assert str(file) in str(error) and "\n" not in str(error)


def test_any_damage_to_the_description_is_refused_or_harmless(prepared):
    file = prepared / "meta.json"
    content = file.read_bytes()
    before = Store.open(prepared)
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0x01
        file.write_bytes(damaged)
        try:
            assert Store.open(prepared) == before
        except DataError as error:
            assert str(file) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format": 0}'])
def test_bad_meta(content, prepared):
    (prepared / "meta.json").write_bytes(content)
    message = refused(prepared)
    assert str(prepared / "meta.json") in message and f"delete the folder {prepared}" in message
    with pytest.raises(DataError):
        prepare(PartitionSpec(dataset="toy", parties=6), prepared.parent)


def test_edited_meta(prepared):
    file = prepared / "meta.json"
    meta = json.loads(file.read_text())
    meta["mean"][0] += 1
    file.write_text(json.dumps(meta))
    assert "wrong checksum" in refused(prepared)


@pytest.mark.parametrize("array", [np.zeros((3, 2, 1, 1), np.uint8), np.zeros((300, 2, 1, 1), np.float32)])
def test_array_of_another_shape_or_type(array, prepared):
    np.save(prepared / "train_x.npy", array)
    assert "expected uint8 of (300, 2, 1, 1)" in refused(prepared)


@pytest.mark.parametrize("name", ["meta.json", *(f"{stem}.npy" for stem in STEMS)])
def test_missing_file(name, prepared):
    (prepared / name).unlink()
    assert str(prepared / name) in refused(prepared)


def test_missing_folder(tmp_path):
    assert refused(tmp_path / "nothing") == f"{tmp_path / 'nothing'} is not a folder of prepared data: prepare it first"


@pytest.mark.parametrize("party", [-1, 6])
def test_party_that_is_not_there(party, prepared):
    assert refused(prepared, party) == f"party {party}: {prepared} holds parties 0 to 5"


def test_too_many_parties_for_the_data(toy, tmp_path):
    with pytest.raises(DataError, match="^class 0 has 15 samples for 40 parties: use fewer parties"):
        prepare(PartitionSpec(dataset="toy", parties=100), tmp_path)
    # 60 samples of each class for 60 holders: one for training, none to test
    with pytest.raises(DataError, match="^party 0 of 300 would have 1 training and 0 test samples of toy-one: use"):
        prepare(PartitionSpec(dataset="toy-one", parties=300, classes_per_party=1), tmp_path)
    with pytest.raises(DataError, match="^300 samples cannot give 60 parties 10 each: use at most 30 parties$"):
        prepare(PartitionSpec(dataset="toy", parties=60, scheme="dirichlet"), tmp_path)
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


def test_many_threads_may_open_a_store_at_once(tmp_path):
    folder = prepare(PartitionSpec(dataset="digits", parties=4, classes_per_party=2), tmp_path)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: Store.open(folder), range(200)))
    assert all(store == stores[0] for store in stores)


# --- parties that draw for themselves --------------------------------------------------------------------------------


def drawn(tmp_path, **settings):
    settings = {"dataset": "digits", "scheme": "drawn", "samples_per_party": 12} | settings
    return Store.open(prepare(PartitionSpec(**settings), tmp_path))


def test_more_parties_than_the_samples_would_go_round(tmp_path):
    """300 parties of 12 samples from 1,437: nobody is tested on what anybody trains on, and no party has a sample twice."""
    store = drawn(tmp_path, parties=300, classes_per_party=5, test_samples_per_party=20)
    trained, tested = set(), set()
    for party in range(300):
        shard = store.shard(party)
        own = [x.tobytes() for x in shard.train_x]
        assert len(own) == 12 and len(shard.test_y) == 20 and len(shard.classes) == 5
        assert sorted(np.bincount(shard.train_y)[list(shard.classes)]) == [2, 2, 2, 3, 3]
        assert set(shard.test_y) <= set(shard.classes)
        trained.update(own)
        tested.update(x.tobytes() for x in shard.test_x)
    assert len(trained) < 1500 < 300 * 12, "parties share samples"
    assert not trained & tested
    assert drawn(tmp_path, parties=300, classes_per_party=5, test_samples_per_party=20).fingerprint == store.fingerprint


def test_a_draw_needs_a_number_of_samples():
    with pytest.raises(ConfigError, match="partition = drawn: needs samples_per_party"):
        PartitionSpec(dataset="digits", parties=3, scheme="drawn")


# --- validation in place of the test ---------------------------------------------------------------------------------

VALIDATED = [
    dict(scheme="classes", parties=4, classes_per_party=3),
    dict(scheme="classes", parties=4, classes_per_party=3, samples_per_party=20),
    dict(scheme="dirichlet", parties=3, alpha=1.0),
    dict(scheme="drawn", parties=40, classes_per_party=4, samples_per_party=12),
]


def sides(folder: Path) -> tuple[set[int], set[int]]:
    """The samples that any party trains on, and those that any is evaluated on."""
    held = shards(folder)
    return tuple({int(i) for shard in held for i in ids(getattr(shard, f"{side}_x"))} for side in ("train", "test"))


@pytest.mark.parametrize("dataset", ["toy", "toy-one"])
@pytest.mark.parametrize("settings", VALIDATED, ids=lambda settings: "-".join(map(str, settings.values())))
def test_with_validation_no_test_sample_is_in_any_file_and_nobody_trains_on_what_anybody_is_evaluated_on(
    dataset, settings, toy, tmp_path
):
    spec = PartitionSpec(dataset=dataset, test_samples_per_party=1000, **settings)  # all the samples that there are
    _, tested = sides(prepare(spec, tmp_path))
    tuned = prepare(dataclasses.replace(spec, validation_fraction=0.25), tmp_path)
    trained, validated = sides(tuned)
    assert validated and not trained & validated
    assert not tested & (trained | validated), "a test sample is where settings are chosen"
    assert not any(set(shard.test_y) - set(shard.classes) for shard in shards(tuned))
    assert max(trained | validated) < 10_000, "from the training samples alone"


def test_the_cap_on_training_samples_holds_beside_validation(toy, tmp_path):
    """What is held out is held out before the cap, so that settings are chosen with as many samples as they will have."""
    for settings in VALIDATED[1], VALIDATED[3]:
        plain, tuned = (
            shards(prepare(PartitionSpec(dataset="toy", validation_fraction=share, **settings), tmp_path))
            for share in (0.0, 0.25)
        )
        assert [len(shard.train_y) for shard in plain] == [len(shard.train_y) for shard in tuned]


def test_validation_samples_do_not_enter_the_normalisation(toy, tmp_path):
    for dataset in ("toy", "toy-one"):
        spec = PartitionSpec(dataset=dataset, parties=2, classes_per_party=5, validation_fraction=0.3)
        folder = prepare(spec, tmp_path)
        train = np.concatenate([shard.train_x for shard in shards(folder)]) / 255
        assert np.allclose(Store.open(folder).mean, train.mean(axis=(0, 2, 3)))


def test_no_validation_leaves_the_folders_that_were_prepared_before(tmp_path):
    """Names and checksums of the version that had no validation samples."""
    before = {
        "digits-b63b3bfa18cd": (3164358669, dict(scheme="classes", parties=20, classes_per_party=5)),
        "digits-38ee480992a1": (
            2107011566,
            dict(scheme="drawn", parties=200, classes_per_party=10, samples_per_party=20),
        ),
    }
    for name, (fingerprint, settings) in before.items():
        folder = prepare(PartitionSpec(dataset="digits", seed=3, validation_fraction=0, **settings), tmp_path)
        assert folder.name == name and Store.open(folder).fingerprint == fingerprint


def test_a_party_without_a_validation_sample_is_named(toy, tmp_path):
    """A class with one sample of a party has none to spare."""
    spec = PartitionSpec(dataset="toy-one", parties=30, classes_per_party=5, validation_fraction=0.2)
    with pytest.raises(DataError, match="party 0 of 30 would have 5 training and 0 validation samples of toy-one: use"):
        prepare(spec, tmp_path)
