"""Loaders, on small files in the official formats that the tests write themselves."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import subprocess
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest

import fedmpi
from fedmpi.data.images import catalog, cifar, libraries, source
from fedmpi.errors import ConfigError, DataError

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("torch") is None,
    reason="torchvision is not installed",
)
PER_BATCH = 20


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (*path, Path(fedmpi.__file__).parents[1]))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def one_line(caught: pytest.ExceptionInfo[Exception]) -> str:
    message = str(caught.value)
    assert message and "\n" not in message
    return message


# --- small official files --------------------------------------------------------------------------------------------


def write_cifar(folder: Path, reader: type, label_key: str, num_classes: int, monkeypatch, seed: int = 0) -> dict:
    """Pickles as published, with random pixels; torchvision's list of MD5s is set to theirs."""
    rng = np.random.default_rng(seed)
    base = folder / reader.base_folder
    base.mkdir(parents=True, exist_ok=True)

    def dump(name: str, content: dict) -> list[str]:
        data = pickle.dumps(content, protocol=2)
        (base / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    written: dict = {}
    for listing in ("train_list", "test_list"):
        entries, pixels, labels = [], [], []
        for name, _ in getattr(reader, listing):
            x = rng.integers(0, 256, size=(PER_BATCH, 3072), dtype=np.uint8)
            y = [i % num_classes for i in range(PER_BATCH)]
            entries.append(dump(name, {"data": x, label_key: y}))
            pixels.append(x)
            labels += y
        monkeypatch.setattr(reader, listing, entries)
        written[listing] = np.concatenate(pixels).reshape(-1, 3, 32, 32), np.array(labels)
    name, md5 = dump(reader.meta["filename"], {reader.meta["key"]: [f"class {i}" for i in range(num_classes)]})
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": md5})
    return written


def write_binary(folder: Path, name: str, monkeypatch, per_file: int = PER_BATCH) -> dict[str, tuple]:
    """Records as published, fewer of them: the fine label of CIFAR-100 has a coarse one before it."""
    monkeypatch.setattr(cifar, "RECORDS_OF_A_BATCH", per_file)
    monkeypatch.setattr(cifar, "RECORDS", dict.fromkeys(cifar.RECORDS, per_file))
    rng = np.random.default_rng(1)
    classes = catalog.get(name).num_classes
    written: dict[str, tuple] = {}
    for file in catalog.get(name).layouts[1]:
        x = rng.integers(0, 256, size=(per_file, 3072), dtype=np.uint8)
        y = rng.integers(0, classes, size=(per_file, 1), dtype=np.uint8)
        coarse = [] if classes == 10 else [rng.integers(0, 20, size=(per_file, 1), dtype=np.uint8)]
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(np.hstack([*coarse, y, x]).tobytes())
        written[Path(file).name] = x.reshape(-1, 3, 32, 32), y[:, 0]
    return written


@pytest.fixture
def datasets():
    return libraries.import_torchvision_datasets()


# --- the catalog -----------------------------------------------------------------------------------------------------


def test_catalog_lists_the_data_sets_with_terms_and_source():
    emnist = ["emnist", "emnist-byclass", "emnist-digits", "emnist-letters"]
    assert catalog.known() == ["cifar10", "cifar100", "digits", *emnist, "fashion-mnist", "femnist", "kmnist", "mnist"]
    for name in catalog.known():
        source = catalog.get(name)
        assert source.name == name and source.terms and source.how_to_get
        assert "\n" not in source.terms + source.how_to_get


@pytest.mark.parametrize("name", ["cifar", "", None, ["digits"]])
def test_unknown_data_set_is_told_of_images_and_ratings(name):
    listed = (
        r"must be one of cifar10, cifar100, digits, emnist, .*, mnist \(images\) or generated, .*, ml-1m \(ratings\)$"
    )
    with pytest.raises(ConfigError, match=listed):
        catalog.get(name)


def test_package_starts_without_heavy_imports():
    result = run_python(
        "import sys, fedmpi.data.images.spec, fedmpi.data.ratings.spec\n"
        "print([m for m in ('torch', 'torchvision', 'sklearn', 'scipy') if m in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr


# --- digits ----------------------------------------------------------------------------------------------------------


def test_digits():
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    data = catalog.get("digits").load(None)
    assert data.train_x.shape == (1797, 1, 8, 8) and data.train_x.dtype == np.uint8
    assert data.train_y.dtype == np.int64 and data.num_classes == 10
    assert data.test_x is None and data.test_y is None
    original = sklearn_datasets.load_digits().images
    assert data.train_x.max() == 255
    assert np.array_equal(np.rint(data.train_x[:, 0] / 255 * 16), original)


def test_scikit_learn_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        DataError, match=r"^scikit-learn is not installed; .*: pip install -c launch/constraints.txt -e \.$"
    ):
        catalog.get("digits").load(None)


# --- torchvision -----------------------------------------------------------------------------------------------------


def test_torchvision_not_installed_gets_the_command_that_keeps_torch(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        DataError, match=r"is not installed; .*: pip install -c launch/constraints.txt -e '\.\[images\]'$"
    ):
        libraries.import_torchvision_datasets()


def fake_torchvision(folder: Path, body: str) -> None:
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(body)
    (folder / "torchvision" / "datasets.py").write_text("here = True\n")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_missing_operator_is_declared_and_the_import_repeated(tmp_path):
    fake_torchvision(
        tmp_path,
        "import torch\n"
        "for name in ('nms', 'qnms'):\n"
        "    if not hasattr(torch.ops.torchvision, name):\n"
        "        raise RuntimeError(f'operator torchvision::{name} does not exist')\n",
    )
    result = run_python(
        "from fedmpi.data.images import libraries; import gc\n"
        "assert libraries.import_torchvision_datasets().here\n"
        "gc.collect(); import torch; print(torch.ops.torchvision.nms.default._schema)",
        tmp_path,
    )
    assert "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" in result.stdout, result.stderr


def test_any_other_failure_of_the_import_is_not_papered_over(tmp_path):
    fake_torchvision(tmp_path, "raise RuntimeError('built for\\nanother torch')\n")
    result = run_python(
        "from fedmpi.data.images import libraries; from fedmpi.errors import DataError\n"
        "try:\n    libraries.import_torchvision_datasets()\n"
        "except DataError as error:\n    print(error, libraries._defined_operators)",
        tmp_path,
    )
    expected = "torchvision cannot be imported (built for another torch): install the build that fits torch []"
    assert result.stdout.strip() == expected, result.stderr


# --- CIFAR -----------------------------------------------------------------------------------------------------------


@needs_torchvision
@pytest.mark.parametrize("name, label_key", [("cifar10", "labels"), ("cifar100", "fine_labels")])
def test_cifar_reads_the_published_layout(name, label_key, datasets, tmp_path, monkeypatch):
    source = catalog.get(name)
    reader = getattr(datasets, name.upper())
    written = write_cifar(tmp_path, reader, label_key, source.num_classes, monkeypatch)
    data = source.load(str(tmp_path))
    for x, y, listing in ((data.train_x, data.train_y, "train_list"), (data.test_x, data.test_y, "test_list")):
        assert np.array_equal(x, written[listing][0]) and x.dtype == np.uint8 and x.flags.c_contiguous
        assert np.array_equal(y, written[listing][1]) and y.dtype == np.int64
    assert data.num_classes == source.num_classes


@needs_torchvision
def test_the_catalog_names_the_files_that_torchvision_reads(datasets):
    for name in ("cifar10", "cifar100"):
        reader = getattr(datasets, name.upper())
        files = [entry[0] for entry in reader.train_list + reader.test_list] + [reader.meta["filename"]]
        assert catalog.get(name).layouts[0] == tuple(f"{reader.base_folder}/{file}" for file in files)


@needs_torchvision
@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_damaged_cifar_file_is_named(file, datasets, tmp_path, monkeypatch):
    write_cifar(tmp_path, datasets.CIFAR10, "labels", 10, monkeypatch)
    path = tmp_path / "cifar-10-batches-py" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        catalog.get("cifar10").load(str(tmp_path))
    assert one_line(caught).startswith(f"{path} is damaged: its MD5 is not the published ")


@needs_torchvision
def test_cifar_labels_out_of_range(datasets, tmp_path, monkeypatch):
    write_cifar(tmp_path, datasets.CIFAR10, "labels", 11, monkeypatch)
    with pytest.raises(DataError, match="has labels 0 to 10, expected 0 to 9$"):
        catalog.get("cifar10").load(str(tmp_path))


@needs_torchvision
def test_cifar_file_that_is_intact_but_not_cifar(datasets, tmp_path, monkeypatch):
    write_cifar(tmp_path, datasets.CIFAR10, "no such key", 10, monkeypatch)
    with pytest.raises(DataError, match="cifar-10-batches-py cannot be read"):
        catalog.get("cifar10").load(str(tmp_path))


@pytest.mark.parametrize("name", [name for name in catalog.known() if catalog.get(name).layouts])
def test_missing_files_are_named_with_where_to_get_them(name, tmp_path):
    source = catalog.get(name)
    with pytest.raises(DataError) as caught:
        source.load(str(tmp_path))
    message = one_line(caught)
    assert str(tmp_path / source.layouts[0][0]) in message
    assert f"expected in {tmp_path}" in message and source.how_to_get in message


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_reads_the_binary_distribution(name, tmp_path, monkeypatch):
    written = write_binary(tmp_path, name, monkeypatch)
    data = catalog.get(name).load(str(tmp_path))
    test = list(written)[-1]
    assert test.startswith("test")
    for x, y, files in ((data.train_x, data.train_y, list(written)[:-1]), (data.test_x, data.test_y, [test])):
        assert np.array_equal(x, np.concatenate([written[file][0] for file in files])) and x.flags.c_contiguous
        assert np.array_equal(y, np.concatenate([written[file][1] for file in files])) and y.dtype == np.int64


@needs_torchvision
def test_pickles_and_binary_files_of_the_same_images_read_the_same(datasets, tmp_path, monkeypatch):
    """As the two published distributions do. Where both are there, the one with checksums is read."""
    written = write_cifar(tmp_path, datasets.CIFAR10, "labels", 10, monkeypatch)
    source = catalog.get("cifar10")
    monkeypatch.setattr(cifar, "RECORDS_OF_A_BATCH", PER_BATCH)
    x, y = (np.concatenate([written[part][i] for part in ("train_list", "test_list")]) for i in (0, 1))
    records = np.hstack([y[:, None].astype(np.uint8), x.reshape(-1, 3072)])
    for file, rows in zip(source.layouts[1], np.split(records, 6)):
        (tmp_path / "binary" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "binary" / file).write_bytes(rows.tobytes())
    one, two = source.load(str(tmp_path)), source.load(str(tmp_path / "binary"))
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    (tmp_path / "binary" / "cifar-10-batches-bin").rename(tmp_path / "cifar-10-batches-bin")
    assert source.locate(tmp_path)[0].parent.name == "cifar-10-batches-py"


def test_the_binary_files_are_as_large_as_the_published_ones():
    """10,000 images a batch: https://www.cs.toronto.edu/~kriz/cifar.html"""
    assert cifar.RECORDS_OF_A_BATCH * (1 + cifar.PIXELS) == 30_730_000
    assert {name: count * (2 + cifar.PIXELS) for name, count in cifar.RECORDS.items()} == {
        "train.bin": 153_700_000,
        "test.bin": 30_740_000,
    }


@pytest.mark.parametrize("name, index", [("cifar10", 0), ("cifar10", 5), ("cifar100", 0), ("cifar100", 1)])
@pytest.mark.parametrize("change", ["cut", "record", "long", "empty"])
def test_a_binary_file_of_another_size_is_named(name, index, change, tmp_path, monkeypatch):
    write_binary(tmp_path, name, monkeypatch)
    path = tmp_path / catalog.get(name).layouts[1][index]
    width = 3073 if name == "cifar10" else 3074
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-5], "record": content[:-width], "long": content + b"x", "empty": b""}[change])
    with pytest.raises(DataError) as caught:
        catalog.get(name).load(str(tmp_path))
    assert f"{path} has {path.stat().st_size} bytes, that is" in one_line(caught)
    assert f"expected {PER_BATCH} records" in one_line(caught)


@pytest.mark.parametrize(
    "name, index, offset, label, last",
    [("cifar10", 2, 0, 10, 9), ("cifar10", 5, 0, 255, 9), ("cifar100", 0, 0, 20, 19), ("cifar100", 1, 1, 100, 99)],
)
def test_a_label_out_of_range_in_a_binary_file_is_named_with_its_record(
    name, index, offset, label, last, tmp_path, monkeypatch
):
    write_binary(tmp_path, name, monkeypatch)
    path = tmp_path / catalog.get(name).layouts[1][index]
    content = bytearray(path.read_bytes())
    content[7 * (len(content) // PER_BATCH) + offset] = label
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        catalog.get(name).load(str(tmp_path))
    assert f"{name}: record 7 of {path} has label {label}, expected 0 to {last}; unpack" in one_line(caught)


def test_a_layout_that_is_there_in_part_is_the_one_spoken_of(tmp_path, monkeypatch):
    write_binary(tmp_path, "cifar10", monkeypatch)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.unlink()
    with pytest.raises(DataError) as caught:
        catalog.get("cifar10").load(str(tmp_path))
    assert one_line(caught).startswith(f"cifar10: {path} is missing; expected in {tmp_path}: ")


@needs_torchvision
def test_without_data_dir_the_files_go_to_the_cache(datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path))
    fetched = []

    def download(self) -> None:
        fetched.append(self.root)
        write_cifar(Path(self.root), datasets.CIFAR10, "labels", 10, monkeypatch)

    monkeypatch.setattr(datasets.CIFAR10, "download", download)
    assert len(catalog.get("cifar10").load(None).train_x) == 5 * PER_BATCH
    assert fetched == [str(tmp_path / "downloads")]


@needs_torchvision
@pytest.mark.parametrize(
    "name, reader", [("cifar10", "CIFAR10"), ("emnist-letters", "EMNIST"), ("fashion-mnist", "FashionMNIST")]
)
def test_download_without_a_network(name, reader, datasets, tmp_path, monkeypatch):
    def download(self) -> None:
        raise urllib.error.URLError("no route\nto host")

    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path))
    monkeypatch.setattr(getattr(datasets, reader), "download", download)
    with pytest.raises(DataError) as caught:
        catalog.get(name).load(None)
    message = one_line(caught)
    assert f"{name} could not be downloaded into {tmp_path / 'downloads'}" in message and "data_dir" in message


@needs_torchvision
@pytest.mark.skipif(
    not Path(os.environ.get("FEDMPI_TEST_DATA", ""), "cifar-10-batches-py").is_dir()
    or not os.environ.get("FEDMPI_TEST_DATA"),
    reason="FEDMPI_TEST_DATA names no folder with CIFAR-10",
)
def test_the_real_cifar10():
    data = catalog.get("cifar10").load(os.environ["FEDMPI_TEST_DATA"])
    assert data.train_x.shape == (50000, 3, 32, 32) and data.test_x.shape == (10000, 3, 32, 32)
    assert np.bincount(data.train_y).tolist() == [5000] * 10 and np.bincount(data.test_y).tolist() == [1000] * 10
    mean = data.train_x.mean(axis=(0, 2, 3)) / 255
    assert np.allclose(mean, [0.4914, 0.4822, 0.4465], atol=1e-4)


# --- smaller images --------------------------------------------------------------------------------------------------


def test_shrinking_takes_the_mean_of_every_block():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (5, 3, 8, 4), dtype=np.uint8)
    data = source.ImageSet("toy", x, np.arange(5), None, None, 5)
    small = data.shrunk(2)
    assert small.train_x.shape == (5, 3, 4, 2) and small.train_x.dtype == np.uint8 and small.test_x is None
    for row, column in ((0, 0), (3, 1)):
        block = x[4, 2, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        assert small.train_x[4, 2, row, column] == np.rint(block.mean())
    assert data.shrunk(1) is data
    with pytest.raises(ConfigError, match="shrink = 3: must divide the 8 x 4 pixels of toy"):
        data.shrunk(3)
