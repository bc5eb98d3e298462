"""A rank's sparse rows on their way out: in the clear as they are, or as a dense vector for secure aggregation."""

from collections.abc import Iterator

import numpy as np

from fedmpi.aggregation.rows import row_bits
from fedmpi.algorithm import RowUpdates
from fedmpi.privacy.encoding import Encoding
from fedmpi.wire.frame import NOBODY
from fedmpi.wire.messages import PlainRows

# Rows in one message: large enough that its header does not count, small enough that the server can start on it while
# the rest is on its way.
MESSAGE_ROWS = 1 << 18


def report_rows(updates: RowUpdates, clipped: np.ndarray) -> np.ndarray:
    """The method's figures, and the engine's two: norm of the update, share of its values that were cut."""
    ends = np.concatenate(([0], np.cumsum(updates.counts)))
    squares = np.concatenate(([0.0], np.cumsum(np.einsum("nw,nw->n", updates.values, updates.values))))
    cut = np.concatenate(([0], np.cumsum(clipped)))
    norms = np.sqrt(np.maximum(0.0, squares[ends[1:]] - squares[ends[:-1]]))
    sizes = np.maximum(1, updates.counts * updates.values.shape[1])
    shares = (cut[ends[1:]] - cut[ends[:-1]]) / sizes
    return np.column_stack((updates.figures, norms, shares))


def plain_messages(
    round: int, updates: RowUpdates, encoded: np.ndarray, chosen: np.ndarray, encoding: Encoding
) -> Iterator[PlainRows]:
    """The chosen parties' rows, whole parties in each message."""
    width = encoded.shape[1]
    ends = np.concatenate(([0], np.cumsum(updates.counts)))
    bits = row_bits(encoding.dimension // width)
    group: list[int] = []
    taken = 0
    for index in [*np.flatnonzero(chosen).tolist(), None]:
        if group and (index is None or taken + updates.counts[index] > MESSAGE_ROWS):
            parties = tuple(updates.parties[i] for i in group)
            if group[-1] - group[0] + 1 == len(group):  # neighbours: no copy
                at = slice(ends[group[0]], ends[group[-1] + 1])
            else:
                at = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in group])
            alone = parties[0] if len(parties) == 1 else NOBODY
            yield PlainRows(
                round, alone, parties, updates.counts[group], updates.rows[at], encoded[at], bits, encoding.own_bits
            )
            group, taken = [], 0
        if index is not None:
            group.append(index)
            taken += int(updates.counts[index])


def dense_updates(
    updates: RowUpdates, encoded: np.ndarray, chosen: np.ndarray, encoding: Encoding
) -> Iterator[tuple[int, np.ndarray]]:
    """(party, its rows in an otherwise empty vector over all coordinates, in Z_{2^b}) for each chosen party."""
    width = encoded.shape[1]
    ends = np.concatenate(([0], np.cumsum(updates.counts)))
    for index in np.flatnonzero(chosen):
        dense = np.zeros((encoding.dimension // width, width), np.int64)
        at = slice(ends[index], ends[index + 1])
        dense[updates.rows[at]] = encoded[at]
        yield updates.parties[index], encoding.wrap(dense.reshape(-1))
