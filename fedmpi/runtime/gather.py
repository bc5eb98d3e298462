"""Rank 0 gathers one round: it carries the aggregation's messages, keeps its deadlines and lets go of who is lost."""

import collections
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from fedmpi.aggregation.base import Answers, ServerSession, Sum
from fedmpi.aggregation.choose import Aggregator
from fedmpi.crypto.prg import KeyStream
from fedmpi.errors import ProtocolError, TransportError, WireError
from fedmpi.privacy.encoding import Encoding
from fedmpi.wire.messages import Message, SupportProposal, SupportUnion, TrainReport, speakers
from fedmpi.wire.support import decode_support, encode_support


@dataclass
class Outcome:
    """What a round brought: a sum, or the reason why there is none."""

    sum: Sum | None = None
    support: np.ndarray | None = None  # the coordinates of the sum; None: all
    openable: tuple[int, ...] = ()  # whose sum rank 0 has asked to open: it may have it, now or late
    coordinates: int = 0  # that each party sent
    figures: dict = field(default_factory=dict)  # for the round's row
    dropouts: collections.Counter = field(default_factory=collections.Counter)
    complaints: list[str] = field(default_factory=list)


class Gathering:
    def __init__(self, server, round: int, cohort: tuple[int, ...]):
        self.server = server
        self.round = round
        self.cohort = cohort
        self.clear: frozenset[int] = frozenset()  # who shares in the clear, once the aggregation runs
        self.reports: dict[int, np.ndarray] = {}  # a party's figures
        self.outcome = Outcome()

    def run(self) -> Outcome:
        server, outcome = self.server, self.outcome
        release, lost = server.release, set()
        if server.config.aggregation.support == "union":
            union, lost = self.agree_on_support()
            outcome.support, release = union, release.over(len(union))
        elif server.config.aggregation.support == "shared":
            outcome.support = server.algorithm.public_support(server.theta)
        outcome.coordinates = release.encoding.dimension
        return self.sum(server.aggregator, release.encoding, lost, server.algorithm.most_lost(server.theta))

    def sum(
        self, aggregator: Aggregator, encoding: Encoding, lost: Iterable[int] = (), most_lost: int | None = None
    ) -> Outcome:
        """Run the aggregation; `lost` are gone before it starts, and `most_lost` may be by the end."""
        server = self.server
        self.clear = frozenset(aggregator.clear)
        session = aggregator.server(
            self.round,
            self.cohort,
            encoding,
            KeyStream.from_os(b"graph"),  # the graph is the server's to draw; it cancels in the sum
            server.identities,
            len(os.sched_getaffinity(0)),
            most_lost,
        )
        for party in lost:
            self.send(session.drop(party))
        self.carry(session)
        self.close(session)
        return self.outcome

    def agree_on_support(self) -> tuple[np.ndarray, set[int]]:
        """Support `union`: every party's proposal, then the union back to them; (union, parties that said nothing)."""
        dimension = self.server.algorithm.dimension
        proposals: dict[int, np.ndarray] = {}
        silent = {party for party in self.cohort if self.server.plan.misses(self.round, party, "AdvertiseKeys")}
        self.outcome.dropouts["planned"] += len(silent)
        deadline = time.monotonic() + self.server.config.run.round_deadline
        while len(proposals) + len(silent) < len(self.cohort):
            message = self.next_message(deadline)
            if message is None:
                late = set(self.cohort) - set(proposals) - silent
                self.outcome.dropouts["real"] += len(late)
                silent |= late
            elif isinstance(message, SupportProposal):
                try:
                    proposals[message.party] = decode_support(message.support, dimension)
                except WireError as error:
                    silent.add(message.party)
                    self.caught(message, error)
        union = np.unique(np.concatenate([*proposals.values(), np.array([0])]))  # never empty
        coded = encode_support(union, dimension)
        for party in sorted(proposals):
            self.send([(party, SupportUnion(self.round, party, coded))])
        return union, silent

    def carry(self, session: ServerSession) -> None:
        phase, deadline = None, 0.0
        last = time.monotonic() + self.server.config.run.round_deadline  # for local work
        while not session.done:
            if session.phase_name != phase:
                settings = self.server.config
                wait = settings.run.round_deadline if phase is None else settings.aggregation.phase_deadline
                phase, deadline = session.phase_name, time.monotonic() + wait
                self.let_go_of_the_planned(session)
                continue
            message = self.next_message(deadline)
            if message is None:
                if time.monotonic() < last and not self.clear.isdisjoint(session.waiting()):
                    # Whoever shares in the clear may still be at its local work, and its rank with it.
                    deadline = min(last, time.monotonic() + self.server.config.aggregation.phase_deadline)
                    continue
                self.outcome.dropouts["real"] += len(session.waiting())
                if session.waiting() == self.cohort:
                    raise TransportError(f"round {self.round}: nobody answered within the deadline in {phase}")
                self.send(session.expire())
                continue
            try:
                with self.server.watch("aggregate"):
                    answers = session.receive(message)
            except ProtocolError as error:
                self.caught(message, error)
                answers = [answer for party in speakers(message) for answer in session.drop(party, str(error))]
            if message.party in self.clear:
                deadline = max(deadline, time.monotonic() + self.server.config.aggregation.phase_deadline)
            self.send(answers)

    def let_go_of_the_planned(self, session: ServerSession) -> None:
        """Who the dropout plan has vanish before this phase need not be waited for."""
        for party in session.waiting():
            if self.server.plan.misses(self.round, party, "update" if party in self.clear else session.phase_name):
                self.outcome.dropouts["planned"] += 1
                self.send(session.drop(party))

    def next_message(self, deadline: float) -> Message | None:
        """The next message of this round; None at the deadline. Reports are kept, leftovers of earlier rounds are not."""
        while True:
            arrived = self.server.poll(deadline)
            if arrived is None:
                return None
            message = arrived[1]
            if message.round != self.round:
                continue
            if isinstance(message, TrainReport):
                self.reports.update(zip(message.parties, message.figures))
                continue
            return message

    def send(self, answers: Answers) -> None:
        for party, answer in answers:
            self.server.endpoint.send(self.server.placement.rank_of(party), answer)

    def caught(self, message: Message, error: Exception) -> None:
        self.outcome.dropouts["caught"] += 1
        self.outcome.complaints.append(f"round {self.round}: {error}; it is treated as dropped")

    def close(self, session: ServerSession) -> None:
        outcome = self.outcome
        outcome.complaints += [
            fault for fault in session.faults if not any(fault in line for line in outcome.complaints)
        ]
        outcome.openable = session.openable
        result = None if session.failed else session.result()
        if result is None or not result.survivors:
            reason = session.reason or f"round {self.round}: no party's update arrived"
            outcome.dropouts["failed_rounds"] += 1
            outcome.figures = self.figures(self.reports) | {"failed": reason}
            outcome.complaints.append(f"{reason}; the model stays as it was")
        else:
            outcome.sum = result
            # Of the survivors only: whether a dropped party's report came in time is chance.
            reports = {party: self.reports[party] for party in outcome.sum.survivors if party in self.reports}
            outcome.figures = self.figures(reports) | {"survivors": len(outcome.sum.survivors)}
            if len(outcome.sum.total) == self.server.algorithm.dimension:
                outcome.support = None

    def figures(self, reports: dict[int, np.ndarray]) -> dict[str, float]:
        """What the parties said of their work, in party order so that it does not depend on arrival."""
        if not reports:
            return {}
        rows = np.array([reports[party] for party in sorted(reports)])
        # The method's columns, then the engine's two.
        norm, clipped = rows[:, -2].mean(), rows[:, -1].mean()
        said = self.server.algorithm.summarise_training(rows[:, :-2])
        return said | {"update_norm": float(norm), "clipped": float(clipped)}
