"""Loaders, on small files in the official formats that the tests write themselves."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import pickle
import struct
import subprocess
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest

import fedmpi
from fedmpi.data import catalog, images
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


def write_idx(file: Path, array: np.ndarray, packed: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    data = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()
    file.write_bytes(gzip.compress(data) if packed else data)


def write_emnist(folder: Path, layout: int = 0, labels_up_to: int = 47) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    paths = catalog.get("emnist").layouts[layout]
    written = {}
    for part, count, (x_path, y_path) in (("train", 94, paths[:2]), ("test", 47, paths[2:])):
        upright = rng.integers(0, 256, size=(count, 28, 28), dtype=np.uint8)
        # the published files run through each image column by column
        write_idx(folder / x_path, np.ascontiguousarray(upright.transpose(0, 2, 1)), packed=bool(layout))
        write_idx(folder / y_path, (np.arange(count) % labels_up_to).astype(np.uint8), packed=bool(layout))
        written[part] = upright
    return written


@pytest.fixture
def datasets():
    return images.import_torchvision_datasets()


# --- the catalog -----------------------------------------------------------------------------------------------------


def test_catalog_lists_the_data_sets_with_terms_and_source():
    assert catalog.known() == ["cifar10", "cifar100", "digits", "emnist"]
    for name in catalog.known():
        source = catalog.get(name)
        assert source.name == name and source.terms and source.how_to_get
        assert "\n" not in source.terms + source.how_to_get


@pytest.mark.parametrize("name", ["cifar", "", None, ["digits"]])
def test_unknown_data_set(name):
    with pytest.raises(ConfigError, match="must be one of cifar10, cifar100, digits, emnist$"):
        catalog.get(name)


def test_package_starts_without_heavy_imports():
    result = run_python(
        "import sys, fedmpi.data.store, fedmpi.data.catalog, fedmpi.data.images, fedmpi.data.partition\n"
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
    with pytest.raises(DataError, match="^scikit-learn is not installed: pip install"):
        catalog.get("digits").load(None)


# --- torchvision -----------------------------------------------------------------------------------------------------


def test_torchvision_not_installed(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match=r"is not installed: pip install 'fedmpi\[images\]'$"):
        images.import_torchvision_datasets()


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
        "from fedmpi.data import images; import gc\n"
        "assert images.import_torchvision_datasets().here\n"
        "gc.collect(); import torch; print(torch.ops.torchvision.nms.default._schema)",
        tmp_path,
    )
    assert "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" in result.stdout, result.stderr


def test_any_other_failure_of_the_import_is_not_papered_over(tmp_path):
    fake_torchvision(tmp_path, "raise RuntimeError('built for\\nanother torch')\n")
    result = run_python(
        "from fedmpi.data import images; from fedmpi.errors import DataError\n"
        "try:\n    images.import_torchvision_datasets()\n"
        "except DataError as error:\n    print(error, images._defined_operators)",
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
        assert catalog.get(name).layouts == (tuple(f"{reader.base_folder}/{file}" for file in files),)


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


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "emnist"])
def test_missing_files_are_named_with_where_to_get_them(name, tmp_path):
    source = catalog.get(name)
    with pytest.raises(DataError) as caught:
        source.load(str(tmp_path))
    message = one_line(caught)
    assert str(tmp_path / source.layouts[0][0]) in message
    assert f"expected in {tmp_path}" in message and source.how_to_get in message


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
@pytest.mark.parametrize("name", ["cifar10", "emnist"])
def test_download_without_a_network(name, datasets, tmp_path, monkeypatch):
    def download(self) -> None:
        raise urllib.error.URLError("no route\nto host")

    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path))
    monkeypatch.setattr(getattr(datasets, name.upper()), "download", download)
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


# --- EMNIST ----------------------------------------------------------------------------------------------------------


@needs_torchvision
@pytest.mark.parametrize("layout", [0, 1], ids=["torchvision", "archive"])
def test_emnist_reads_upright_from_either_layout(layout, tmp_path):
    written = write_emnist(tmp_path, layout)
    data = catalog.get("emnist").load(str(tmp_path))
    assert data.train_x.shape == (94, 1, 28, 28) and data.train_x.flags.c_contiguous
    assert np.array_equal(data.train_x[:, 0], written["train"])
    assert np.array_equal(data.test_x[:, 0], written["test"])
    assert np.array_equal(data.train_y, np.arange(94) % 47) and data.test_y.dtype == np.int64
    assert data.num_classes == 47


@needs_torchvision
@pytest.mark.parametrize("layout", [0, 1], ids=["torchvision", "archive"])
@pytest.mark.parametrize("index", range(4))
def test_a_truncated_emnist_file_is_refused(layout, index, tmp_path):
    write_emnist(tmp_path, layout)
    path = tmp_path / catalog.get("emnist").layouts[layout][index]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="emnist-balanced-"):
        catalog.get("emnist").load(str(tmp_path))


@needs_torchvision
def test_emnist_with_labels_of_another_split(tmp_path):
    write_emnist(tmp_path, labels_up_to=62)
    with pytest.raises(DataError, match="has labels 0 to 61, expected 0 to 46$"):
        catalog.get("emnist").load(str(tmp_path))


@needs_torchvision
def test_emnist_with_fewer_labels_than_images(tmp_path):
    write_emnist(tmp_path)
    write_idx(tmp_path / catalog.get("emnist").layouts[0][1], np.zeros(90, dtype=np.uint8))
    with pytest.raises(DataError, match="90 labels, expected as many labels as uint8 images"):
        catalog.get("emnist").load(str(tmp_path))
