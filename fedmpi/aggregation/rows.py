"""Plain aggregation of sparse rows: parties share in the clear what they touched of a shared matrix."""

import numpy as np

from fedmpi.aggregation.base import ServerSession, Sum
from fedmpi.aggregation.plain import PlainServer
from fedmpi.errors import ProtocolError
from fedmpi.privacy.encoding import Encoding
from fedmpi.wire.messages import PlainRows

# Rows added at a time: their 64-bit copies stay within some ten megabytes.
CHUNK = 1 << 16


def row_bits(rows: int) -> int:
    """Width of a row number."""
    return max(1, (rows - 1).bit_length())


class RowServer(PlainServer, ServerSession):
    """Every party's rows into one exact sum. A party whose rows cannot be is dropped; its neighbours in a message stay."""

    def __init__(self, round: int, cohort: tuple[int, ...], encoding: Encoding, width: int, most_lost=None):
        super().__init__(round, cohort, encoding, encoding.dimension, own_support=False, most_lost=most_lost)
        self._width = width
        self._rows = encoding.dimension // width
        self._sum = np.zeros((self._rows, width), np.int64)

    def receive(self, message):
        self._check_shape(message)
        good = self._good_parties(message)
        kept = np.repeat(good, message.counts)
        whole = bool(good.all())
        self._add(message.rows if whole else message.rows[kept], message.values if whole else message.values[kept])
        heard = [party for party, fine in zip(message.parties, good.tolist()) if fine]
        self._missing.difference_update(message.parties)
        self._heard.extend(heard)
        return []

    def _check_shape(self, message) -> None:
        def wrong(what: str) -> ProtocolError:
            first = message.parties[0] if getattr(message, "parties", ()) else message.party
            return ProtocolError(what, party=first, phase="update")

        if not isinstance(message, PlainRows):
            raise wrong(f"sent {type(message).__name__}, expected PlainRows")
        if message.round != self._round:
            raise wrong(f"sent an update of round {message.round} in round {self._round}")
        if len(set(message.parties)) != len(message.parties) or not self._missing.issuperset(message.parties):
            raise wrong("or a neighbour in its message sent a second update, or is not in this round's cohort")
        if message.values.shape[1] != self._width or message.value_bits != self._encoding.own_bits:
            raise wrong(
                f"sent rows of {message.values.shape[1]} values of {message.value_bits} bits, expected {self._width} of "
                f"{self._encoding.own_bits}"
            )

    def _good_parties(self, message) -> np.ndarray:
        """Which parties' rows exist, ascend, and hold values within the bound; the others are dropped with the reason."""
        rows, counts = message.rows, message.counts
        bad = rows >= self._rows
        ends = np.cumsum(counts)
        if rows.size > 1:
            steps = np.diff(rows) <= 0
            inner = ends[:-1]
            steps[inner[(inner > 0) & (inner < rows.size)] - 1] = False  # from one party to the next
            bad[1:] |= steps
        outside = np.zeros(rows.size, bool)
        if (
            int(message.values.max(initial=0)) > self._encoding.steps
            or int(message.values.min(initial=0)) < -self._encoding.steps
        ):
            outside = np.abs(message.values.astype(np.int64)).max(axis=1) > self._encoding.steps
        owner = np.repeat(np.arange(len(counts)), counts)
        good = np.ones(len(counts), bool)
        for wrong, what in (
            (bad, "sent rows that do not exist or do not ascend"),
            (outside, "sent a value out of range"),
        ):
            for index in np.unique(owner[wrong]):
                if good[index]:
                    good[index] = False
                    self.drop(message.parties[index], f"party {message.parties[index]}, update: {what}")
        return good

    def _add(self, rows: np.ndarray, values: np.ndarray) -> None:
        from scipy.sparse import csc_array

        for first in range(0, len(rows), CHUNK):
            chosen = rows[first : first + CHUNK]
            # One column a row that was sent, with a one where it belongs: the product adds each to its place.
            places = csc_array(
                (np.ones(chosen.size, np.int64), chosen, np.arange(chosen.size + 1)), shape=(self._rows, chosen.size)
            )
            self._sum += places @ values[first : first + CHUNK].astype(np.int64)

    def result(self):
        return Sum(self._sum.reshape(-1), tuple(sorted(self._heard)))
