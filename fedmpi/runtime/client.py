"""A block of parties on a client rank: what it does when rank 0 asks. The rank itself is `runtime.rank`."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from fedmpi.aggregation.base import PartySession
from fedmpi.aggregation.party_end import PartyEnd
from fedmpi.aggregation.protocol import chosen_clear
from fedmpi.algorithm import Algorithm, LocalUpdate, RowUpdates
from fedmpi.errors import ProtocolError
from fedmpi.log import log
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.runtime import build, checkpoint, keep, schedule
from fedmpi.runtime.departures import DEPARTURES, Leaving
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.runtime.tallies import proportional_set_size
from fedmpi.secagg.party import Identity
from fedmpi.secagg.rules import Meter
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.control import NONCE
from fedmpi.wire.frame import NOBODY
from fedmpi.wire.message import Message, alone
from fedmpi.wire.messages import (
    Checkpoint,
    EvalReport,
    Evaluate,
    Fill,
    GoOn,
    Nonces,
    Ready,
    Replay,
    Train,
    TrainReport,
)
from fedmpi.wire.phases import Cost, Phase, Purpose

SERVER = 0


class Spent:
    """What a rank spent since its last tally, for all its parties."""

    def __init__(self, watch: Stopwatch):
        self.watch = watch
        self.costs: dict[tuple[int, str, str], float] = defaultdict(float)  # (party, phase, cost) -> CPU seconds

    def clear(self) -> None:
        self.watch, self.costs = Stopwatch(), defaultdict(float)


class Client:
    """A block of parties on a rank."""

    def __init__(
        self,
        endpoint: Endpoint,
        orders: build.Orders,
        parties: tuple[int, ...],
        identities: dict[int, Identity],
        algorithm: Algorithm,
        mechanism: Mechanism,
        spent: "Spent",
    ):
        self.endpoint, self.config, self.parties = endpoint, orders.config, parties
        self.present = tuple(party for party in parties if party not in orders.absent)  # who has a state
        self.algorithm, self.mechanism, self.spent, self.mark = algorithm, mechanism, spent, orders.mark
        hybrid = self.config.aggregation.aggregation == "hybrid"
        self.chosen = algorithm.clear_parties() if hybrid else ()  # by the method's rule
        clear = chosen_clear(self.config) | set(self.chosen)
        self.rules = build.protocol_rules(orders)
        self.end = PartyEnd(self.config, self.rules, algorithm.dimension, clear, identities)
        active = self.config.aggregation.adversary == "active"
        self.nonces = os.urandom(NONCE * len(parties)) if active else b""
        self.met = not active  # whether everybody's nonces are there
        kind = DEPARTURES[mechanism.form]
        self.departures = kind(
            self.config, algorithm, mechanism, self.end, lambda cost: self.spent.watch(cost), self.meter_of
        )
        self.sessions: dict[int, PartySession] = {}  # of the round, or the test, that is under way
        self.under_way: tuple[int, Purpose] = 0, Purpose.TRAINING
        self.trained, self.tested = checkpoint.Counters()  # the last rounds that were asked for: each releases once
        self.reach = 0  # the checkpoint up to which it can go on; 0: the beginning
        self.final: np.ndarray | None = None  # the finished model, under --keep-parties

    def look_back(self, round: int) -> None:
        """Of the checkpoints up to the one that rank 0 named, find the newest that this rank can go on from."""
        if self.config.run.resume:
            self.reach = checkpoint.usable_round(self.config, self.present, round, self.mark)
        else:
            checkpoint.begin(self.config)

    def go_on(self, settled: Message) -> None:
        """From the checkpoint that all ranks have; files of later rounds go only now."""
        if not isinstance(settled, GoOn) or settled.round > self.reach:
            raise ProtocolError(
                f"rank 0 sent {type(settled).__name__} of round {settled.round}, expected GoOn of round {self.reach} or before",
                phase=Phase.SETUP,
            )
        self.trained, self.tested = checkpoint.restore_parties(
            self.config, self.algorithm, self.present, settled.round, self.mark
        )

    def say_ready(self) -> None:
        # A checksum is a figure too, and stays home with the others.
        data = self.algorithm.data_fingerprint if self.config.privacy.shown == "party" else 0
        ready = Ready(self.reach, NOBODY, self.algorithm.dimension, data, self.chosen, self.nonces, self.parties)
        self.endpoint.send(SERVER, ready)

    def meet(self, message: Nonces) -> None:
        """The session has everybody's nonce in its name, and these parties' own among them: it cannot be an earlier one."""
        first, total = NONCE * self.parties[0], NONCE * self.config.run.parties
        own = message.nonces[first : first + len(self.nonces)]
        if self.met or len(message.nonces) != total or own != self.nonces:
            raise ProtocolError("rank 0 sent nonces that lack this rank's, or that nobody asked for", phase=Phase.SETUP)
        self.rules.meet(message.nonces)
        self.met = True

    def receive(self, message: Message, theta: np.ndarray) -> None:
        """`theta`: this rank's model. It is the one that a task names by its digest, as `runtime.rank` has seen to."""
        match message:
            case Train():
                self.train(message, theta)
            case Fill():
                self.fill(message)
            case Evaluate():
                self.evaluate(message, theta)
            case _:
                self.protocol(message)

    # ---- a round ----

    def train(self, asked: Train, theta: np.ndarray) -> None:
        schedule.check_cohort(self.config, asked.cohort, asked.hidden, self.algorithm.chooses_clear)
        schedule.check_keys(self.config, asked.round, asked.keys, asked.hidden)
        self.check_asked(asked)
        if asked.round <= self.trained:
            raise ProtocolError(f"rank 0 asked for round {asked.round} after round {self.trained}", phase=Phase.MODEL)
        self.begin(asked.round)
        for work in self.local_work(asked, theta):
            figures, leaving = self.departures.of(work, asked, theta)
            if self.config.privacy.shown == "party":
                self.endpoint.send(SERVER, TrainReport(asked.round, alone(work.parties), work.parties, figures))
            self.depart(leaving)

    def local_work(self, asked: Train | Replay, theta: np.ndarray) -> Iterator[LocalUpdate | RowUpdates]:
        """The method's own iteration, with its time. It is for those who were asked, once each: nobody else's work leaves."""
        work, missing = iter(self.algorithm.local_work(asked.parties, theta, asked.round)), set(asked.parties)
        while True:
            with self._working(asked) as made_for:
                done = next(work, None)
                made_for += asked.parties if done is None else done.parties
            log.debug("round %d: local work of %s", asked.round, "all is done" if done is None else done.parties)
            if done is None:
                break
            for party in done.parties:
                if party not in missing:
                    raise ProtocolError("the method worked for it unasked, or twice", party=party, phase="local work")
                missing.remove(party)
            yield done
        if missing:
            raise ProtocolError("the method gave no update of it", party=min(missing), phase="local work")

    @contextmanager
    def _working(self, asked: Train | Replay) -> Iterator[list[int]]:
        """Measures a step of the local work, for the rank and for the parties that turn out to be its: equal parts where a method works for
        several at once. What is done once more, for a rank that was lost, is no party's cost."""
        made_for: list[int] = []
        watch = self.spent.watch
        before = watch.cpu[Cost.LOCAL_WORK]
        with watch(Cost.LOCAL_WORK):
            yield made_for
        each = (watch.cpu[Cost.LOCAL_WORK] - before) / max(1, len(made_for))
        for party in made_for if isinstance(asked, Train) else ():
            self.spent.costs[party, Phase.UPDATE, Cost.LOCAL_WORK] += each

    def fill(self, asked: Fill) -> None:
        """Take part with noise alone. A Train of the same round comes before it."""
        schedule.check_cohort(self.config, asked.cohort, asked.hidden, self.algorithm.chooses_clear)
        self.check_asked(asked)
        if asked.round > self.trained:
            self.begin(asked.round)
        if (
            asked.round != self.trained
            or self.under_way[1] != Purpose.TRAINING
            or set(asked.parties) & set(self.sessions)
        ):
            raise ProtocolError(
                "rank 0 asked a party to fill a round that is over, or that it is in", phase=Phase.MODEL
            )
        self.depart(self.departures.fill(asked))

    def check_asked(self, asked: Train | Fill | Evaluate | Replay) -> None:
        """It is about a round of this run, and parties that are here."""
        if asked.round > self.config.run.rounds:
            raise ProtocolError(
                f"rank 0 asked for round {asked.round}, the run has {self.config.run.rounds}", phase=asked.PHASE
            )
        if not self.met:
            raise ProtocolError("rank 0 began before it had sent everybody's nonces", phase=asked.PHASE)
        if not set(asked.parties) <= set(self.present) or len(set(asked.parties)) != len(asked.parties):
            raise ProtocolError(
                "rank 0 asked for parties that this rank does not host, or has no state of, or twice", phase=asked.PHASE
            )

    def begin(self, round: int, purpose: Purpose = Purpose.TRAINING) -> None:
        self.sessions.clear()
        self.under_way = round, purpose
        if purpose is Purpose.TRAINING:
            self.trained = round

    def depart(self, leaving: Leaving) -> None:
        for parties, session in leaving:
            for party in parties:
                self.sessions[party] = session
            self.say(session.start())

    def protocol(self, message: Message) -> None:
        """A message of the session that is under way, for one party."""
        session = self.sessions.get(message.party)
        if session is None or (message.round, message.purpose) != self.under_way:
            raise ProtocolError(f"rank 0 sent {type(message).__name__}, which is not its turn", party=message.party)
        self.say(session.receive(message))

    def say(self, messages: Iterable[Message]) -> None:
        for message in messages:
            with self.meter_of(message.party)(message.PHASE, Cost.MPI):
                self.endpoint.send(SERVER, message)

    # ---- between rounds ----

    def evaluate(self, asked: Evaluate, theta: np.ndarray) -> None:
        self.check_asked(asked)
        if asked.round <= self.tested:
            raise ProtocolError(
                f"rank 0 asked for the test of round {asked.round} after that of round {self.tested}", phase=asked.PHASE
            )
        if asked.round and not schedule.evaluation_due(self.config, asked.round):
            raise ProtocolError(f"rank 0 asked for a test of round {asked.round}, which has none", phase=asked.PHASE)
        self.tested = asked.round
        if self.config.run.keep_parties and asked.round == self.config.run.rounds:
            self.final = theta
        if self.config.privacy.shown == "none":
            return
        if asked.round == 0:
            with self.spent.watch("references"):
                figures = self.algorithm.references_all(asked.parties, theta)
        else:
            with self.spent.watch("evaluation"):
                figures = self.algorithm.evaluate_all(asked.parties, theta, asked.round)
        self.check_figures(asked, figures)
        if self.config.privacy.shown == "securesum":
            return self.add_up(asked, figures)
        self.endpoint.send(SERVER, EvalReport(asked.round, alone(asked.parties), asked.parties, figures))

    def check_figures(self, asked: Evaluate, figures: np.ndarray) -> None:
        columns = self.algorithm.score_columns if asked.round else self.algorithm.reference_columns
        if np.shape(figures) != (len(asked.parties), columns):
            raise ProtocolError(
                f"the method gave test figures of shape {np.shape(figures)}, expected {(len(asked.parties), columns)}",
                phase=Phase.EVALUATION,
            )
        wrong = np.flatnonzero(~np.isfinite(figures).all(axis=1))
        if wrong.size:
            raise ProtocolError(
                "a test figure is not a finite number; did training diverge?",
                party=asked.parties[wrong[0]],
                phase=Phase.EVALUATION,
            )

    def add_up(self, asked: Evaluate, figures: np.ndarray) -> None:
        """Each party takes its figures through the protocol."""
        if asked.cohort != self.config.run.parties:
            raise ProtocolError(
                f"rank 0 announced a test of {asked.cohort} parties, expected all", phase=Phase.EVALUATION
            )
        self.begin(asked.round, Purpose.TEST)
        self.depart(
            ((party,), self.end.test(asked.round, asked.model, party, asked.cohort, row, self.meter_of(party)))
            for party, row in zip(asked.parties, figures, strict=True)
        )

    def keep(self, message: Checkpoint) -> None:
        if not self.trained <= message.round <= self.config.run.rounds:
            raise ProtocolError(
                f"rank 0 asked for a checkpoint of round {message.round} after round {self.trained}",
                phase=message.PHASE,
            )
        with self.spent.watch("checkpoint"):
            counters = checkpoint.Counters(self.trained, self.tested)
            if self.present:
                checkpoint.save_parties(self.config, self.algorithm, self.present, message.round, counters, self.mark)

    def keep_final(self) -> None:
        """At the end of the run, under --keep-parties."""
        if self.final is not None and self.present:
            with self.spent.watch("keep parties"):
                keep.save_parties(self.config, self.algorithm, self.present, self.final)

    # ---- what it cost ----

    def meter_of(self, party: int) -> Meter:
        """Measures the protocol's costs, for the rank and for the party and the phase that it works for."""
        return lambda phase, cost: self.spent.watch.charge(self.spent.costs, (party, phase, cost), cost)

    def send_tally(self) -> None:
        """What this rank sent and spent since its last tally, this message included."""
        costs = [[*key, seconds] for key, seconds in sorted(self.spent.costs.items())]
        if self.config.privacy.shown != "party":
            costs = _by_rank(costs)
        facts = {"cpu": dict(self.spent.watch.cpu), "pss": proportional_set_size(), "costs": costs}
        self.spent.clear()
        self.endpoint.send_tally(SERVER, facts)


def _by_rank(costs: list) -> list:
    """The rank's costs without the party: a party's own figures stay home."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for _, phase, cost, seconds in costs:
        total[phase, cost] += seconds
    return [[NOBODY, *key, seconds] for key, seconds in total.items()]
