"""The ledger: every message, counted where its bytes leave.

`wire` is what was given to the transport: once per rank where several parties share a download. `logical` is what each
party would have moved on a link of its own, so it does not depend on placement. Both are split into payload and framing.

A row is kept for each party and round. A run of many parties and rounds would drown in them: above `MOST_DETAIL` a message
that serves several parties is one row, party -1, with their logical bytes added up. The totals are the same.
"""

import csv
import io
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


class Ledger:
    """Counts of one rank's outgoing messages; rank 0 merges the others' at the end."""

    def __init__(self, rank: int, detailed: bool = True):
        self.rank = rank
        self.detailed = detailed
        self._rows: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0] * len(COUNTS))

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

    def table(self) -> NDArray[np.int64]:
        """All rows, keys then counts, in a fixed order."""
        rows = [(*key, *counts) for key, counts in sorted(self._rows.items())]
        return np.array(rows, np.int64).reshape(len(rows), len(KEYS) + len(COUNTS))

    def rows_after(self, message: Message, peer: int) -> int:
        """How many rows the table will have once `message` is recorded: Tally carries its own row."""
        later = Ledger(self.rank, self.detailed)
        later.record(message, peer, 0)
        return len(set(self._rows) | set(later._rows))

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
        at = COUNTS.index(column)
        wanted = [(KEYS.index(name), _code(name, value)) for name, value in where.items()]
        return sum(
            counts[at] for key, counts in self._rows.items() if all(key[index] == code for index, code in wanted)
        )

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
        chosen, way = [_code("phase", phase) for phase in phases], _code("direction", direction)
        places = KEYS.index("phase"), KEYS.index("direction")
        rows = [counts for key, counts in self._rows.items() if key[places[0]] in chosen and key[places[1]] == way]
        return {name: sum(counts[at] for counts in rows) for at, name in enumerate(COUNTS) if name != "messages"}

    def _add(self, key: tuple[int, ...], *counts: int) -> None:
        row = self._rows[key]
        for index, count in enumerate(counts):
            row[index] += count


def _code(name: str, value: int | str) -> int:
    """How a row writes a key."""
    codes: dict[str, tuple[str, ...]] = {"purpose": PURPOSES, "phase": PHASES, "direction": DIRECTIONS}
    return codes[name].index(str(value)) if name in codes else int(value)
