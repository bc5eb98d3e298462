"""What stands in a row of the shared matrix: Q of the paper, and beside it what the server step or the parties need."""

from dataclasses import dataclass

import numpy as np

COUNT = 0  # the first column, where there is one


@dataclass(frozen=True)
class Layout:
    """Columns of an item's row: [number of raters] [bias b_i] [q_i, k of them].

    In the matrix that the server sends they are the raters, b_i and q_i; raters are 0 until they are counted, by the first sum,
    and stay as they were counted then. In what a party sends for an item that it rated they are 1 while they are counted and 0
    ever after, and the gradients with respect to b_i and q_i.
    """

    items: int
    factors: int  # k
    counted: bool
    biased: bool

    @property
    def width(self) -> int:
        return self.counted + self.biased + self.factors

    @property
    def dimension(self) -> int:
        return self.items * self.width

    def rows(self, theta: np.ndarray) -> np.ndarray:
        return theta.reshape(self.items, self.width)

    def counts(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, COUNT] if self.counted else np.zeros(len(rows), rows.dtype)

    def counting(self, rows: np.ndarray) -> bool:
        """Whether raters are still to be counted. Once: from counts over other survivors, round for round, their difference
        would be the list of items of whoever was missing."""
        return self.counted and not self.counts(rows).any()

    def bias(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, self.width - self.factors - 1] if self.biased else np.zeros(len(rows), rows.dtype)

    def q(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, self.width - self.factors :]


def curvature(counts: np.ndarray, prior: float) -> np.ndarray:
    """n_i + c, to divide by. 1 where both are 0: an item that nobody had rated when raters were counted, and no prior."""
    both = counts + prior
    return np.where(both > 0, both, 1.0)
