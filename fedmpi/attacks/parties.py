"""Many parties in two arrays: the values of party u are `flat[offsets[u]:offsets[u + 1]]`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import DataError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The columns of MMF tables 2 and 3: [0, .2), [.2, .4), [.4, .6), [.6, .8), [.8, 1].
BINS = 5
BIN_LABELS = ("0 to 0.2", "0.2 to 0.4", "0.4 to 0.6", "0.6 to 0.8", "0.8 to 1")


def layout(offsets: Ints, *flat: Floats) -> tuple[NDArray[Any], ...]:
    """The offsets as int64 and each flat array as float64, after a check that they fit together."""
    offsets = np.asarray(offsets, dtype=np.int64)
    if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise DataError("offsets of parties must be one row that starts at 0 and never falls")
    arrays = tuple(np.asarray(values, dtype=np.float64) for values in flat)
    for values in arrays:
        if values.shape != (offsets[-1],):
            raise DataError(f"offsets end at {offsets[-1]}, an array of shape {values.shape} does not fit")
    return (offsets, *arrays)


def reduce_by_party(operation: np.ufunc, offsets: Ints, values: NDArray[Any], empty: float) -> NDArray[Any]:
    """`operation` over the values of each party, `empty` for a party without any."""
    counts = np.diff(offsets)
    out = np.full(counts.size, empty, dtype=np.result_type(values, type(empty)))
    some = counts > 0
    # reduceat answers a single value for an empty segment; left out, the starts of the others still end each segment
    # where the next begins.
    if some.any():
        out[some] = operation.reduceat(values, offsets[:-1][some])
    return out


def shares_by_bin(hits: NDArray[Any], counts: NDArray[Any]) -> Floats:
    """The proportion of parties whose hits / counts falls into each bin. A party with count 0 has no rate and is left
    out; the answer is NaN if nobody is left."""
    some = counts > 0
    # Hits are whole numbers, or expected values whose error is far below 1e-9: three of five is not below 0.6.
    column = np.floor(BINS * hits[some] / counts[some] + 1e-9).astype(np.int64)
    found = np.bincount(np.clip(column, 0, BINS - 1), minlength=BINS)
    return found / found.sum() if found.sum() else np.full(BINS, np.nan)
