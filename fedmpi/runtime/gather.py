"""Rank 0 gathers one session: it carries the aggregation's messages, keeps its deadlines and lets go of who is lost."""

import collections
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from fedmpi.aggregation.base import Answers, ServerSession, Sum
from fedmpi.errors import Fault, ProtocolError, TransportError
from fedmpi.log import log
from fedmpi.runtime.mailbox import Mailbox, Out
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.wire.message import Message, speakers
from fedmpi.wire.messages import TrainReport
from fedmpi.wire.phases import Phase, Purpose


@dataclass
class Outcome:
    """What a session brought: a sum, or the reason why there is none."""

    sum: Sum | None = None
    failed: str = ""
    coordinates: int = 0  # that each party sent
    reports: dict[int, np.ndarray] = field(default_factory=dict)  # a party's figures of its local work
    lost: dict[int, str] = field(default_factory=dict)  # party -> the phase before which its rank was lost
    late: dict[int, str] = field(
        default_factory=dict
    )  # the same of who missed a deadline: its rank may be lost as well, and found so later
    dropouts: collections.Counter[str] = field(default_factory=collections.Counter)
    complaints: list[str] = field(default_factory=list)
    disputed: bool = False  # what some dealt, or say of it, cannot be


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
        self._gone: set[int] = set()  # benched, caught or too late: nothing of theirs is read any more
        self._lost: set[int] = set()  # of these, those whose rank was lost

    def run(
        self,
        session: ServerSession,
        round: int,
        cohort: tuple[int, ...],
        clear: Collection[int] = (),
        purpose: Purpose = Purpose.TRAINING,
    ) -> Outcome:
        """Carry the session to its end. `clear`: who may be at its local work for longer than a phase."""
        caught, name = (
            self._mailbox.caught,
            f"round {round}" if purpose is Purpose.TRAINING else f"test figures of round {round}",
        )
        self._mailbox.conduct.begin(name)
        self._cohort, self._clear = frozenset(cohort), clear
        self._send(session, session.start())
        behind = self._mailbox.conduct.behind
        self._outcome.dropouts["real"] += sum(self._mailbox.placement.rank_of(party) in behind for party in cohort)
        self._lost = {party for party in cohort if self._is_lost(party)}
        self._sit_out(session, set(cohort) - set(session.waiting()) - set(session.vanished))
        self._lose(session, filter(self._mailbox.conduct.is_absent, cohort))
        asked = session.waiting()
        phase, deadline = session.phase_name, time.monotonic() + self._mailbox.patience
        last = deadline  # for local work
        log.debug("%s, %s: waiting for parties %s", name, phase, session.waiting())

        def gone(party: int) -> bool:
            return party in self._gone or party in session.vanished

        while not session.done:
            if session.phase_name != phase:
                phase, deadline = session.phase_name, time.monotonic() + self._phase_deadline
                log.debug("%s, %s: waiting for parties %s", name, phase, session.waiting())
                # Whoever had answered before it was lost is asked once more, and not heard.
                self._lose(session, [party for party in session.waiting() if party in self._gone])
                continue
            arrived = self._mailbox.take_of(round, purpose, deadline, gone)
            if isinstance(arrived, Out):
                self._lost.update(arrived.parties if arrived.lost else ())
                self._lose(session, arrived.parties)
            elif arrived is not None:
                if self._receive(session, *arrived) and arrived[1].party in clear:
                    deadline = max(deadline, min(last, time.monotonic() + self._phase_deadline))
            elif time.monotonic() < last and not set(session.waiting()).isdisjoint(clear):
                # Whoever shares in the clear may still be at its local work, and its rank with it.
                deadline = min(last, time.monotonic() + self._phase_deadline)
            else:
                self._expire(session, round, asked)
        self._close(session, round)
        self._outcome.dropouts["real"] += len(self._outcome.lost)
        self._outcome.dropouts["caught"] += self._mailbox.caught - caught
        return self._outcome

    def _sit_out(self, session: ServerSession, parties: Collection[int]) -> None:
        """Who is in the cohort, and has no keys: as one that is late, and was not waited for; or is lost."""
        self._gone.update(parties)
        phases = {party: self._phase_of(session, party) for party in parties}
        late = [party for party in parties if not self._mailbox.conduct.is_absent(party)]
        self._outcome.dropouts["real"] += len(late)
        self._outcome.late.update({party: phases[party] for party in late})
        self._outcome.lost.update({party: phases[party] for party in self._lost.intersection(parties)})

    def _receive(self, session: ServerSession, source: int, message: Message) -> bool:
        """Whether the session took it."""
        if isinstance(message, TrainReport):
            self._take_report(session, source, message)
            return False
        try:
            with self._watch("aggregate"):
                answers = session.receive(message)
        except ProtocolError as error:
            self._lose(session, self._mailbox.blame_speakers(source, speakers(message), str(error)).parties)
            return False
        self._send(session, answers)
        return True

    def _take_report(self, session: ServerSession, source: int, message: TrainReport) -> None:
        """The figures of parties that were asked for them, once each. One that is not finite is no offence: training can diverge."""
        parties, shape = message.parties, (len(message.parties), self._columns)
        wrong = ""
        if not (self._columns and parties and self._cohort.issuperset(parties)):
            wrong = "sent a report that nobody asked for"
        elif len(set(parties)) < len(parties) or not self._outcome.reports.keys().isdisjoint(parties):
            wrong = "reported a party's work twice"
        elif message.figures.shape != shape:
            wrong = f"sent a report of {message.figures.shape[1]} figures a party, expected {self._columns}"
        else:
            norms, cut = message.figures[:, -2:].T
            if (norms < 0).any() or not ((cut >= 0) & (cut <= 1)).all():
                wrong = "sent a negative norm of an update, or a share of it that was cut which is not between 0 and 1"
        if wrong:
            return self._lose(session, self._mailbox.blame(source, wrong).parties)
        rows = zip(parties, message.figures)
        self._outcome.reports.update({party: row for party, row in rows if party not in self._gone})

    def _lose(self, session: ServerSession, parties: Iterable[int]) -> None:
        """Go on without these, and without what they said of themselves."""
        lost = self._cohort.intersection(parties)
        self._gone |= lost
        for party in sorted(lost):
            if party in self._lost:
                if party not in session.waiting():
                    continue  # what it said last stands; it will be missed in the phase after this one
                self._outcome.lost.setdefault(party, self._phase_of(session, party))
            else:
                self._outcome.reports.pop(party, None)
            self._send(session, session.drop(party))

    def _phase_of(self, session: ServerSession, party: int) -> str:
        """What it was waited for in, as a dropout plan has it."""
        in_clear = party in self._clear and session.phase_name != Phase.SUPPORT
        return Phase.UPDATE if in_clear else session.phase_name

    def _is_lost(self, party: int) -> bool:
        conduct = self._mailbox.conduct
        return party in conduct.lost or self._mailbox.placement.rank_of(party) in conduct.lost_ranks

    def _expire(self, session: ServerSession, round: int, asked: tuple[int, ...]) -> None:
        late = session.waiting()
        log.debug("round %d, %s: the deadline has passed for parties %s", round, session.phase_name, late)
        self._outcome.dropouts["real"] += len(late)
        ranks = set(map(self._mailbox.placement.rank_of, late))
        if late == asked and ranks == set(self._mailbox.placement.ranks()) - self._mailbox.conduct.gone_ranks:
            raise TransportError(f"round {round}: nobody answered within the deadline in {session.phase_name}")
        self._gone.update(late)
        self._outcome.late.update({party: self._phase_of(session, party) for party in late})
        self._send(session, session.expire())

    def _send(self, session: ServerSession, answers: Answers) -> None:
        if session.openable and self._before_opening is not None:
            self._before_opening(session.openable, session.coordinates)
            self._before_opening = None
        self._mailbox.answer(answers)

    def _close(self, session: ServerSession, round: int) -> None:
        outcome = self._outcome
        doubts: dict[int | None, list[Fault]] = {}
        for fault in session.faults:
            if fault.certain and fault.party is not None:
                rank = self._mailbox.placement.rank_of(fault.party)
                self._mailbox.blame_speakers(rank, (fault.party,), str(fault))
            else:
                doubts.setdefault(fault.party, []).append(fault)
        for faults in doubts.values():
            more = f", and {len(faults) - 1} times more" if len(faults) > 1 else ""
            outcome.complaints.append(f"round {round}: {faults[0]}{more}; it, or who says so, lies")
        self._mailbox.weigh(session.disputes)
        outcome.disputed = bool(session.disputes)
        outcome.dropouts["planned"] += session.planned
        outcome.coordinates = session.coordinates
        result = None if session.failed else session.result()
        if result is not None and result.survivors:
            outcome.sum = result
        else:
            outcome.failed = session.reason or f"round {round}: no party's update arrived"
            outcome.dropouts["failed_rounds"] += 1
            outcome.complaints.append(f"{outcome.failed}; the model stays as it was")
