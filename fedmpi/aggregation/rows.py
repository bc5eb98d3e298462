"""Plain aggregation of sparse rows: parties share in the clear what they touched of a shared matrix."""

from collections.abc import Iterator

import numpy as np

from fedmpi.aggregation.base import Answers, PartySession, Sum
from fedmpi.aggregation.plain import PlainServer
from fedmpi.errors import Fault, ProtocolError, WireError
from fedmpi.privacy.encoding import Encoding
from fedmpi.wire.bits import pack, pack_signed, unpack, unpack_signed
from fedmpi.wire.message import Message, alone, speakers
from fedmpi.wire.messages import PlainRows
from fedmpi.wire.phases import Phase, Purpose

# Rows in one message: large enough that its header does not count, small enough that the server can start on it while
# the rest is on its way.
MESSAGE_ROWS = 1 << 18

# Rows added at a time: their 64-bit copies stay within some ten megabytes.
CHUNK = 1 << 16


def row_bits(rows: int) -> int:
    """Width of a row number."""
    return max(1, (rows - 1).bit_length())


class RowsParty(PartySession):
    """The parties of a rank that share in the clear: their rows, whole parties in each message."""

    def __init__(
        self,
        round: int,
        parties: tuple[int, ...],
        counts: np.ndarray,
        rows: np.ndarray,
        values: np.ndarray,
        chosen: np.ndarray,
        encoding: Encoding,
    ):
        """`counts` rows of each party, one after the other, their `values` in steps; only the `chosen` parties are sent."""
        self._round, self._parties, self._counts, self._rows, self._values = round, parties, counts, rows, values
        self._chosen, self._encoding = np.flatnonzero(chosen).tolist(), encoding

    def start(self) -> Iterator[Message]:
        group: list[int] = []
        taken = 0
        for index in self._chosen:
            if group and taken + self._counts[index] > MESSAGE_ROWS:
                yield self._message(group)
                group, taken = [], 0
            group.append(index)
            taken += int(self._counts[index])
        if group:
            yield self._message(group)

    def _message(self, group: list[int]) -> PlainRows:
        ends = np.concatenate(([0], np.cumsum(self._counts)))
        parties = tuple(self._parties[index] for index in group)
        at: slice | np.ndarray
        if group[-1] - group[0] + 1 == len(group):  # neighbours: no copy
            at = slice(ends[group[0]], ends[group[-1] + 1])
        else:
            at = np.concatenate([np.arange(ends[index], ends[index + 1]) for index in group])
        width = self._values.shape[1]
        bits, own_bits = row_bits(self._encoding.dimension // width), self._encoding.own_bits
        rows, values = pack(self._rows[at], bits), pack_signed(self._values[at].ravel(), own_bits)
        return PlainRows(self._round, alone(parties), parties, self._counts[group], rows, values, bits, own_bits, width)

    def receive(self, message: Message) -> Iterator[Message]:
        raise ProtocolError(f"got {type(message).__name__}, but it has nothing more to say", phase=Phase.UPDATE)


class RowServer(PlainServer):
    """Every party's rows into one exact sum. A party whose rows cannot be is dropped; its neighbours in a message stay. A row has
    its number with it whatever the support."""

    def _zeros(self) -> np.ndarray:
        return np.zeros((self._rows, self._width), np.int64)

    @property
    def _rows(self) -> int:
        return self._dimension // self._width

    def receive(self, message: Message) -> Answers:
        message = self._check_shape(message)
        rows, values = self._unpacked(message)
        good = self._good_parties(message, rows, values)
        kept = np.repeat(good, message.counts)
        whole = bool(good.all())
        self._add(rows if whole else rows[kept], values if whole else values[kept])
        heard = [party for party, fine in zip(message.parties, good.tolist()) if fine]
        self._missing.difference_update(message.parties)
        self._heard.extend(heard)
        return []

    def _check_shape(self, message: Message) -> PlainRows:
        def wrong(what: str) -> ProtocolError:
            return ProtocolError(what, party=next(iter(speakers(message)), None), phase=Phase.UPDATE)

        if not isinstance(message, PlainRows):
            raise wrong(f"sent {type(message).__name__}, expected PlainRows")
        if (message.round, message.purpose) != (self._round, Purpose.TRAINING):
            raise wrong(f"sent an update of round {message.round} in round {self._round}")
        if not message.parties:
            raise wrong("sent rows of nobody")
        if len(set(message.parties)) != len(message.parties) or not self._missing.issuperset(message.parties):
            raise wrong(
                "sent a message with a second update, or with one of a party that is not in this round's cohort"
            )
        said = message.width, message.row_bits, message.value_bits
        asked = self._width, row_bits(self._rows), self._encoding.own_bits
        if said != asked:
            text = "sent rows of {} values, {} bits a row number and {} a value, expected {}, {} and {}"
            raise wrong(text.format(*said, *asked))
        if int(message.counts.max(initial=0)) > self._rows:
            raise wrong(f"sent {int(message.counts.max())} rows of one party, there are {self._rows}")
        return message

    def _unpacked(self, message: PlainRows) -> tuple[np.ndarray, np.ndarray]:
        """(row numbers, their values), once it is known that they are no more than there can be."""
        total = int(message.counts.sum())
        try:
            rows = unpack(message.rows, total, message.row_bits).view(np.int64)
            values = unpack_signed(message.values, total * self._width, message.value_bits)
        except WireError as error:
            raise ProtocolError(str(error), party=next(iter(message.parties), None), phase=Phase.UPDATE) from None
        return rows, values.reshape(total, self._width)

    def _good_parties(self, message: PlainRows, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Which parties' rows exist, ascend, and hold values within the bound; the others are dropped with the reason."""
        counts = message.counts
        bad = rows >= self._rows
        ends = np.cumsum(counts)
        if rows.size > 1:
            steps = np.diff(rows) <= 0
            inner = ends[:-1]
            steps[inner[(inner > 0) & (inner < rows.size)] - 1] = False  # from one party to the next
            bad[1:] |= steps
        outside = np.zeros(rows.size, bool)
        if int(values.max(initial=0)) > self._encoding.steps or int(values.min(initial=0)) < -self._encoding.steps:
            outside[:] = ((values > self._encoding.steps) | (values < -self._encoding.steps)).any(axis=1)
        owner = np.repeat(np.arange(len(counts)), counts)
        good = np.ones(len(counts), bool)
        for wrong, what in (
            (bad, "sent rows that do not exist or do not ascend"),
            (outside, "sent a value out of range"),
        ):
            for index in np.unique(owner[wrong]):
                if good[index]:
                    good[index] = False
                    self._faults.append(Fault(message.parties[index], Phase.UPDATE, what))
                    self.drop(message.parties[index])
        return good

    def _add(self, rows: np.ndarray, values: np.ndarray) -> None:
        from scipy.sparse import csc_array

        for first in range(0, len(rows), CHUNK):
            chosen = rows[first : first + CHUNK]
            # One column a row that was sent, with a one where it belongs: the product adds each to its place.
            places = csc_array(
                (np.ones(chosen.size, np.int64), chosen, np.arange(chosen.size + 1)), shape=(self._rows, chosen.size)
            )
            self._total += places @ values[first : first + CHUNK].astype(np.int64)

    def result(self) -> Sum:
        return Sum(self._total.reshape(-1), tuple(sorted(self._heard)))
