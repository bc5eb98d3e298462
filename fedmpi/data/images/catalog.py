"""What image data sets there are, what is in them, on which terms, and how to get them."""

from __future__ import annotations

from fedmpi.data.images.cifar import load_cifar
from fedmpi.data.images.femnist import load_femnist
from fedmpi.data.images.idx import READERS, SPLITS, load_emnist, load_mnist
from fedmpi.data.images.libraries import load_digits
from fedmpi.data.images.source import Source
from fedmpi.data.ratings.catalog import RATING_SETS
from fedmpi.errors import ConfigError

_CIFAR = "https://www.cs.toronto.edu/~kriz"
_CIFAR_TERMS = "no formal licence; cite Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images"
_CIFAR10_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _mnist(name: str, terms: str, url: str, mirrors: bool = False) -> Source:
    """The four files as torchvision lays them out or in the folder itself, unpacked or as published."""
    files = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    folder = f"{READERS[name]}/raw/"
    return Source(
        name=name,
        shape=(1, 28, 28),
        num_classes=10,
        has_test=True,
        terms=terms,
        how_to_get=f"put the four files of {url} there",
        layouts=tuple(tuple(f"{at}{file}{end}" for file in files) for at in (folder, "") for end in ("", ".gz")),
        loader=load_mnist,
        mirrors=mirrors,
    )


def _emnist(name: str, num_classes: int, first_label: int = 0) -> Source:
    """A split as torchvision unpacks the archive, or as the archive has it."""
    split = SPLITS[name]
    files = [
        f"emnist-{split}-{part}-{kind}-ubyte" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")
    ]
    return Source(
        name=name,
        shape=(1, 28, 28),
        num_classes=num_classes,
        has_test=True,
        terms="no licence stated; from NIST Special Database 19, cite Cohen et al. 2017, EMNIST",
        how_to_get="unpack https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip there",
        layouts=(tuple(f"EMNIST/raw/{file}" for file in files), tuple(f"gzip/{file}.gz" for file in files)),
        loader=load_emnist,
        first_label=first_label,
    )


_SOURCES = (
    Source(
        name="digits",
        shape=(1, 8, 8),
        num_classes=10,
        has_test=False,
        terms="CC BY 4.0; UCI Optical Recognition of Handwritten Digits, as shipped with scikit-learn",
        how_to_get="comes with scikit-learn",
        layouts=(),
        loader=load_digits,
    ),
    Source(
        name="cifar10",
        shape=(3, 32, 32),
        num_classes=10,
        has_test=True,
        terms=_CIFAR_TERMS,
        how_to_get=f"unpack {_CIFAR}/cifar-10-python.tar.gz there (or cifar-10-binary.tar.gz)",
        layouts=(
            tuple(f"cifar-10-batches-py/{name}" for name in (*_CIFAR10_BATCHES, "batches.meta")),
            tuple(f"cifar-10-batches-bin/{name}.bin" for name in _CIFAR10_BATCHES),
        ),
        loader=load_cifar,
        margin=4,
        mirrors=True,
    ),
    Source(
        name="cifar100",
        shape=(3, 32, 32),
        num_classes=100,
        has_test=True,
        terms=_CIFAR_TERMS,
        how_to_get=f"unpack {_CIFAR}/cifar-100-python.tar.gz there (or cifar-100-binary.tar.gz)",
        layouts=(
            tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta")),
            tuple(f"cifar-100-binary/{name}.bin" for name in ("train", "test")),
        ),
        loader=load_cifar,
        margin=4,
        mirrors=True,
    ),
    _emnist("emnist", 47),
    _emnist("emnist-byclass", 62),
    _emnist("emnist-letters", 26, first_label=1),
    _emnist("emnist-digits", 10),
    _mnist("mnist", "CC BY-SA 3.0; LeCun, Cortes and Burges", "https://yann.lecun.com/exdb/mnist"),
    _mnist(
        "fashion-mnist",
        "MIT; cite Xiao, Rasul and Vollgraf 2017, Fashion-MNIST",
        "https://github.com/zalandoresearch/fashion-mnist",
        mirrors=True,
    ),
    _mnist(
        "kmnist",
        "CC BY-SA 4.0; cite Clanuwat et al. 2018, Deep Learning for Classical Japanese Literature",
        "https://github.com/rois-codh/kmnist",
    ),
    Source(
        name="femnist",
        shape=(1, 28, 28),
        num_classes=62,
        has_test=True,
        terms="none stated; from NIST Special Database 19, cite Caldas et al. 2018, LEAF",
        how_to_get="put femnist-leaf-subset.npz, a part of LEAF's FEMNIST as arrays, there",
        layouts=(("femnist-leaf-subset.npz",),),
        loader=load_femnist,
        has_writers=True,
        background=255,
    ),
)
_BY_NAME = {source.name: source for source in _SOURCES}


def known() -> list[str]:
    return sorted(_BY_NAME)


def get(name: str) -> Source:
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        raise ConfigError(
            f"dataset = {name!r}: must be one of {', '.join(known())} (images) or {', '.join(RATING_SETS)} (ratings)"
        ) from None
