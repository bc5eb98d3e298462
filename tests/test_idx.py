"""IDX files: EMNIST's splits and the MNIST family, on small files that the tests write themselves."""

from __future__ import annotations

import gzip
import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest

from fedmpi.data.images import catalog, idx, libraries
from fedmpi.data.images.spec import PartitionSpec
from fedmpi.data.images.store import Store
from fedmpi.data.prepared import prepare
from fedmpi.errors import DataError

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("torch") is None,
    reason="torchvision is not installed",
)
EMNIST = sorted(idx.SPLITS)
FAMILY = sorted(idx.READERS)


def write_idx(file: Path, array: np.ndarray, kind: int = 0x08) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    data = struct.pack(f">I{array.ndim}I", kind << 8 | array.ndim, *array.shape) + array.tobytes()
    file.write_bytes(gzip.compress(data, 1) if file.suffix == ".gz" else data)


def write(folder: Path, name: str, layout: int = 0, labels: range | None = None) -> dict[str, np.ndarray]:
    """A data set in one of its layouts: 124 and 62 upright images, labels in turn."""
    source = catalog.get(name)
    labels = labels or range(source.first_label, source.first_label + source.num_classes)
    rng = np.random.default_rng(0)
    paths = source.layouts[layout]
    written = {}
    for part, count, (x_path, y_path) in (("train", 124, paths[:2]), ("test", 62, paths[2:])):
        upright = rng.integers(0, 256, size=(count, 28, 28), dtype=np.uint8)
        # EMNIST's files run through each image column by column
        stored = upright.transpose(0, 2, 1) if name in EMNIST else upright
        write_idx(folder / x_path, np.ascontiguousarray(stored))
        write_idx(folder / y_path, np.resize(np.array(labels, np.uint8), count))
        written[part] = upright
    return written


def refused(name: str, folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        catalog.get(name).load(str(folder))
    message = str(caught.value)
    assert message.startswith(name) and "\n" not in message
    return message


# --- what goes in comes out ------------------------------------------------------------------------------------------


CASES = [(name, layout) for name in EMNIST + FAMILY for layout in range(len(catalog.get(name).layouts))]


@pytest.mark.parametrize("name, layout", CASES, ids=[f"{name}-{layout}" for name, layout in CASES])
def test_reads_upright_from_every_layout(name, layout, tmp_path):
    written = write(tmp_path, name, layout)
    data = catalog.get(name).load(str(tmp_path))
    classes = catalog.get(name).num_classes
    assert data.train_x.shape == (124, 1, 28, 28) and data.train_x.dtype == np.uint8 and data.train_x.flags.c_contiguous
    assert np.array_equal(data.train_x[:, 0], written["train"]) and np.array_equal(data.test_x[:, 0], written["test"])
    assert np.array_equal(data.train_y, np.arange(124) % classes) and np.array_equal(
        data.test_y, np.arange(62) % classes
    )
    assert data.train_y.dtype == data.test_y.dtype == np.int64 and data.num_classes == classes


def test_the_splits_have_the_classes_of_their_paper():
    """Cohen 2017, table II; the files of the letters count from 1."""
    classes = {name: catalog.get(name).num_classes for name in EMNIST}
    assert classes == {"emnist": 47, "emnist-byclass": 62, "emnist-digits": 10, "emnist-letters": 26}
    assert [name for name in EMNIST if catalog.get(name).first_label] == ["emnist-letters"]


def test_letters_are_counted_from_zero_once_they_are_read(tmp_path):
    write(tmp_path, "emnist-letters", labels=range(1, 27))
    data = catalog.get("emnist-letters").load(str(tmp_path))
    assert (data.train_y.min(), data.train_y.max()) == (0, 25)
    write(tmp_path, "emnist-letters", labels=range(0, 26))
    assert refused("emnist-letters", tmp_path).endswith("labels-idx1-ubyte has labels 0 to 25, expected 1 to 26")


@needs_torchvision
@pytest.mark.parametrize("name", EMNIST + FAMILY)
def test_torchvision_reads_the_same(name, tmp_path):
    """From the layout that it unpacks to; but it leaves EMNIST transposed, and its letters counted from 1."""
    write(tmp_path, name)
    datasets = libraries.import_torchvision_datasets()
    ours = catalog.get(name).load(str(tmp_path))
    for train, x, y in ((True, ours.train_x, ours.train_y), (False, ours.test_x, ours.test_y)):
        if name in EMNIST:
            theirs = datasets.EMNIST(str(tmp_path), split=idx.SPLITS[name], train=train)
        else:
            theirs = getattr(datasets, idx.READERS[name])(str(tmp_path), train=train)
        pixels = theirs.data.numpy()
        assert np.array_equal(x[:, 0], pixels.transpose(0, 2, 1) if name in EMNIST else pixels)
        assert np.array_equal(y + catalog.get(name).first_label, theirs.targets.numpy())


@needs_torchvision
@pytest.mark.parametrize("name, reader", [("emnist-digits", "EMNIST"), ("kmnist", "KMNIST")])
def test_without_data_dir_the_files_go_to_the_cache(name, reader, tmp_path, monkeypatch):
    fetched = []

    def download(self) -> None:
        fetched.append((self.root, getattr(self, "split", None)))
        write(Path(self.root), name)

    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path))
    monkeypatch.setattr(getattr(libraries.import_torchvision_datasets(), reader), "download", download)
    assert len(catalog.get(name).load(None).train_x) == 124
    assert fetched == [(str(tmp_path / "downloads"), idx.SPLITS.get(name))]


def test_the_splits_of_one_folder_do_not_mix(tmp_path):
    for name in EMNIST:
        write(tmp_path, name)
    folders = {
        prepare(PartitionSpec(dataset=name, data_dir=str(tmp_path), parties=2), tmp_path / "p") for name in EMNIST
    }
    assert len(folders) == 4
    assert sorted(Store.open(folder).num_classes for folder in folders) == [10, 26, 47, 62]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, layout", [("emnist", 0), ("emnist-letters", 1), ("mnist", 0), ("mnist", 3)])
@pytest.mark.parametrize("index", range(4))
def test_a_truncated_file_is_named(name, layout, index, tmp_path):
    write(tmp_path, name, layout)
    path = tmp_path / catalog.get(name).layouts[layout][index]
    path.write_bytes(path.read_bytes()[:-5])
    message = refused(name, tmp_path)
    assert f"{path} " in message and catalog.get(name).how_to_get in message


@pytest.mark.parametrize("layout", [0, 1])
def test_bytes_after_the_last_element(layout, tmp_path):
    write(tmp_path, "mnist", layout)
    path = tmp_path / catalog.get("mnist").layouts[layout][0]
    content = path.read_bytes()
    path.write_bytes(gzip.compress(gzip.decompress(content) + b"x", 1) if layout else content + b"x")
    assert f"{path} announces 124 x 28 x 28 bytes after its header and there are more; " in refused("mnist", tmp_path)


def test_a_damaged_byte_in_a_packed_file(tmp_path):
    write(tmp_path, "fashion-mnist", 1)
    path = tmp_path / catalog.get("fashion-mnist").layouts[1][2]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    assert f"{path} cannot be unpacked (" in refused("fashion-mnist", tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_header_that_announces_more_than_a_machine_holds(packed, tmp_path):
    layout = int(packed)
    write(tmp_path, "mnist", layout)
    path = tmp_path / catalog.get("mnist").layouts[layout][0]
    data = struct.pack(">4I", 0x0803, 0xFFFFFFFF, 0xFFFFFFFF, 28) + bytes(1000)
    path.write_bytes(gzip.compress(data) if packed else data)
    assert f"{path} announces 4294967295 x 4294967295 x 28 bytes after its header" in refused("mnist", tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x03", b"\0\0\x08\x01" + bytes(20), b"<html>not here</html>"])
def test_what_is_not_an_idx_file_of_images(content, tmp_path):
    write(tmp_path, "kmnist")
    path = tmp_path / catalog.get("kmnist").layouts[0][0]
    path.write_bytes(content)
    begins = content[:4].hex() or "nothing"
    assert f"{path} is not an IDX file of 3-dimensional bytes: it begins with {begins}, expected 00000803" in refused(
        "kmnist", tmp_path
    )


def test_what_is_not_packed_although_its_name_says_so(tmp_path):
    write(tmp_path, "mnist", 3)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"\0\0\x08\x01" + bytes(20))
    assert f"{tmp_path / 't10k-labels-idx1-ubyte.gz'} cannot be unpacked (Not a gzipped file" in refused(
        "mnist", tmp_path
    )


def test_elements_that_are_not_bytes(tmp_path):
    write(tmp_path, "mnist")
    write_idx(tmp_path / catalog.get("mnist").layouts[0][1], np.zeros(124, ">i4"), kind=0x0C)
    assert "is not an IDX file of 1-dimensional bytes: it begins with 00000c01" in refused("mnist", tmp_path)


def test_images_of_another_size(tmp_path):
    write(tmp_path, "mnist")
    write_idx(tmp_path / catalog.get("mnist").layouts[0][2], np.zeros((62, 32, 32), np.uint8))
    assert "holds uint8 images of shape (62, 1, 32, 32) and 62 labels, expected" in refused("mnist", tmp_path)


def test_no_images_at_all(tmp_path):
    write(tmp_path, "mnist")
    for path, shape in zip(catalog.get("mnist").layouts[0], [(0, 28, 28), (0,)]):
        write_idx(tmp_path / path, np.zeros(shape, np.uint8))
    assert "holds uint8 images of shape (0, 1, 28, 28) and 0 labels" in refused("mnist", tmp_path)


def test_labels_of_another_split(tmp_path):
    write(tmp_path, "emnist", labels=range(62))
    message = refused("emnist", tmp_path)
    assert message.endswith("has labels 0 to 61, expected 0 to 46") and "emnist-balanced-train-labels" in message


def test_fewer_labels_than_images(tmp_path):
    write(tmp_path, "emnist")
    write_idx(tmp_path / catalog.get("emnist").layouts[0][1], np.zeros(90, dtype=np.uint8))
    assert "90 labels, expected as many labels as uint8 images" in refused("emnist", tmp_path)
