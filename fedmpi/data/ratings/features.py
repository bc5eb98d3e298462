"""Attributes of items and profiles of users as float32 columns, from side information alone, never from a rating.

They are computed once over the whole data set and treated as public. That includes tags: a tag tells that somebody cared
about the item, so a user's tags can hint at what the user rated, and the tag columns rest on the tags of users that take
no part. Neither is covered by any statement about privacy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

#: Up to this many numbers a matrix is decomposed as a whole.
_DENSE_CELLS = 1_000_000


@dataclass(frozen=True, eq=False)
class Features:
    names: tuple[str, ...]
    values: np.ndarray  # float32, (rows, names)

    def rows(self, which: np.ndarray) -> Features:
        return Features(self.names, self.values[which])


def join(*parts: Features) -> Features:
    return Features(
        tuple(name for part in parts for name in part.names), np.concatenate([part.values for part in parts], axis=1)
    )


def one_hot(prefix: str, labels: Sequence[Iterable[object]], known: Sequence[object]) -> Features:
    """A column for each known label, 1 where a row has it; a row may have several labels, or none."""
    place = {label: column for column, label in enumerate(known)}
    values = np.zeros((len(labels), len(known)), dtype=np.float32)
    for row, held in enumerate(labels):
        for label in held:
            values[row, place[label]] = 1
    return Features(tuple(f"{prefix}:{label}" for label in known), values)


def standardised(name: str, numbers: Sequence[float]) -> Features:
    """Mean 0 and standard deviation 1 over the rows that have a number; NaN, a missing one, becomes 0."""
    raw = np.asarray(numbers, dtype=np.float64)
    there = ~np.isnan(raw)
    values = np.zeros(len(raw))
    if there.any():
        # where all are equal there is nothing to scale
        values[there] = (raw[there] - raw[there].mean()) / (raw[there].std() or 1.0)
    return Features((name,), values[:, None].astype(np.float32))


def tag_columns(rows: np.ndarray, tags: np.ndarray, num_rows: int, components: int) -> Features:
    """The tags of each row in a few numbers; `rows` and `tags` are one pair for each time that a row got a tag.

    Counts of tags, in which rare tags weigh more (scikit-learn's TF-IDF), reduced to the `components` directions in which
    rows differ most (PCA); zeros where there are fewer. A row without tags is the zero vector, and lies where PCA puts it.
    Signs are fixed and values rounded to 1e-4, or the last bits of a linear algebra library would make hosts disagree.
    """
    from scipy.sparse import coo_array, csr_matrix
    from sklearn.decomposition import PCA
    from sklearn.feature_extraction.text import TfidfTransformer

    names = tuple(f"tag:{component}" for component in range(components))
    values = np.zeros((num_rows, components), dtype=np.float32)
    if components == 0 or len(rows) == 0:
        return Features(names, values)
    vocabulary, columns = np.unique(tags, return_inverse=True)
    shape = (num_rows, len(vocabulary))
    counts = csr_matrix(coo_array((np.ones(len(rows)), (rows, columns)), shape=shape))
    weights = TfidfTransformer().fit_transform(counts)
    found = min(components, *shape)
    # the sparse solver finds fewer components than the smaller side has
    sparse = found < min(shape) and num_rows * len(vocabulary) > _DENSE_CELLS
    pca = PCA(found, svd_solver="arpack" if sparse else "full", random_state=0)
    projected = pca.fit_transform(weights if sparse else weights.toarray())
    strongest = np.abs(pca.components_).argmax(axis=1)
    signs = np.sign(pca.components_[np.arange(found), strongest])
    values[:, :found] = np.round(projected * np.where(signs == 0, 1, signs), 4)
    return Features(names, values + np.float32(0))  # no negative zeros
