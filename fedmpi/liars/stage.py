"""Where an attack is played: all ranks of one act, each in its place, over any transport.

An act is one start of all ranks. When it is over every rank says so to rank 0, a refusal at once and anything else when rank 0 asks, so
that a rank that refuses leaves in good order and nobody waits for it; the message for it is a tally, which a real rank 0 takes for an
offence of somebody who has left.
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fedmpi.config import Config
from fedmpi.errors import FedmpiError, TransportError
from fedmpi.report.terminal import Terminal
from fedmpi.runtime.rank import run_client
from fedmpi.transport.endpoint import Endpoint, FrameError
from fedmpi.wire.frame import FRAMING, Buffer
from fedmpi.wire.message import Message
from fedmpi.wire.messages import Stop, Tally

CANARY = "fedmpi.liars.canary"
WORD = "attack"  # of a report, among the facts of its tally
OVER = 99  # the code of the Stop that ends an act
LAST_WORDS = 10.0  # seconds that rank 0 waits for reports


class Quiet(Terminal):
    """Keeps the warnings of a run, and shows nothing."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def say(self, line: str) -> None:
        pass

    def warn(self, line: str) -> None:
        self.warnings.append(line)

    def progress(self, row: dict, rounds: int) -> None:
        pass

    def close(self) -> None:
        pass

    def table(self, summary: dict, statement: object, out: object) -> None:
        pass


class Liar(Protocol):
    def says(self, endpoint: "Forged", rank: int, message: Message) -> Iterable[Message]:
        """What is sent in place of a message."""

    def hears(self, endpoint: "Forged", source: int, message: Message) -> Message | None:
        """What the liar's own copy of the real code gets to see of one that arrived; None: nothing."""


class Forged(Endpoint):
    """A liar's endpoint: the real server or client behind it does not know what becomes of its words. Remembers everything."""

    def __init__(self, inner: Endpoint, liar: Liar):
        super().__init__(inner.rank, inner.size)
        self.inner, self._liar = inner, liar
        self.sent: list[tuple[int, Message]] = []
        self.heard: list[tuple[int, Message]] = []
        self.reports: dict[int, Report] = {}

    def _dispatch(self, rank: int, message: Message) -> int:
        made = list(self._liar.says(self, rank, message))
        self.sent += [(rank, one) for one in made]
        # The ledger counts one header; those of more than one message are so much more payload.
        return sum(super(Forged, self)._dispatch(rank, one) for one in made) + FRAMING * max(0, len(made) - 1)

    def poll(self, timeout: float | None = None) -> tuple[int, Message] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self.rank == 0 and len(self.reports) == self.size - 1:
                raise TransportError(
                    "every rank has refused and left"
                )  # or the real server would wait for its deadlines
            arrived = super().poll(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if arrived is None:
                return None
            source, message = arrived
            report = report_in(message)
            if report is not None:
                self.reports[source] = report
            else:
                self.heard.append(arrived)
            kept = self._liar.hears(self, source, message)
            if kept is not None:
                return source, kept

    def overhear(self, timeout: float) -> Message | None:
        """The next message, if there is one, which the liar keeps to itself."""
        arrived = super().poll(timeout)
        return None if arrived is None else arrived[1]

    def raw(self, rank: int, piece: bytes) -> None:
        """Bytes that no real endpoint sends."""
        self._post(rank, memoryview(piece))

    def _post(self, rank: int, piece: memoryview) -> None:
        self.inner._post(rank, piece)

    def _take(self) -> tuple[int, Buffer] | None:
        return self.inner._take()

    def _unsent(self) -> int:
        return self.inner._unsent()

    def backlog(self) -> int:
        """Pieces that the other side has not taken yet."""
        return self._unsent()


# ---- how an act ends ----


@dataclass(frozen=True)
class Report:
    """What a rank says of the act when it is over for it."""

    refused: str  # the one line of its error; empty: it found nothing wrong
    canary: bool  # whether a module that only rank 0 named was imported


def report_in(message: Message) -> Report | None:
    if isinstance(message, Tally) and isinstance(message.facts.get(WORD), dict):
        return Report(**message.facts[WORD])
    return None


def attend(endpoint: Endpoint, own: Config) -> None:
    """A rank that is not rank 0, for one act: the real client as it is, honest unless its endpoint is not."""
    refused = ""
    try:
        run_client(endpoint, own)
    except FedmpiError as error:
        refused = str(error)
        _report(endpoint, refused)
    while not _is_over(endpoint):
        pass
    if not refused:
        _report(endpoint, "")
    endpoint.flush(LAST_WORDS)


def _report(endpoint: Endpoint, refused: str) -> None:
    endpoint.send(0, Tally(facts={WORD: {"refused": refused, "canary": CANARY in sys.modules}}))


def _is_over(endpoint: Endpoint) -> bool:
    try:
        arrived = endpoint.poll()
    except FrameError:
        return False
    return arrived is not None and isinstance(arrived[1], Stop) and arrived[1].code == OVER


def close(endpoint: Endpoint, reports: dict[int, Report]) -> set[int]:
    """Rank 0: end the act for everybody and gather what each has to say, in `reports`; returns the ranks that said nothing."""
    endpoint.muted.clear()
    endpoint.limits = None
    inner = getattr(endpoint, "inner", endpoint)
    inner.muted.clear()
    inner.limits = None
    others = set(range(1, endpoint.size))
    for rank in others:
        endpoint.send(rank, Stop())  # for who is still in the run
        endpoint.send(rank, Stop(code=OVER))
    deadline = time.monotonic() + LAST_WORDS
    while others - reports.keys() and time.monotonic() < deadline:
        try:
            arrived = endpoint.poll(deadline - time.monotonic())
        except FrameError:
            continue  # what is left of a lie
        if arrived is not None and (report := report_in(arrived[1])) is not None:
            reports[arrived[0]] = report
    return others - reports.keys()
