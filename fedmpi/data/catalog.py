"""What data sets there are, what is in them, on which terms, and how to get them."""

from __future__ import annotations

from fedmpi.data.images import Source, load_cifar, load_digits, load_emnist
from fedmpi.errors import ConfigError

_CIFAR_TERMS = "no formal licence; cite Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images"
_EMNIST_FILES = tuple(
    f"emnist-balanced-{part}-{kind}-ubyte" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")
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
        how_to_get="unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz there",
        layouts=(
            tuple(
                f"cifar-10-batches-py/{name}"
                for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
            ),
        ),
        loader=load_cifar,
    ),
    Source(
        name="cifar100",
        shape=(3, 32, 32),
        num_classes=100,
        has_test=True,
        terms=_CIFAR_TERMS,
        how_to_get="unpack https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz there",
        layouts=(tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta")),),
        loader=load_cifar,
    ),
    Source(
        name="emnist",  # the split `balanced`
        shape=(1, 28, 28),
        num_classes=47,
        has_test=True,
        terms="no licence stated; from NIST Special Database 19, cite Cohen et al. 2017, EMNIST",
        how_to_get="unpack https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip there",
        # as torchvision unpacks it, or as the published archive does
        layouts=(
            tuple(f"EMNIST/raw/{name}" for name in _EMNIST_FILES),
            tuple(f"gzip/{name}.gz" for name in _EMNIST_FILES),
        ),
        loader=load_emnist,
    ),
)
_BY_NAME = {source.name: source for source in _SOURCES}


def known() -> list[str]:
    return sorted(_BY_NAME)


def get(name: str) -> Source:
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        raise ConfigError(f"dataset = {name!r}: must be one of {', '.join(known())}") from None
