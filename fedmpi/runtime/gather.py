"""Rank 0 gathers one session: it carries the aggregation's messages, keeps its deadlines and lets go of who is lost."""

import collections
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from fedmpi.aggregation.base import Answers, ServerSession, Sum
from fedmpi.errors import Fault, ProtocolError, TransportError
from fedmpi.runtime.mailbox import Mailbox
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.wire.message import Message, speakers
from fedmpi.wire.messages import TrainReport
from fedmpi.wire.phases import Purpose


@dataclass
class Outcome:
    """What a session brought: a sum, or the reason why there is none."""

    sum: Sum | None = None
    failed: str = ""
    coordinates: int = 0  # that each party sent
    reports: dict[int, np.ndarray] = field(default_factory=dict)  # a party's figures of its local work
    dropouts: collections.Counter[str] = field(default_factory=collections.Counter)
    complaints: list[str] = field(default_factory=list)


class Gathering:
    def __init__(
        self,
        mailbox: Mailbox,
        watch: Stopwatch,
        phase_deadline: float,
        before_opening: Callable[[tuple[int, ...], int], None] | None = None,
        columns: int = 0,
    ):
        """`before_opening` is told whose sum over how many coordinates it is, before anybody is asked for what opens it.
        `columns` of a party's report of its work; 0: no reports are asked for."""
        self._columns = columns
        self._mailbox, self._watch, self._phase_deadline = mailbox, watch, phase_deadline
        self._before_opening = before_opening
        self._outcome = Outcome()

    def run(
        self,
        session: ServerSession,
        round: int,
        cohort: tuple[int, ...],
        clear: Collection[int] = (),
        purpose: Purpose = Purpose.TRAINING,
    ) -> Outcome:
        """Carry the session to its end. `clear`: who may be at its local work for longer than a phase."""
        self._send(session, session.start())
        asked = frozenset(cohort)
        phase, deadline = session.phase_name, time.monotonic() + self._mailbox.patience
        last = deadline  # for local work
        while not session.done:
            if session.phase_name != phase:
                phase, deadline = session.phase_name, time.monotonic() + self._phase_deadline
            message = self._mailbox.take_of(round, purpose, deadline)
            if isinstance(message, TrainReport):
                self._take_report(message, round, asked)
            elif message is not None:
                if self._receive(session, message, round) and message.party in clear:
                    deadline = max(deadline, min(last, time.monotonic() + self._phase_deadline))
            elif time.monotonic() < last and not set(session.waiting()).isdisjoint(clear):
                # Whoever shares in the clear may still be at its local work, and its rank with it.
                deadline = min(last, time.monotonic() + self._phase_deadline)
            else:
                self._expire(session, round, cohort)
        return self._close(session, round)

    def _take_report(self, message: TrainReport, round: int, cohort: frozenset[int]) -> None:
        """The figures of parties that were asked for them, once each; others are let go of unread."""
        new = all(party in cohort and party not in self._outcome.reports for party in message.parties)
        if not (self._columns and new and message.figures.shape == (len(set(message.parties)), self._columns)):
            self._outcome.dropouts["caught"] += 1
            fault = Fault(next(iter(message.parties), None), message.PHASE, "sent a report that nobody asked for so")
            self._outcome.complaints.append(f"round {round}: {fault}; it is not read")
            return
        self._outcome.reports.update(zip(message.parties, message.figures))

    def _receive(self, session: ServerSession, message: Message, round: int) -> bool:
        """Whether the session took it."""
        try:
            with self._watch("aggregate"):
                answers = session.receive(message)
        except ProtocolError as error:
            self._outcome.dropouts["caught"] += 1
            self._outcome.complaints.append(f"round {round}: {error}; it is treated as dropped")
            self._send(session, [answer for party in speakers(message) for answer in session.drop(party)])
            return False
        self._send(session, answers)
        return True

    def _expire(self, session: ServerSession, round: int, cohort: tuple[int, ...]) -> None:
        self._outcome.dropouts["real"] += len(session.waiting())
        if session.waiting() == cohort:
            raise TransportError(f"round {round}: nobody answered within the deadline in {session.phase_name}")
        self._send(session, session.expire())

    def _send(self, session: ServerSession, answers: Answers) -> None:
        if session.openable and self._before_opening is not None:
            self._before_opening(session.openable, session.coordinates)
            self._before_opening = None
        self._mailbox.answer(answers)

    def _close(self, session: ServerSession, round: int) -> Outcome:
        outcome = self._outcome
        outcome.complaints += map(str, session.faults)
        outcome.dropouts["planned"] += session.planned
        outcome.coordinates = session.coordinates
        result = None if session.failed else session.result()
        if result is not None and result.survivors:
            outcome.sum = result
        else:
            outcome.failed = session.reason or f"round {round}: no party's update arrived"
            outcome.dropouts["failed_rounds"] += 1
            outcome.complaints.append(f"{outcome.failed}; the model stays as it was")
        return outcome
