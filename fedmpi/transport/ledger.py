"""The ledger: every message, counted where its bytes leave.

`wire` is what was given to the transport: once per rank where several parties share a download. `logical` is what each
party would have moved on a link of its own, so it does not depend on placement. Both are split into payload and framing.

A row is kept for each party and round. A run of many parties and rounds would drown in them: above `MOST_DETAIL` a message
that serves several parties is one row, party -1, with their logical bytes added up. The totals are the same.
"""

import csv
import io
import zlib
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import DataError
from fedmpi.wire.frame import FRAMING, NOBODY
from fedmpi.wire.message import MESSAGES, Message
from fedmpi.wire.phases import Phase, Purpose

KEYS = ("round", "purpose", "phase", "message", "direction", "rank", "party")
COUNTS = ("messages", "wire_payload", "wire_framing", "logical_payload", "logical_framing")
PURPOSES = tuple(purpose.name.lower() for purpose in Purpose)
PHASES = tuple(Phase)
DIRECTIONS = ("down", "up")

# Parties times rounds of a run whose every party has its own rows; each is about a hundred bytes a message and phase.
MOST_DETAIL = 500_000
LOOSE = 4096  # rows that are not packed


class Ledger:
    """Counts of one rank's outgoing messages; rank 0 merges the others' at the end."""

    def __init__(self, rank: int, detailed: bool = True):
        self.rank = rank
        self.detailed = detailed
        self._rows: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0] * len(COUNTS))
        # A row in Python is half a kilobyte, and in a long run there are millions: what is not of late is kept packed.
        self._packed: list[bytes] = []

    def record(self, message: Message, peer: int, payload: int) -> None:
        """Count `message` leaving for rank `peer`, as `payload` bytes behind one header."""
        down = self.rank == 0
        way = (0, peer) if down else (1, self.rank)
        key = (message.round, int(message.purpose), PHASES.index(message.PHASE), message.TYPE, *way)
        shares = list(message.shares())
        single = shares[0][0] if len(shares) == 1 else NOBODY
        self._add((*key, single), 1, payload, FRAMING, 0, 0)
        if self.detailed:
            for party, size in shares:
                self._add((*key, party), 0, 0, 0, size, FRAMING)
        else:
            self._add((*key, single), 0, 0, 0, sum(size for _, size in shares), FRAMING * len(shares))

    def charge(self, message: Message, peer: int, parties: Iterable[int], payload: int) -> None:
        """What `message`, or more than one of its kind, would have been to each of these parties of rank `peer` on a link of its own:
        nothing leaves by this."""
        key = message.round, int(message.purpose), PHASES.index(message.PHASE), message.TYPE, 0, peer
        if self.detailed:
            for party in parties:
                self._add((*key, party), 0, 0, 0, payload, FRAMING)
        else:
            number = len(list(parties))
            self._add((*key, NOBODY), 0, 0, 0, number * payload, number * FRAMING)

    def table(self) -> NDArray[np.int64]:
        """All rows, keys then counts, in a fixed order."""
        rows = np.concatenate([*map(_unpack, self._packed), _array(self._rows)])
        keys, places = np.unique(rows[:, : len(KEYS)], axis=0, return_inverse=True)
        counts = np.zeros((len(keys), len(COUNTS)), np.int64)
        np.add.at(counts, places.reshape(-1), rows[:, len(KEYS) :])
        return np.concatenate([keys, counts], axis=1)

    def _pack(self) -> None:
        self._packed.append(zlib.compress(_array(self._rows).T.tobytes(), 1))
        self._rows.clear()

    def rows_after(self, message: Message, peer: int) -> int:
        """How many rows the table will have once `message` is recorded: Tally carries its own row."""
        later = Ledger(self.rank, self.detailed)
        later.record(message, peer, 0)
        later.merge(self.table())
        return len(later.table())

    def merge(self, table: NDArray[np.int64]) -> None:
        """Add another rank's rows, or one's own of before an interruption; DataError adds none of them."""
        if table.shape[1:] != (len(KEYS) + len(COUNTS),):
            raise DataError(
                f"a ledger of shape {table.shape}, expected rows of {len(KEYS) + len(COUNTS)}: of another version"
            )
        known = {"purpose": range(len(PURPOSES)), "phase": range(len(PHASES)), "direction": range(len(DIRECTIONS))}
        for name, codes in (known | {"message": MESSAGES}).items():
            for code in np.unique(table[:, KEYS.index(name)]).tolist():
                if code not in codes:
                    raise DataError(f"a ledger's row of {name} {code}: there is no such")
        for row in table.tolist():
            self._add(tuple(row[: len(KEYS)]), *row[len(KEYS) :])

    def total(self, column: str, **where: int | str) -> int:
        """The sum of one count over the rows that match, e.g. total("wire_payload", direction="up", phase="update")."""
        table, at = self.table(), len(KEYS) + COUNTS.index(column)
        for name, value in where.items():
            table = table[table[:, KEYS.index(name)] == _code(name, value)]
        return sum(table[:, at].tolist())  # as Python's integers, which do not wrap

    def bytes_given(self) -> int:
        return self.total("wire_payload") + self.total("wire_framing")

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(KEYS + COUNTS)
        for round, purpose, phase, kind, way, *rest in self.table().tolist():
            names = PURPOSES[purpose], PHASES[phase], MESSAGES[kind].__name__, DIRECTIONS[way]
            writer.writerow([round, *names, *rest])
        return text.getvalue()

    def summary(self, direction: str, phases: Iterable[str] = PHASES) -> dict[str, int]:
        """The four byte totals of one direction, as summary.json has them."""
        table = self.table()
        chosen = np.isin(table[:, KEYS.index("phase")], [_code("phase", phase) for phase in phases])
        rows = table[chosen & (table[:, KEYS.index("direction")] == _code("direction", direction)), len(KEYS) :]
        return {name: sum(rows[:, at].tolist()) for at, name in enumerate(COUNTS) if name != "messages"}

    def _add(self, key: tuple[int, ...], *counts: int) -> None:
        row = self._rows[key]
        for index, count in enumerate(counts):
            row[index] += count
        if len(self._rows) >= LOOSE:
            self._pack()


def _array(rows: dict[tuple[int, ...], list[int]]) -> NDArray[np.int64]:
    flat = [(*key, *counts) for key, counts in rows.items()]
    return np.array(flat, np.int64).reshape(len(flat), len(KEYS) + len(COUNTS))


def _unpack(packed: bytes) -> NDArray[np.int64]:
    columns = np.frombuffer(zlib.decompress(packed), np.int64).reshape(len(KEYS) + len(COUNTS), -1)
    return np.ascontiguousarray(columns.T)


def _code(name: str, value: int | str) -> int:
    """How a row writes a key."""
    codes: dict[str, tuple[str, ...]] = {"purpose": PURPOSES, "phase": PHASES, "direction": DIRECTIONS}
    return codes[name].index(str(value)) if name in codes else int(value)
