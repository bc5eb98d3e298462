"""Rank 0. One round reads top to bottom in `Server.round`:

sample -> send the model -> (local work, on the clients) -> aggregate -> step -> account -> evaluate -> record
"""

import collections
import time

from fedmpi.algorithm import Algorithm, RowAlgorithm
from fedmpi.errors import DataError, ProtocolError, TransportError
from fedmpi.report.record import Record
from fedmpi.report.savings import hybrid_savings
from fedmpi.runtime import build, checkpoint, dropout, keep, schedule
from fedmpi.runtime.account import PrivacyAccount
from fedmpi.runtime.evaluate import ask_everyone
from fedmpi.runtime.gather import Gathering, Outcome
from fedmpi.runtime.memory import proportional_set_size
from fedmpi.runtime.placement import Placement
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.frame import NOBODY
from fedmpi.wire.messages import (
    Account,
    Checkpoint,
    Evaluate,
    Fill,
    Message,
    Ready,
    Setup,
    Stop,
    Train,
    speakers,
)


class Server:
    def __init__(self, endpoint: Endpoint, plan: build.Plan, placement: Placement, record: Record):
        self.endpoint = endpoint
        self.config = plan.config
        self.placement = placement
        self.record = record
        self.watch = Stopwatch()
        endpoint.ledger.detailed = build.detailed_ledger(self.config)
        self.given = 0  # bytes that the other ranks gave to the transport
        self.pss: dict[int, int] = {}
        self.costs: dict[tuple[int, str, str], float] = collections.defaultdict(float)
        with self.watch("setup"):
            for rank in placement.ranks():
                endpoint.send(rank, Setup(config=plan.to_text(), parties=placement.parties_of(rank)))
            self.algorithm: Algorithm = build.algorithm(self.config, device="cpu")
            self.release = build.release(plan, self.algorithm)
            self.algorithm.noise_ratio = self.release.noise_ratio(self.config)
            self.aggregator = build.aggregator(plan, self.algorithm, lambda cost: self.watch(cost))
            self.privacy = PrivacyAccount(self.config, self.release, self.aggregator.opens)
            self.plan = dropout.parse(self.config.aggregation.dropout, self.config.run.seed, self.config.run.parties)
            self.identities = build.public_identities(self.config)
            self.dropouts = collections.Counter()
            self.theta = self.algorithm.initial()
            self.last_round = plan.resume_round
            self.under_way: checkpoint.UnderWay | None = None  # a round whose sum is not counted yet
            self.references: dict[str, float | None] = dict.fromkeys(self.algorithm.reference_scores)
            self.scores: dict[str, float | None] = dict.fromkeys(self.algorithm.scores)
            if plan.resume_round:
                self.restore(plan.resume_round)
            self.collect(self.placement.ranks(), Ready, self._check_ready)
            self.aggregator.check()
            if self.config.run.resume:
                self.restore_account()  # once it is known who shares in the clear
        by_coordinate = isinstance(self.algorithm, RowAlgorithm)
        measured = self.algorithm.pays_below, self.algorithm.measured_with
        record.opening(self.release, self.privacy, *measured, by_coordinate)

    # ---- the run ----

    def run(self) -> dict:
        if self.last_round == 0:
            self.measure_references()
        first = self.last_round + 1 if self.algorithm.shares else self.config.run.rounds
        for round in range(first, self.config.run.rounds + 1):
            self.round(round)
        return self.finish()

    def round(self, round: int) -> None:
        started, row = time.monotonic(), {"round": round}
        drawn = schedule.cohort(self.config, round)
        fillers = self.fillers(round, drawn)
        cohort = tuple(sorted(drawn + fillers))
        row["cohort"] = len(drawn)
        if fillers:
            row["fillers"] = len(fillers)
        if not self.algorithm.shares:
            row["skipped"] = f"{self.config.run.method} shares nothing"
        elif schedule.enough(self.config.privacy.min_cohort, cohort, self.aggregator.clear):
            self.under_way = checkpoint.UnderWay(round, drawn, cohort)
            self.keep_account()
            self.privacy.begin(round, drawn, cohort, self.aggregator.clear)
            self.send_model(Train, round, drawn, fillers)
            outcome = self.aggregate(round, cohort)
            row |= outcome.figures
            self.privacy.opened(round, outcome.openable, outcome.coordinates, self.aggregator.clear)
            if outcome.sum is not None:
                self.step(outcome, drawn)
                self.privacy.spend(round, outcome.sum.survivors, outcome.coordinates)
            else:
                self.privacy.failed()
            self.under_way = None
            self.keep_account()
            self.dropouts += outcome.dropouts
            for line in outcome.complaints:
                self.record.terminal.warn(line)
        else:
            row["skipped"] = f"cohort below min_cohort ({self.config.privacy.min_cohort})"
        if schedule.evaluation_due(self.config, round):
            row |= self.evaluate(round)
        row["seconds"] = time.monotonic() - started
        self.record.round(row, self.privacy.statement(quick=True))
        self.last_round = round
        if schedule.checkpoint_due(self.config, round):
            self.checkpoint(round)

    def fillers(self, round: int, drawn: tuple[int, ...]) -> tuple[int, ...]:
        """Only where noise hides an update: a sum of one update and nothing else is not filled up but skipped. With supports
        of the parties' own no epsilon holds anyway, and a filler has none."""
        if not self.privacy.noisy or self.config.aggregation.support in ("own", "union"):
            return ()
        return schedule.fillers(self.config, round, drawn, self.aggregator.clear)

    # ---- its steps ----

    def send_model(self, kind: type[Train] | type[Evaluate], round: int, parties, fillers=()) -> None:
        """theta to every rank that hosts one of `parties`, once per rank; fillers do not need it."""
        with self.watch("send model"):
            self.record.first_message()
            asked = {*parties, *fillers}
            sizes = len(asked), len(asked - self.aggregator.clear)
            for rank, hosted in self.placement.by_rank(parties).items():
                self.endpoint.send(rank, kind(round, _alone(hosted), hosted, *sizes, self.theta))
            for rank, hosted in self.placement.by_rank(fillers).items():
                self.endpoint.send(rank, Fill(round, _alone(hosted), hosted, *sizes))

    def aggregate(self, round: int, cohort: tuple[int, ...]) -> Outcome:
        """Carry the aggregation's messages until it has its sum, or cannot have it any more."""
        with self.watch("wait for updates"):
            gathering = Gathering(self, round, cohort)
            return gathering.run()

    def step(self, outcome: Outcome, drawn: tuple[int, ...]) -> None:
        """theta + eta_g * sum / (qN): a fixed denominator, as the sensitivity assumes."""
        with self.watch("step"):
            settings = self.config.server
            by = {
                "expected": schedule.expected_cohort(self.config),
                "survivors": max(1, len(set(outcome.sum.survivors) & set(drawn))),
                "none": 1,
            }[settings.denominator]
            total = self.release.encoding.decode(outcome.sum.total)
            self.theta = self.algorithm.step(self.theta, total, settings.server_lr / by, outcome.support)

    def evaluate(self, round: int) -> dict[str, float | None]:
        """The scores over all parties, each on its own test data; None where metrics stay home."""
        total = ask_everyone(self, round, self.algorithm.score_columns)
        self.scores = dict.fromkeys(self.algorithm.scores) if total is None else self.algorithm.summarise(total)
        return self.scores

    def measure_references(self) -> None:
        """Round 0: what the parties reach without any sharing, for the closing table."""
        total = ask_everyone(self, 0, self.algorithm.reference_columns) if self.algorithm.reference_scores else None
        if total is not None:
            self.references = self.algorithm.summarise_references(total)

    def keep_account(self) -> None:
        """Fresh noise makes every round that was released count, also one that a resumed run repeats: known before, and after."""
        if self.config.privacy.entropy == "os" and self.privacy.noisy:
            checkpoint.save_account(self.config, self.privacy.checkpoint(), self.under_way)

    def checkpoint(self, round: int) -> None:
        with self.watch("checkpoint"):
            for rank in self.placement.ranks():
                self.endpoint.send(rank, Checkpoint(round))
            self.collect(self.placement.ranks(), Account, self._take_account)
            state = {
                "privacy": self.privacy.checkpoint(),
                "references": self.references,
                "dropouts": dict(self.dropouts),
                "costs": [[*key, seconds] for key, seconds in self.costs.items()],
                "given": self.given + self.endpoint.bytes_given,
                "cpu": dict(self.watch.cpu),
                "wall": dict(self.watch.wall),
            }
            arrays = {"theta": self.theta, "ledger": self.endpoint.ledger.table()}
            arrays |= {f"method.{name}": value for name, value in self.algorithm.server_state().items()}
            checkpoint.save_server(self.config, round, arrays, state)

    def restore(self, round: int) -> None:
        arrays, state = checkpoint.load_server(self.config, round)
        self.theta = arrays.pop("theta")
        self.endpoint.ledger.merge(arrays.pop("ledger"))
        self.algorithm.load_server_state({name.partition(".")[2]: value for name, value in arrays.items()})
        self.given = state["given"]
        self.dropouts.update(state["dropouts"])
        self.costs.update({(party, phase, cost): seconds for party, phase, cost, seconds in state["costs"]})
        self.references = state["references"]
        self.privacy.restore(state["privacy"])
        self.watch.add(state["cpu"])
        for phase, seconds in state["wall"].items():
            self.watch.wall[phase] += seconds

    def restore_account(self) -> None:
        """Under fresh noise the latest account in place of the checkpoint's, which knows less."""
        if self.config.privacy.entropy != "os" or not self.privacy.noisy:
            return
        known = self.privacy.checkpoint()
        saved, under_way = checkpoint.load_account(self.config)
        self.privacy.restore(saved)
        if self.privacy.older_than(known):
            raise DataError(
                f"{self.config.out}/checkpoint/account.json is older than the checkpoint beside it: what was released since is "
                "unknown, so no epsilon can be stated; start a new run"
            )
        if under_way:
            fewest = self.aggregator.fewest(len(set(under_way.cohort) - self.aggregator.clear))
            self.privacy.cut_short(*under_way, fewest, self.aggregator.clear)
        self.keep_account()

    def finish(self) -> dict:
        for rank in self.placement.ranks():
            self.endpoint.send(rank, Stop())
        self.collect(self.placement.ranks(), Account, self._take_account)
        self.endpoint.flush(self.config.run.round_deadline)
        given, counted = self.given + self.endpoint.bytes_given, self.endpoint.ledger.bytes_given()
        if given != counted:
            raise AssertionError(f"the ledger counts {counted} bytes, the ranks gave {given} to the transport")
        name = keep.save_model(self.config, self.algorithm, self.theta)
        facts = {
            "task": self.algorithm.task,
            "ranks": self.endpoint.size,
            "scores": self.scores | self.references,
            "coordinates": self.release.encoding.dimension,
            "data_crc32": f"{self.algorithm.data_fingerprint:08x}",
            "model_sha256": name,
            "seconds": self.watch.as_dict(),
            "memory_pss": sum(self.pss.values()) + proportional_set_size(),
            "dropouts": {kind: self.dropouts[kind] for kind in ("planned", "real", "caught", "failed_rounds")},
        }
        if self.config.aggregation.aggregation == "hybrid":
            facts["hybrid"] = hybrid_savings(
                self.endpoint.ledger, self.watch.cpu, len(self.aggregator.clear), self.config.run.parties
            )
        return self.record.closing(facts, self.privacy, self.endpoint.ledger, self.costs)

    # ---- waiting ----

    def poll(self, deadline: float) -> tuple[int, Message] | None:
        """The next message and where it came from; None at the deadline."""
        arrived = self.endpoint.poll(max(0.0, deadline - time.monotonic()))
        if arrived is not None:
            self.check_host(*arrived)
        return arrived

    def check_host(self, source: int, message: Message) -> None:
        hosted = self.placement.parties_of(source)
        for party in speakers(message):
            if not hosted[0] <= party <= hosted[-1]:  # blocks are contiguous
                raise ProtocolError(f"spoke through rank {source}, which does not host it", party=party)

    def collect(self, ranks, kind: type[Message], take) -> None:
        """One message of `kind` from each rank."""
        missing = set(ranks)
        deadline = time.monotonic() + self.config.run.round_deadline
        while missing:
            arrived = self.poll(deadline)
            if arrived is None:
                raise TransportError(f"no {kind.__name__} from ranks {sorted(missing)} (round_deadline)")
            source, message = arrived
            if speakers(message):
                continue  # late: the last words of a party that was dropped
            if not isinstance(message, kind) or source not in missing:
                raise ProtocolError(f"rank {source} sent {type(message).__name__}, expected {kind.__name__}")
            missing.remove(source)
            take(source, message)

    def _check_ready(self, source: int, message: Ready) -> None:
        if message.dimension != self.algorithm.dimension:
            raise ProtocolError(
                f"rank {source} built a model of {message.dimension} parameters, rank 0 one of "
                f"{self.algorithm.dimension}; is the same fedmpi installed there?"
            )
        if self.config.privacy.shown == "party" and message.data != self.algorithm.data_fingerprint:
            raise ProtocolError(
                f"rank {source} prepared other data than rank 0; delete the prepared folder on its host"
            )
        hosted = self.placement.parties_of(source)
        if not set(message.clear) <= set(hosted):
            raise ProtocolError(f"rank {source} chose for parties that it does not host")
        self.aggregator.clear |= set(message.clear)

    def _take_account(self, source: int, message: Account) -> None:
        self.endpoint.ledger.merge(message.rows)
        self.given += message.bytes_given
        self.pss[source] = int(message.facts.get("pss", 0))
        self.watch.add(message.facts.get("cpu", {}))
        for party, phase, cost, seconds in message.facts.get("costs", []):
            self.costs[party, phase, cost] += seconds


def _alone(hosted: tuple[int, ...]) -> int:
    return hosted[0] if len(hosted) == 1 else NOBODY
