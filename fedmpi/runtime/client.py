"""A client rank: it hosts parties, and answers the server until it is told to stop."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmpi.aggregation.base import PartySession
from fedmpi.algorithm import Algorithm, LocalUpdate, RowAlgorithm
from fedmpi.config import Config
from fedmpi.errors import ConfigError, ProtocolError
from fedmpi.runtime import build, checkpoint, dropout, keep, metrics, rows, schedule
from fedmpi.runtime.memory import proportional_set_size
from fedmpi.runtime.release import Release
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.secagg.party import Identity
from fedmpi.secagg.pki import read_identity, read_public
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.frame import NOBODY
from fedmpi.wire.messages import (
    Checkpoint,
    EvalReport,
    Evaluate,
    Fill,
    Message,
    Ready,
    Setup,
    Stop,
    SupportProposal,
    SupportUnion,
    Train,
    TrainReport,
)
from fedmpi.wire.support import decode_support, encode_support

SERVER = 0
NEXT_PHASE = {"AdvertiseKeys": "ShareKeys", "ShareKeys": "MaskedInput"}


def run_client(endpoint: Endpoint, pki: str | None = None) -> int:
    """The whole life of a client rank; returns its exit code. `pki` is this rank's own word, not rank 0's."""
    _, first = endpoint.poll()
    if isinstance(first, Stop):
        return 0  # rank 0 has said what was wrong
    if not isinstance(first, Setup):
        raise ProtocolError(f"rank 0 sent {type(first).__name__}, expected Setup", phase="setup")
    return Client(endpoint, first, pki).serve()


@dataclass
class PartyRound:
    """What a party holds while a round is under way."""

    model: Train | Fill | Evaluate
    update: LocalUpdate | None  # None: it is in the session already
    session: PartySession | None = None  # None until its support is settled

    @property
    def number(self) -> int:
        """Of the protocol's round."""
        return self.model.round + (metrics.EVALUATION if isinstance(self.model, Evaluate) else 0)


class Client:
    def __init__(self, endpoint: Endpoint, setup: Setup, pki: str | None):
        self.endpoint = endpoint
        self.watch = Stopwatch()
        with self.watch("setup"):
            plan = build.Plan.from_text(setup.config)
            self.config: Config = plan.config
            endpoint.ledger.detailed = build.detailed_ledger(self.config)
            self.parties = setup.parties
            self.plan = dropout.parse(self.config.aggregation.dropout, self.config.run.seed, self.config.run.parties)
            self.identities = self._read_identities(pki)
            self.algorithm: Algorithm = build.algorithm(self.config)
            self.release = build.release(plan, self.algorithm)
            self.algorithm.noise_ratio = self.release.noise_ratio(self.config)
            self.aggregator = build.aggregator(plan, self.algorithm, self.meter)
            self.algorithm.host(self.parties)
            chosen = self.algorithm.clear_parties() if self.config.aggregation.aggregation == "hybrid" else ()
            self.aggregator.clear |= set(chosen)
            self.costs: dict[tuple[int, str, str], float] = defaultdict(float)  # (party, phase, cost) -> CPU seconds
            self.turn = (NOBODY, "")  # whose protocol step is under way
            self.rounds: dict[int, PartyRound] = {}
            self.final: Evaluate | None = None  # the finished model, under --keep-parties
            if self.config.run.resume and not plan.resume_round:
                checkpoint.forget_all(self.config)
            if plan.resume_round:
                checkpoint.restore_parties(self.config, self.algorithm, self.parties, plan.resume_round)
        # A checksum is a figure too, and stays home with the others.
        data = self.algorithm.data_fingerprint if self.config.privacy.shown == "party" else 0
        endpoint.send(SERVER, Ready(0, NOBODY, self.algorithm.dimension, data, chosen, self.parties))

    def serve(self) -> int:
        handlers = {Train: self.train, Fill: self.fill, Evaluate: self.evaluate, Checkpoint: self.keep}
        while True:
            _, message = self.endpoint.poll()
            if isinstance(message, Stop):
                if self.final is not None:
                    with self.watch("keep parties"):
                        keep.save_parties(self.config, self.algorithm, self.parties, self.final)
                self.send_account()
                self.endpoint.flush()
                return 0
            handlers.get(type(message), self.protocol)(message)

    def meter(self, cost: str):
        """Measures one cost of the protocol, for the rank and for the party and phase whose turn it is."""
        return self.watch.charge(self.costs, (*self.turn, cost), cost)

    # ---- a round ----

    def train(self, model: Train) -> None:
        schedule.check_cohort(self.config, model.cohort, model.hidden)
        self.rounds.clear()
        if isinstance(self.algorithm, RowAlgorithm):
            return self.train_rows(model)
        for party in model.parties:
            with self.watch("local work"):
                update = self.algorithm.local_work(party, model.theta, model.round)
            self._check_update(party, update)
            self.rounds[party] = PartyRound(model, update)
            norm = float(np.linalg.norm(update.values.astype(np.float64)))
            figures = [update.figures[name] for name in self.algorithm.report_columns]
            self.report(model, (party,), [[*figures, norm, norm > self.release.encoding.clip]])
            if self.config.aggregation.support == "union":
                self.propose(party, model, update)
            else:
                self.enter(party, self.algorithm.support_size(), update.values, update.support)

    def _check_update(self, party: int, update: LocalUpdate) -> None:
        """The noise is for what the method declared: coordinates that depend on data leave only where that was said."""
        own, size = self.config.aggregation.support in ("own", "union"), self.algorithm.support_size()
        if update.support is not None and not own:
            raise ProtocolError(
                f"the method chose coordinates of its own, which support {self.config.aggregation.support} does not allow",
                party=party,
                phase="local work",
            )
        if not own and np.shape(update.values) != (size,):
            raise ProtocolError(
                f"the method gave an update of shape {np.shape(update.values)}, expected {size} coordinates",
                party=party,
                phase="local work",
            )

    def fill(self, asked: Fill) -> None:
        """Take part with an update of zeros, and so with noise alone. A Train of the same round comes before it."""
        schedule.check_cohort(self.config, asked.cohort, asked.hidden)
        self.rounds = {party: state for party, state in self.rounds.items() if state.number == asked.round}
        for party in asked.parties:
            self.rounds[party] = PartyRound(asked, None)
            self.enter(party, self.algorithm.support_size(), np.zeros(self.algorithm.support_size()), None)

    def train_rows(self, model: Train) -> None:
        """All the rank's parties at once; each goes the way that it chose, with the rows that it touched."""
        with self.watch("local work"):
            updates = self.algorithm.row_updates(model.parties, model.theta, model.round)
        with self.watch("encode"):
            encoded, clipped = self.release.encode_rows(updates.values)
            self.report(model, updates.parties, rows.report_rows(updates, clipped))
        clear = np.array([party in self.aggregator.clear for party in updates.parties], bool)
        late = np.array([self.plan.misses(model.round, party, "update") for party in updates.parties], bool)
        with self.watch("encode"):
            messages = rows.plain_messages(model.round, updates, encoded, clear & ~late, self.release.encoding)
        for message in messages:
            with self.watch("MPI"):
                self.endpoint.send(SERVER, message)
        hidden = [] if clear.all() else rows.dense_updates(updates, encoded, ~clear, self.release.encoding)
        for party, values in hidden:
            self.rounds[party] = PartyRound(model, None)
            self.begin(party, self.release, values, None)

    def report(self, model: Train, parties: tuple[int, ...], figures) -> None:
        if self.config.privacy.shown == "party":
            alone = parties[0] if len(parties) == 1 else NOBODY
            self.endpoint.send(SERVER, TrainReport(model.round, alone, parties, np.array(figures, np.float64)))

    def propose(self, party: int, model: Train, update: LocalUpdate) -> None:
        """Support `union`: name the coordinates, and wait for everybody's."""
        if self.plan.misses(model.round, party, "AdvertiseKeys"):
            return
        dimension = self.algorithm.dimension
        chosen = np.arange(dimension) if update.support is None else update.support
        self.endpoint.send(SERVER, SupportProposal(model.round, party, encode_support(chosen, dimension)))

    def enter(self, party: int, dimension: int, values: np.ndarray, support: np.ndarray | None) -> None:
        """Clip, round, add the share of the noise, and start the aggregation with it."""
        model, release = self.rounds[party].model, self.release.over(dimension)
        self.turn = (party, "encode")
        with self.meter("encode"):
            encoded, _ = release.encode(values, party, model.round, model.cohort)
        self.begin(party, release, encoded, support)

    def begin(self, party: int, release: Release, encoded: np.ndarray, support: np.ndarray | None) -> None:
        state = self.rounds[party]
        model = state.model
        self.turn = (party, "encode")
        identity = self.identities.get(party)
        most_lost = (
            self.algorithm.most_lost(model.theta) if isinstance(model, Train) else None
        )  # who fills has no theta
        with self.meter("encode"):
            state.session = self.aggregator.party(
                model.round, party, model.hidden, release.encoding, encoded, support, identity, most_lost
            )
        self.turn = (party, "AdvertiseKeys")
        self.say(party, state.session.start())

    def protocol(self, message: Message) -> None:
        """A message of the aggregation for one party."""
        state = self.rounds.get(message.party)
        if state is None or message.round != state.number:
            raise ProtocolError(f"rank 0 sent {type(message).__name__}, which is not its turn", party=message.party)
        if isinstance(message, SupportUnion):
            union = decode_support(message.support, self.algorithm.dimension)
            values = np.zeros(len(union))
            own = state.update.support
            values[slice(None) if own is None else np.searchsorted(union, own)] = state.update.values
            self.enter(message.party, len(union), values, None)
        elif state.session is None:
            raise ProtocolError(f"rank 0 sent {type(message).__name__} before the support", party=message.party)
        else:
            # A list answers the phase that is over: what it sets off is the next one's cost.
            self.turn = (message.party, NEXT_PHASE.get(message.PHASE, message.PHASE))
            self.say(message.party, state.session.receive(message))

    def say(self, party: int, messages: list[Message]) -> None:
        """Send, unless the plan has the party vanish here."""
        for message in messages:
            if not self.plan.misses(message.round, party, message.PHASE):
                self.turn = (party, message.PHASE)
                with self.meter("MPI"):
                    self.endpoint.send(SERVER, message)

    # ---- between rounds ----

    def evaluate(self, model: Evaluate) -> None:
        if self.config.run.keep_parties and model.round == self.config.run.rounds:
            self.final = model
        if self.config.privacy.shown == "none":
            return
        if model.round == 0:
            with self.watch("references"):
                figures = self.algorithm.references_all(model.parties, model.theta)
        else:
            with self.watch("evaluation"):
                figures = self.algorithm.evaluate_all(model.parties, model.theta, model.round)
        if self.config.privacy.shown == "securesum":
            return self.add_up(model, figures)
        alone = model.parties[0] if len(model.parties) == 1 else NOBODY
        self.endpoint.send(SERVER, EvalReport(model.round, alone, model.parties, figures))

    def add_up(self, model: Evaluate, figures: np.ndarray) -> None:
        """Each party takes its figures through the protocol."""
        if model.cohort != self.config.run.parties:
            raise ProtocolError(f"rank 0 announced a test of {model.cohort} parties, expected all", phase="evaluation")
        self.rounds.clear()
        aggregator, encoding = metrics.for_everyone(self.aggregator), metrics.encoding(figures.shape[1])
        for party, row in zip(model.parties, figures):
            state = self.rounds[party] = PartyRound(model, None)
            values, identity = metrics.encode(row), self.identities.get(party)
            state.session = aggregator.party(state.number, party, model.cohort, encoding, values, None, identity)
            self.turn = (party, "AdvertiseKeys")
            self.say(party, state.session.start())

    def keep(self, message: Checkpoint) -> None:
        with self.watch("checkpoint"):
            checkpoint.save_parties(self.config, self.algorithm, self.parties, message.round)
        self.send_account()

    def send_account(self) -> None:
        """What this rank sent and spent since its last account, this message included."""
        costs = [[*key, seconds] for key, seconds in sorted(self.costs.items())]
        if self.config.privacy.shown != "party":
            costs = _by_rank(costs)
        facts = {"cpu": dict(self.watch.cpu), "pss": proportional_set_size(), "costs": costs}
        self.watch, self.costs = Stopwatch(), defaultdict(float)
        self.endpoint.send_account(SERVER, facts)

    def _read_identities(self, pki: str | None) -> dict[int, Identity]:
        if self.config.aggregation.adversary != "active":
            return {}
        if pki is None:
            raise ConfigError(
                "adversary = active: this rank was started without --pki, and does not take it from rank 0"
            )
        public = read_public(Path(pki), self.config.run.parties)
        return {party: read_identity(Path(pki), party, public) for party in self.parties}


def _by_rank(costs: list) -> list:
    """The rank's costs without the party: a party's own figures stay home."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for _, phase, cost, seconds in costs:
        total[phase, cost] += seconds
    return [[NOBODY, *key, seconds] for key, seconds in total.items()]
