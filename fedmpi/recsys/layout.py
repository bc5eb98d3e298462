"""What stands in a row of the shared matrix: Q of the paper, and beside it what the server step or the parties need."""

from dataclasses import dataclass

import numpy as np

COUNT = 0  # the first column, where there is one


@dataclass(frozen=True)
class Layout:
    """Columns of an item's row: [number of raters] [bias b_i] [q_i, k of them].

    In the matrix that the server sends they are the raters counted in the last round, b_i and q_i. In what a party sends for
    an item that it rated they are 1, and the gradients with respect to b_i and q_i.
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

    def bias(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, self.width - self.factors - 1] if self.biased else np.zeros(len(rows), rows.dtype)

    def q(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, self.width - self.factors :]
