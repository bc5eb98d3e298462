"""Named arrays as bytes: a list of (name, type, shape) in JSON behind its length, then their raw values. Numbers only."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import WireError
from fedmpi.wire.frame import COUNT, Buffer, Reader

TYPES = ("<f4", "<f8", "<i4", "<i8", "<u4", "<u8")


def pack_arrays(arrays: dict[str, NDArray[Any]]) -> bytes:
    """Nothing for no arrays."""
    if not arrays:
        return b""
    given = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    kinds = {name: values.dtype.newbyteorder("<") for name, values in given.items()}
    head = json.dumps([[name, kinds[name].str, list(np.shape(arrays[name]))] for name in given]).encode()
    return b"".join(
        (COUNT.pack(len(head)), head, *(values.astype(kinds[name]).tobytes() for name, values in given.items()))
    )


def read_arrays(data: Buffer) -> dict[str, NDArray[Any]]:
    """WireError for anything that `pack_arrays` does not write."""
    if not len(data):
        return {}
    reader = Reader(data, "arrays")
    head = bytes(reader.take(reader.count()))
    arrays: dict[str, NDArray[Any]] = {}
    try:
        for name, kind, shape in json.loads(head):
            if kind not in TYPES or not all(isinstance(size, int) and size >= 0 for size in shape):
                raise WireError(f"arrays: {name!r} of type {kind!r} and shape {shape!r}")
            count = int(np.prod(shape, dtype=object)) if shape else 1
            arrays[str(name)] = reader.array(count, kind).reshape(shape).copy()
    except (ValueError, TypeError, RecursionError):
        raise WireError("arrays: their list cannot be read") from None
    reader.end()
    return arrays
