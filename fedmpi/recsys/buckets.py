"""Parties of a rank in batches whose shapes depend on the party alone.

A party with n ratings stands in the bucket of the next power of two, padded with an item whose row is zero. Matrix products
and solutions are computed for each party of a batch by itself, so that a party's bits do not depend on who shares its
batch, and so not on placement.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Ratings, padding included, that are worked on at a time: with 22 columns of float64 1.4 MB, which stay in the cache and
# are not asked of the kernel anew each time.
CELLS = 1 << 13


@dataclass(frozen=True)
class Bucket:
    members: np.ndarray  # (B,) parties, as indices into the rank's
    places: np.ndarray  # (B, L) where each rating stands in the rank's flat arrays; `end` where there is none
    end: int  # length of the flat arrays

    @property
    def valid(self) -> np.ndarray:
        return self.places < self.end

    def take(self, flat: np.ndarray) -> np.ndarray:
        """(B, L, ...) of a flat array that `padded` gave its last, empty row."""
        return flat[self.places]

    def put(self, flat: np.ndarray, values: np.ndarray) -> None:
        """The (B, L, ...) values of real ratings into their places in a flat array."""
        valid = self.valid
        flat[self.places[valid]] = values[valid]


def padded(flat: np.ndarray, last=0) -> np.ndarray:
    """A flat array with one more row, which padding points to."""
    return np.concatenate((flat, np.full((1, *flat.shape[1:]), last, flat.dtype)))


def buckets(offsets: np.ndarray) -> list[Bucket]:
    """All parties of a rank, party u holding flat entries offsets[u] to offsets[u + 1]; shortest first."""
    counts = np.diff(offsets)
    end = int(offsets[-1])
    lengths = np.where(counts > 0, 1 << np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64), 0)
    found = []
    for length in np.unique(lengths[lengths > 0]).tolist():
        members = np.flatnonzero(lengths == length)
        for chunk in _chunks(members, max(1, CELLS // length)):
            within = np.arange(length)
            places = np.where(within < counts[chunk][:, None], offsets[chunk][:, None] + within, end)
            found.append(Bucket(chunk, places, end))
    return found


def _chunks(members: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for first in range(0, len(members), size):
        yield members[first : first + size]
