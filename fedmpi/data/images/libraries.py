"""What other libraries give: scikit-learn's digits, and torchvision's readers and downloads.

The libraries are imported inside the functions that need them, because a rank that maps prepared files must not wait for
their import.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np

from fedmpi.data import one_line
from fedmpi.data.images.source import ImageSet, Source, checked
from fedmpi.errors import DataError

#: Keeps the operators of `import_torchvision_datasets` defined: they vanish with the object that defined them.
_defined_operators: list[Any] = []


def load_digits(source: Source, data_dir: str | None) -> ImageSet:
    """8×8 digits. They come with the library: no files, no download, no official test split."""
    try:
        from sklearn.datasets import load_digits as sklearn_load_digits
    except ImportError as error:
        raise DataError(
            "scikit-learn is not installed; in the clone of fedmpi: pip install -c launch/constraints.txt -e ."
        ) from error
    bunch = sklearn_load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    x, y = checked(source, x, bunch.target, "scikit-learn's digits")
    return ImageSet(source.name, x, y, None, None, source.num_classes)


def import_torchvision_datasets() -> ModuleType:
    """`torchvision.datasets`, also where a CUDA build of torchvision meets a CPU build of torch.

    There torchvision's C++ extension does not load, and its import fails because it refers to an operator that the
    extension would have registered. Reading data sets needs none of them, so the two it asks for are only declared.
    """
    try:
        try:
            return importlib.import_module("torchvision.datasets")
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
        import torch

        make_library: Any = torch.library.Library  # torch has no types for it
        library = make_library("torchvision", "DEF")
        _defined_operators.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision.datasets")
    except ModuleNotFoundError as error:
        # with the constraints, or pip takes torchvision's newest and replaces torch by a build that fits it
        raise DataError(
            f"{error.name or 'torchvision'} is not installed; in the clone of fedmpi: "
            "pip install -c launch/constraints.txt -e '.[images]'"
        ) from error
    except Exception as error:
        # whatever a broken installation throws at import, the user must mend the installation
        reason = one_line(error)
        raise DataError(f"torchvision cannot be imported ({reason}): install the build that fits torch") from error
