"""FEMNIST in one npz file, and the partition by writer."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.data.images import catalog, partition
from fedmpi.data.images.spec import PartitionSpec
from fedmpi.data.images.store import Store
from fedmpi.data.prepared import prepare
from fedmpi.errors import ConfigError, DataError

FILE = "femnist-leaf-subset.npz"
REAL = os.environ.get("FEDMPI_TEST_DATA", "")


def arrays(writers: int = 6, each: int = 20) -> dict[str, np.ndarray]:
    """Every writer has training samples; the first has no test samples, and someone else has only those."""
    rng = np.random.default_rng(0)
    made = {}
    for part, per_writer, names in (
        ("train", each, range(writers)),
        ("test", each // 4, [*range(1, writers), 99]),
    ):
        u = rng.permutation(np.repeat([f"w{name:02}" for name in names], per_writer))
        made[f"{part}_x"] = rng.integers(0, 256, (len(u), 784), dtype=np.uint8)
        made[f"{part}_y"] = (np.arange(len(u)) % 62).astype(np.uint8)
        made[f"{part}_u"] = u
    return made


def write(folder: Path, **changes) -> Path:
    content = {name: array for name, array in {**arrays(), **changes}.items() if array is not None}
    np.savez_compressed(folder / FILE, **content)
    return folder / FILE


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        catalog.get("femnist").load(str(folder))
    message = str(caught.value)
    assert message.startswith("femnist: ") and str(folder / FILE) in message and "\n" not in message
    return message


def spec(folder: Path, parties: int, **rest) -> PartitionSpec:
    return PartitionSpec(
        **{"dataset": "femnist", "data_dir": str(folder), "parties": parties, "scheme": "writers"} | rest
    )


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("square", [False, True])
def test_reads_the_arrays_and_who_wrote_them(square, tmp_path):
    made = arrays()
    shape = (-1, 28, 28) if square else (-1, 784)
    write(tmp_path, train_x=made["train_x"].reshape(shape), test_x=made["test_x"].reshape(shape))
    data = catalog.get("femnist").load(str(tmp_path))
    for part in ("train", "test"):
        assert np.array_equal(getattr(data, f"{part}_x"), made[f"{part}_x"].reshape(-1, 1, 28, 28))
        assert np.array_equal(getattr(data, f"{part}_y"), made[f"{part}_y"])
        assert np.array_equal(getattr(data, f"{part}_writers"), made[f"{part}_u"])
    assert data.num_classes == 62 and data.train_y.dtype == np.int64


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"test_u": None}, "has no array test_u, expected test_x, test_y, test_u"),
        (
            {"train_x": np.zeros((120, 100), np.uint8)},
            "holds uint8 images of shape (120, 100) and 120 labels, expected",
        ),
        ({"train_x": np.zeros((120, 784), np.float32)}, "holds float32 images of shape (120, 1, 28, 28)"),
        ({"train_y": np.zeros(119, np.uint8)}, "119 labels, expected as many labels as uint8 images"),
        ({"train_y": np.zeros(120)}, "holds train_y of float64"),
        ({"test_y": np.full(30, 62, np.uint8)}, "test_x and test_y, has labels 62 to 62, expected 0 to 61"),
        ({"train_u": np.array(["a"] * 119)}, "and shape (119,), expected whole numbers and the writer of each of 120"),
        ({"train_u": np.array([None] * 120)}, "cannot be read (Object arrays cannot be loaded when allow_pickle=False"),
        ({"train_x": np.uint8(3)}, "holds a single value as train_x"),
    ],
)
def test_wrong_arrays_are_named(changes, said, tmp_path):
    write(tmp_path, **changes)
    assert said in refused(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "text", "npy", "cut", "flipped"])
def test_a_file_that_is_no_archive(damage, tmp_path):
    path = write(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "npy":
        with open(path, "wb") as stream:
            np.save(stream, np.zeros(3))
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    else:
        path.write_bytes({"empty": b"", "text": b"not here", "cut": bytes(content[:-100])}[damage])
    assert "cannot be read (" in refused(tmp_path)


def test_there_is_no_download(tmp_path):
    with pytest.raises(DataError, match=f"^femnist cannot be downloaded: give a folder that holds {FILE} as data_dir$"):
        catalog.get("femnist").load(None)


# --- a party is a writer ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.lists(st.integers(0, 12), min_size=1), st.data())
def test_every_party_has_all_samples_of_one_writer_and_no_others(train, test, data):
    train, test = np.array(train).astype(str), np.array(test).astype(str)
    able = sorted(set(train) & set(test))
    parties = data.draw(st.integers(1, len(able) + 1))
    rng = np.random.default_rng(0)
    if parties > len(able):
        with pytest.raises(DataError, match=f"^{len(able)} writers with training and test samples are too few for"):
            partition.choose_writers(train, test, parties, rng)
        return
    chosen = partition.choose_writers(train, test, parties, rng)
    assert len(set(chosen)) == parties and set(chosen) <= set(able) and list(chosen) == sorted(chosen)
    for writers in (train, test):
        parts = partition.split_by_writers(writers, chosen)
        assert [part.tolist() for part in parts] == [np.flatnonzero(writers == writer).tolist() for writer in chosen]


def test_prepared_by_writer(tmp_path):
    write(tmp_path)
    made = arrays()
    opened = Store.open(prepare(spec(tmp_path, 5), tmp_path / "prepared"))
    for party, writer in enumerate(["w01", "w02", "w03", "w04", "w05"]):
        shard = opened.shard(party)
        for part in ("train", "test"):
            of_writer = made[f"{part}_u"] == writer
            assert np.array_equal(getattr(shard, f"{part}_y"), made[f"{part}_y"][of_writer])
            assert np.array_equal(getattr(shard, f"{part}_x").reshape(-1, 784), made[f"{part}_x"][of_writer])
    with pytest.raises(DataError, match="^5 writers .* too few for 6 parties: use at most 5 parties$"):
        prepare(spec(tmp_path, 6), tmp_path / "prepared")


def test_the_seed_chooses_the_writers_and_other_settings_do_not_matter(tmp_path):
    write(tmp_path)
    folders = {prepare(spec(tmp_path, 2, seed=seed), tmp_path / "prepared") for seed in range(4)}
    assert len({(folder / "train_x.npy").read_bytes() for folder in folders}) > 1
    assert prepare(spec(tmp_path, 2, alpha=3.0, classes_per_party=7), tmp_path / "prepared") in folders


def test_a_cap_thins_a_writers_samples_and_leaves_it_some_to_test_on(tmp_path):
    write(tmp_path)
    opened = Store.open(prepare(spec(tmp_path, 5, samples_per_party=4), tmp_path / "prepared"))
    for party in range(5):
        shard = opened.shard(party)
        assert len(shard.train_y) == 4 and len(shard.test_y) >= 1


@pytest.mark.parametrize("scheme", ["classes", "dirichlet"])
def test_it_is_shared_out_as_any_other_data_set_too(scheme, tmp_path):
    made = arrays(each=200)
    write(tmp_path, **made)
    opened = Store.open(prepare(spec(tmp_path, 3, scheme=scheme, classes_per_party=40), tmp_path / "prepared"))
    assert opened.parties == 3 and opened.num_classes == 62


def test_writers_only_where_they_are_known():
    with pytest.raises(
        ConfigError, match="^partition = writers: cifar10 does not say who wrote what; only for femnist$"
    ):
        PartitionSpec(dataset="cifar10", parties=5, scheme="writers")


@pytest.mark.skipif(not REAL or not Path(REAL, FILE).is_file(), reason=f"FEDMPI_TEST_DATA names no folder with {FILE}")
def test_the_real_file(tmp_path):
    data = catalog.get("femnist").load(REAL)
    assert data.train_x.shape == (14_708, 1, 28, 28) and data.test_x.shape == (4_088, 1, 28, 28)
    assert len(np.unique(data.train_writers)) == 105 and len(np.unique(data.test_writers)) == 184
    assert np.median(data.train_x) == catalog.get("femnist").background
    opened = Store.open(prepare(spec(Path(REAL), 105), tmp_path))
    assert opened.train_offsets[-1] == 14_708
    with pytest.raises(DataError, match="use at most 105 parties$"):
        prepare(spec(Path(REAL), 106), tmp_path)
