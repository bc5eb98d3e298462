"""The party's side of matrix factorisation: p_u from the shared item factors, and the gradients that it sends back.

Three ways, `party_solver`:

    steps      as the paper prints it: gradient steps on p_u, MMF (7), then eta_ui = lambda q_i - e_ui p_u, MMF (6)
    ridge      p_u is the exact minimiser given Q; eta_ui = -e_ui p_u, and the server applies its regularisation once an item
    posterior  as ridge, and p_u is known only up to its posterior covariance S_u: the gradient is that of the expected
               squared error, eta_ui = -e_ui p_u + S_u q_i, and Q's own uncertainty widens the ridge. What a party with
               few ratings does not know does not pull at Q.

All three work on the parties of a rank in buckets and are exact functions of the party's own ratings and of Q.
"""

from dataclasses import dataclass

import numpy as np

from fedmpi.recsys.buckets import Bucket, buckets, padded
from fedmpi.recsys.layout import Layout, curvature


@dataclass(frozen=True)
class Solver:
    """How a party works; the same for all."""

    kind: str  # steps, ridge, posterior
    party_reg: float  # lambda of p_u; under posterior the noise variance sigma^2
    offset_reg: float  # lambda of a_u
    item_reg: float  # lambda of q_i
    steps: int
    rate: float  # of a step, over the party's number of ratings
    offset: bool  # whether a party has an offset of its own, a_u

    def penalties(self, columns: int) -> np.ndarray:
        """Of [a_u, p_u]."""
        found = np.full(columns, self.party_reg)
        found[0] = self.offset_reg if self.offset else 1.0  # any: without an offset it meets zeros
        return found

    def variances(self, counts: np.ndarray) -> np.ndarray:
        """Under posterior: what the uncertainty of items with so many raters adds to the penalties of p_u, each."""
        return self.party_reg / curvature(counts, self.item_reg)


class Parties:
    """The factors of a rank's parties, [a_u, p_u] a row, and the work on them."""

    def __init__(self, layout: Layout, solver: Solver, offsets: np.ndarray, items: np.ndarray, start: np.ndarray):
        """`start`: (parties, k) p_u before round 1."""
        self.layout, self.solver = layout, solver
        self.offsets = offsets
        self.items = padded(items.astype(np.int64), layout.items)
        self.buckets = buckets(offsets)
        self.z = np.concatenate((np.zeros((len(start), 1)), start), axis=1)

    def solve(self, rows: np.ndarray, ratings: np.ndarray) -> np.ndarray:
        """The factors that these ratings have under these item rows; leaves the kept ones as they are."""
        work = _Work(self, rows, ratings)
        z = self.z.copy()
        for bucket in self.buckets:
            z[bucket.members] = work.factors(bucket, *work.gather(bucket))[0]
        return z

    def gradients(self, rows: np.ndarray, ratings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Move every party's factors; (a row of gradients for each rating, the errors e_ui)."""
        work = _Work(self, rows, ratings)
        values = np.empty((len(self.items) - 1, self.layout.width), np.float32)
        errors = np.empty(len(self.items) - 1)
        self.z = self.z.copy()
        for bucket in self.buckets:
            w, y = work.gather(bucket)
            z, covariance = work.factors(bucket, w, y)
            self.z[bucket.members] = z
            eta, error = work.eta(bucket, w, y, z, covariance)
            bucket.put(values, eta)
            bucket.put(errors, error)
        return values, errors


def predict(layout: Layout, rows: np.ndarray, z: np.ndarray, users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """a_u + b_i + q_i . p_u for pairs of a party and an item."""
    out = np.empty(len(items))
    q, b = layout.q(rows).astype(np.float64), layout.bias(rows).astype(np.float64)
    for first in range(0, len(items), 1 << 16):
        at = slice(first, first + (1 << 16))
        mine = z[users[at]]
        out[at] = mine[:, 0] + b[items[at]] + np.einsum("nk,nk->n", q[items[at]], mine[:, 1:])
    return out


class _Work:
    """One round's item rows and ratings, ready for any bucket."""

    def __init__(self, parties: Parties, rows: np.ndarray, ratings: np.ndarray):
        layout, self.solver = parties.layout, parties.solver
        self.layout, self.z, self.items = layout, parties.z, parties.items
        rows = padded(rows.astype(np.float64))
        # w_i = [1, q_i]: the first coordinate meets the party's offset. Without one it is 0 and a_u stays 0.
        ones = np.full((len(rows), 1), float(self.solver.offset))
        ones[-1] = 0.0
        self.w = np.concatenate((ones, layout.q(rows)), axis=1)
        self.bias = layout.bias(rows)
        self.ratings = padded(ratings.astype(np.float64))
        self.penalties = self.solver.penalties(self.w.shape[1])
        self.variance = None
        if self.solver.kind == "posterior":
            self.variance = self.solver.variances(layout.counts(rows))
            self.variance[-1] = 0.0

    def gather(self, bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
        """((B, L, k + 1) rows w_i of the parties' items, (B, L) ratings less the items' biases)"""
        items = bucket.take(self.items)
        return self.w[items], bucket.take(self.ratings) - self.bias[items]

    def factors(self, bucket: Bucket, w: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """([a_u, p_u] of the bucket's parties, their covariance if that is asked for)"""
        if self.solver.kind == "steps":
            return self._stepped(bucket, w, y), None
        gram = np.matmul(w.transpose(0, 2, 1), w)
        diagonal = np.arange(w.shape[2])
        gram[:, diagonal, diagonal] += self.penalties
        right = np.matmul(w.transpose(0, 2, 1), y[:, :, None])
        if self.variance is None:
            return np.linalg.solve(gram, right)[:, :, 0], None
        gram[:, diagonal[1:], diagonal[1:]] += self.variance[bucket.take(self.items)].sum(axis=1)[:, None]
        inverse = np.linalg.inv(gram)
        return np.matmul(inverse, right)[:, :, 0], self.solver.party_reg * inverse

    def _stepped(self, bucket: Bucket, w: np.ndarray, y: np.ndarray) -> np.ndarray:
        """MMF (7), a descent step; its sum over the party's ratings is divided by their number, or the step would have to
        be as small as the most active party needs."""
        z = self.z[bucket.members]
        rate = self.solver.rate / bucket.valid.sum(axis=1)[:, None]
        number = bucket.valid.sum(axis=1)[:, None]
        for _ in range(self.solver.steps):
            error = y - np.matmul(w, z[:, :, None])[:, :, 0]
            z = z - rate * (
                self.solver.party_reg * number * z - np.matmul(w.transpose(0, 2, 1), error[:, :, None])[:, :, 0]
            )
        return z

    def eta(
        self, bucket: Bucket, w: np.ndarray, y: np.ndarray, z: np.ndarray, covariance: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """MMF (6) for every rating: ((B, L, width) rows to send, (B, L) errors)"""
        layout, first = self.layout, self.layout.width - self.layout.factors
        error = y - np.matmul(w, z[:, :, None])[:, :, 0]
        eta = np.empty((*y.shape, layout.width), np.float32)
        if covariance is None:
            eta[:, :, first:] = -error[:, :, None] * z[:, None, 1:]
        else:
            spread = np.matmul(w, np.ascontiguousarray(covariance[:, :, 1:]))
            spread -= error[:, :, None] * z[:, None, 1:]
            eta[:, :, first:] = spread
        if layout.counted:
            eta[:, :, 0] = 1.0
        if layout.biased:
            eta[:, :, first - 1] = -error
        if self.solver.kind == "steps":
            eta[:, :, first:] += self.solver.item_reg * w[:, :, 1:]
            if layout.biased:
                eta[:, :, first - 1] += self.solver.item_reg * self.bias[bucket.take(self.items)]
        return eta, error
