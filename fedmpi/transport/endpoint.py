"""An endpoint sends and receives messages between ranks, point to point.

What is common to every transport lives here: framing, counting, chunking and reassembly. A transport adds `_post` (hand
one chunk to a rank), `_take` (one arrived chunk, if any) and `_unsent` (how much is still on its way out).
"""

import time
from abc import ABC, abstractmethod
from typing import Any

from fedmpi.errors import TransportError, WireError
from fedmpi.transport.ledger import Ledger
from fedmpi.wire.frame import FRAMING, Buffer, Header
from fedmpi.wire.messages import Message, Tally, decode, encode

# MPI counts are 32-bit in many builds, so a frame above 2 GiB cannot be one message. Chunks from one sender arrive in
# order, and the frame's header says how many bytes belong together, so a chunk needs no header of its own.
CHUNK = 1 << 30

# A waiting rank must not burn a core that a working rank needs: look, then sleep a little longer each time.
# While bytes are on their way a nap stays short: MPI moves a large message in pieces, one with each look.
SHORTEST_NAP, TRANSFER_NAP, LONGEST_NAP = 10e-6, 200e-6, 5e-3


class Endpoint(ABC):
    def __init__(self, rank: int, size: int, chunk: int = CHUNK):
        self.rank = rank
        self.size = size
        self.ledger = Ledger(rank)
        self.bytes_given = 0  # counted at the transport's own door, to hold the ledger against
        self._chunk = max(chunk, FRAMING)
        self._partial: dict[int, list[Buffer]] = {}

    def send(self, rank: int, message: Message) -> None:
        """Start sending and return at once; the transport keeps the bytes until they are gone."""
        self.ledger.record(message, rank, self._dispatch(rank, message))

    def _dispatch(self, rank: int, message: Message) -> int:
        """Hand the frame over, chunk by chunk; returns its payload bytes."""
        frame = encode(message)
        for start in range(0, len(frame), self._chunk):
            piece = frame[start : start + self._chunk]
            self.bytes_given += len(piece)
            self._post(rank, piece)
        return len(frame) - FRAMING

    def send_tally(self, rank: int, facts: dict[str, Any]) -> None:
        """Send the ledger of everything up to and including this very message, and start a new one."""
        draft = Tally(facts=facts)
        rows = self.ledger.rows_after(draft, rank)
        size = Tally.wire_size(rows, len(draft.buffers()[-1]))
        self.ledger.record(draft, rank, size)
        closed, self.ledger = self.ledger, Ledger(self.rank, self.ledger.detailed)
        given, self.bytes_given = self.bytes_given + FRAMING + size, 0
        self._dispatch(rank, Tally(bytes_given=given, rows=closed.table(), facts=facts))
        self.bytes_given = 0  # its own bytes are in the tally already

    def poll(self, timeout: float | None = None) -> tuple[int, Message] | None:
        """The next message and the rank it came from, or None once `timeout` seconds (None: for ever) have passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        nap = SHORTEST_NAP
        while True:
            arrived = self._take()
            if arrived is not None:
                nap = SHORTEST_NAP
                complete = self._assemble(*arrived)
                if complete is not None:
                    return complete
                continue
            if deadline is not None and time.monotonic() >= deadline:
                return None
            nap = self._idle(nap)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent has left; TransportError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        nap = SHORTEST_NAP
        while waiting := self._unsent():
            if deadline is not None and time.monotonic() >= deadline:
                raise TransportError(f"rank {self.rank}: {waiting} chunks were not taken within {timeout:g} s")
            nap = self._idle(nap)

    def _idle(self, nap: float) -> float:
        longest = TRANSFER_NAP if self._unsent() else LONGEST_NAP
        time.sleep(min(nap, longest))
        return min(2 * nap, longest)

    def _assemble(self, source: int, piece: Buffer) -> tuple[int, Message] | None:
        pieces = self._partial.setdefault(source, [])
        pieces.append(piece)
        try:
            wanted = FRAMING + Header.unpack(pieces[0]).length
            have = sum(len(part) for part in pieces)
            if have < wanted and len(piece) == self._chunk:
                return None
            frame = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            del self._partial[source]
            return source, decode(frame)
        except WireError as error:
            self._partial.pop(source, None)
            raise WireError(f"from rank {source}: {error}") from None

    @abstractmethod
    def _post(self, rank: int, piece: memoryview) -> None: ...

    @abstractmethod
    def _take(self) -> tuple[int, Buffer] | None: ...

    @abstractmethod
    def _unsent(self) -> int: ...

    def speak_first(self) -> None:  # noqa: B027
        """Before saying what failed: returns on the first rank of a host that comes here, and silences the others."""

    def abort(self, code: int) -> None:
        """End the whole job, every rank of it."""
        raise SystemExit(code)
