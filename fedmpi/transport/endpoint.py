"""An endpoint sends and receives messages between ranks, point to point.

What is common to every transport lives here: framing, counting, chunking and reassembly. A transport adds `_post` (hand
one chunk to a rank), `_take` (one arrived chunk, if any) and `_unsent` (how much is still on its way out).
"""

import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from logging import DEBUG
from typing import Any, Protocol

from fedmpi.errors import TransportError, WireError
from fedmpi.log import log
from fedmpi.transport.ledger import Ledger
from fedmpi.transport.places import Places
from fedmpi.wire.frame import FRAMING, Buffer, Header
from fedmpi.wire.message import is_same
from fedmpi.wire.messages import Message, Tally, decode, encode, speakers

# MPI counts are 32-bit in many builds, so a frame above 2 GiB cannot be one message. Chunks from one sender arrive in
# order, and the frame's header says how many bytes belong together, so a chunk needs no header of its own.
CHUNK = 1 << 30

LONG = 5.0  # seconds of waiting that are worth a line in the log
LAST_POST = 1.0  # seconds in which messages go before the news that a rank is lost

# A waiting rank must not burn a core that a working rank needs: look, then sleep a little longer each time.
# While bytes are on their way a nap stays short: MPI moves a large message in pieces, one with each look. Both are for a rank that
# has a core to itself: a look costs more than the shortest nap, and twenty ranks that share a core would do nothing else.
SHORTEST_NAP, TRANSFER_NAP, LONGEST_NAP = 10e-6, 200e-6, 5e-3


def _in_words(message: Message) -> str:
    whose = speakers(message)
    about = f", {len(whose)} parties from {whose[0]}" if len(whose) > 1 else f", party {whose[0]}" if whose else ""
    test = ", test" if message.purpose else ""
    return f"{type(message).__name__}, round {message.round}{test}{about}"


class FrameError(WireError):
    """A frame that is none, or none that its sender may send: who sent it, and whether what follows it can still be read."""

    def __init__(self, source: int, what: str, lost: bool = False):
        self.source, self.what, self.lost = source, what, lost
        super().__init__(f"from rank {source}: {what}")


class RankLost(TransportError):
    """A rank that is dead, or that was not heard of for as long as ranks are waited for. It is told once of each."""

    def __init__(self, rank: int, why: str):
        self.rank, self.why = rank, why
        super().__init__(f"rank {rank} {why}")


class Limits(Protocol):
    """What a rank may make another one hold."""

    def payload(self, source: int, kind: int) -> int | None:
        """The largest payload of a message of this type from this rank; None: it has none to send."""

    def largest(self, source: int) -> int:
        """The largest payload of any message from this rank."""


class Endpoint(ABC):
    def __init__(self, rank: int, size: int, chunk: int = CHUNK, crowd: float = 1):
        """`crowd`: how many ranks share a core."""
        self.rank = rank
        self.size = size
        self.ledger = Ledger(rank)
        self.bytes_given = 0  # counted at the transport's own door, to hold the ledger against
        self._chunk = max(chunk, FRAMING)
        self._shortest_nap = min(crowd * SHORTEST_NAP, LONGEST_NAP)
        self._transfer_nap = min(crowd * TRANSFER_NAP, LONGEST_NAP)
        self._places = Places()
        self._latest: tuple[Message, memoryview] | None = None  # message and its frame
        self._partial: dict[int, list[Buffer]] = {}
        # For rank 0, whom the others could keep busy or make run out of memory; a client has one peer, and leaves if it lies.
        self.limits: Limits | None = None  # None: a message of any size that a header can announce
        self.muted: set[int] = set()  # whose messages are thrown away unread
        self.lost: dict[int, str] = {}  # ranks that are dead or silent for too long, and why
        self.returned: set[int] = set()  # those that were silent, and are heard of again
        self._expected: dict[
            int, int
        ] = {}  # muted rank -> the type of message with which it is one of the others again
        self._news: deque[tuple[float, RankLost]] = deque()  # those of them that nobody was told of, and since when
        self.spoken_of: Callable[[str], object] = lambda line: None  # told of a rank that begins to be silent
        self.parted: set[int] = set()  # who has sent a tally, the last thing that a client says ...
        self.closing = False  # ... once the run is over
        self._taken: Counter[int] = Counter()  # bytes that came from each rank since its last tally ...
        self.taken_by_tally: dict[int, int] = {}  # ... and how many that were at its last one, the tally included

    def send(self, rank: int, message: Message) -> None:
        """Start sending and return at once; the transport keeps the bytes until they are gone."""
        if log.isEnabledFor(DEBUG):
            log.debug("to rank %d: %s", rank, _in_words(message))
        self.ledger.record(message, rank, self._dispatch(rank, message))

    def _dispatch(self, rank: int, message: Message) -> int:
        """Hand the frame over, chunk by chunk; returns its payload bytes."""
        frame = self._frame(message)
        for start in range(0, len(frame), self._chunk):
            piece = frame[start : start + self._chunk]
            self.bytes_given += len(piece)
            self._post(rank, piece)
        return len(frame) - FRAMING

    def _frame(self, message: Message) -> memoryview:
        """What goes to many ranks is put together once."""
        if self._latest is None or not is_same(message, self._latest[0]):
            self._latest = message, encode(message, self._places.take)
        return self._latest[1]

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
        """The next message and the rank it came from, or None once `timeout` seconds (None: for ever) have passed. RankLost: a rank
        has gone that is not muted."""
        nap, began = self._shortest_nap, time.monotonic()
        deadline, spoken = math.inf if timeout is None else began + timeout, began
        while True:
            arrived = self._take()
            if arrived is not None:
                nap = self._shortest_nap
                complete = self._assemble(*arrived)
                if complete is not None:
                    if log.isEnabledFor(DEBUG):
                        log.debug("from rank %d: %s", complete[0], _in_words(complete[1]))
                    return complete
            now = time.monotonic()
            if arrived is None and now > spoken + LONG:
                spoken = now
                log.debug("has waited %.0f s for a message", now - began)
            if self._news and (arrived is None or now > self._news[0][0] + LAST_POST):
                raise self._news.popleft()[1]  # after what had come from it
            if now >= deadline:
                return None
            if arrived is None:
                nap = self._idle(nap)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent has left; TransportError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while waiting := self._unsent():
            if deadline is not None and time.monotonic() >= deadline:
                raise TransportError(f"rank {self.rank}: {waiting} chunks were not taken within {timeout:g} s")
            time.sleep(self._transfer_nap)

    def _idle(self, nap: float) -> float:
        longest = self._transfer_nap if self._sending() else LONGEST_NAP
        time.sleep(min(nap, longest))
        return min(2 * nap, longest)

    def mute(self, rank: int) -> None:
        """From now on what this rank sends is thrown away unread, and what it does not take is not waited for."""
        self.muted.add(rank)
        self._partial.pop(rank, None)

    def watch(self, deadline: float) -> None:  # noqa: B027
        """From now on a rank that was not heard of for so many seconds is lost."""

    def lose(self, rank: int, why: str) -> None:
        if rank in self.lost:
            return
        self.lost[rank] = why
        self._partial.pop(rank, None)
        if rank not in self.muted:
            self._news.append((time.monotonic(), RankLost(rank, why)))

    def behind(self, age: float) -> set[int]:
        """Ranks, not muted, that have not taken something which was sent to them so many seconds ago."""
        return set()

    def held(self, rank: int) -> int:
        """Bytes of a frame from this rank that has not arrived whole."""
        return sum(len(part) for part in self._partial.get(rank, ()))

    def _assemble(self, source: int, piece: Buffer) -> tuple[int, Message] | None:
        if source in self.muted and not self._is_expected(source, piece):
            self._throw_away(source, piece)
            return None
        self._taken[source] += len(piece)
        pieces = self._partial.setdefault(source, [])
        pieces.append(piece)
        try:
            header = Header.unpack(pieces[0])
            wanted, have = FRAMING + header.length, self.held(source)
            if len(pieces) == 1:
                self._check_limit(source, header, have < wanted)
            if have < wanted and len(piece) == self._chunk:
                return None
            message = decode(pieces[0] if len(pieces) == 1 else b"".join(pieces), header)
        except FrameError:
            del self._partial[source]
            raise
        except WireError as error:
            del self._partial[source]
            raise FrameError(source, str(error)) from None
        del self._partial[source]
        if isinstance(message, Tally):
            self.parted.add(source)
            self.taken_by_tally[source] = self._taken.pop(source)
        return source, message

    def _check_limit(self, source: int, header: Header, more: bool) -> None:
        """By the first chunk of a frame, before the rest of it is collected; `more`: there is a rest."""
        if self.limits is None:
            return
        most = self.limits.payload(source, header.type)
        if most is None:
            raise FrameError(source, f"frame of type {header.type}, which a client does not send in this run", more)
        if header.length > most:
            raise FrameError(
                source, f"frame of type {header.type} announces {header.length} bytes, at most {most} are due", True
            )

    def _throw_away(self, source: int, piece: Buffer) -> None:
        """A tally among it is looked for all the same: who has sent it is about to leave, and need not be waited for."""
        self._taken[source] += len(piece)
        try:
            if Header.unpack(piece).type == Tally.TYPE:
                self.parted.add(source)
                del self._taken[source]  # it counts anew
        except WireError:
            pass

    def _is_expected(self, source: int, piece: Buffer) -> bool:
        try:
            if Header.unpack(piece).type != self._expected.get(source):
                return False
        except WireError:
            return False
        del self._expected[source]
        self.muted.discard(source)
        return True

    def expect(self, rank: int, kind: type[Message]) -> None:
        """A muted rank is one of the others again with its next message of this kind."""
        self._expected[rank] = kind.TYPE

    def welcome(self, rank: int) -> None:
        """A rank that was silent is there again, and may be lost again."""
        self.lost.pop(rank, None)
        self.returned.discard(rank)

    def leave(self, grace: float, code: int = 0) -> None:
        """Rank 0, before its process ends with this exit code, once everything is written; it may not return. MPI waits for every rank
        before any can leave, and nobody knows what a muted one will do: it has some seconds to say its last word."""
        deadline, nap = time.monotonic() + grace, self._shortest_nap
        awaited = self.muted - self.lost.keys()
        while not awaited <= self.parted and time.monotonic() < deadline:
            arrived = self._take()
            if arrived is None:
                nap = self._idle(nap)
            elif arrived[0] in self.muted:
                self._throw_away(*arrived)
        self._close(grace, code, awaited <= self.parted)

    def _close(self, grace: float, code: int, in_order: bool) -> None:
        """`in_order`: everybody who can has said its last word."""
        if self.muted:
            self.abort(code)

    def part(self, at_once: bool = False) -> None:  # noqa: B027
        """A client, before its process ends: when rank 0 says so, or, if it was given up, at once. It may not return."""

    @abstractmethod
    def _post(self, rank: int, piece: memoryview) -> None: ...

    @abstractmethod
    def _take(self) -> tuple[int, Buffer] | None: ...

    @abstractmethod
    def _unsent(self) -> int:
        """Chunks that are on their way to ranks that are waited for."""

    def _sending(self) -> bool:
        """Whether something may still be on its way, as it was known at the last look."""
        return False

    def speak_first(self) -> None:  # noqa: B027
        """Before saying what failed: returns on the first rank of a host that comes here, and silences the others."""

    def abort(self, code: int) -> None:
        """End the whole job, every rank of it."""
        raise SystemExit(code)
