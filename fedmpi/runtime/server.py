"""Rank 0. One round reads top to bottom in `Server.round`:

sample -> send the model -> (local work, on the clients) -> aggregate -> step -> account -> evaluate -> record
"""

import hashlib
import time

import numpy as np

from fedmpi.aggregation.base import Sum
from fedmpi.aggregation.plain import PlainServer
from fedmpi.algorithm import Algorithm
from fedmpi.errors import ProtocolError, TransportError
from fedmpi.report.record import Record
from fedmpi.runtime import build, checkpoint, schedule
from fedmpi.runtime.account import PrivacyAccount
from fedmpi.runtime.memory import proportional_set_size
from fedmpi.runtime.placement import Placement
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.messages import (
    Account,
    Checkpoint,
    EvalReport,
    Evaluate,
    Message,
    Ready,
    Setup,
    Stop,
    Train,
    TrainReport,
)


class Server:
    def __init__(self, endpoint: Endpoint, plan: build.Plan, placement: Placement, record: Record):
        self.endpoint = endpoint
        self.config = plan.config
        self.placement = placement
        self.record = record
        self.watch = Stopwatch()
        self.given = 0  # bytes that the other ranks gave to the transport
        self.pss: dict[int, int] = {}
        with self.watch("setup"):
            for rank in placement.ranks():
                endpoint.send(rank, Setup(config=plan.to_text(), parties=placement.parties_of(rank)))
            self.algorithm: Algorithm = build.algorithm(self.config, device="cpu")
            self.release = build.release(plan, self.algorithm)
            self.privacy = PrivacyAccount(self.config, self.release)
            self.theta = self.algorithm.initial()
            self.last_round = plan.resume_round
            self.references: dict[str, float | None] = {"accuracy_untrained": None, "accuracy_local_only": None}
            self.accuracy: float | None = None
            if plan.resume_round:
                self.restore(plan.resume_round)
            self.collect(self.placement.ranks(), Ready, self._check_ready)
        record.opening(self.release, self.privacy)

    # ---- the run ----

    def run(self) -> dict:
        if self.last_round == 0:
            self.measure_references()
        for round in range(self.last_round + 1, self.config.run.rounds + 1):
            self.round(round)
        return self.finish()

    def round(self, round: int) -> None:
        started, row = time.monotonic(), {"round": round}
        cohort = schedule.cohort(self.config, round)
        row["cohort"] = len(cohort)
        if len(cohort) >= self.config.privacy.min_cohort:
            self.send_model(Train, round, cohort)
            total, figures = self.aggregate(round, cohort)
            self.step(total)
            self.privacy.spend(cohort, total.survivors)
            row |= {"survivors": len(total.survivors), **figures}
        else:
            row["skipped"] = f"cohort below min_cohort ({self.config.privacy.min_cohort})"
        if schedule.evaluation_due(self.config, round):
            row["accuracy"] = self.evaluate(round)
        row["seconds"] = time.monotonic() - started
        self.record.round(row, self.privacy.statement(quick=True))
        self.last_round = round
        if schedule.checkpoint_due(self.config, round):
            self.checkpoint(round)

    # ---- its steps ----

    def send_model(self, kind: type[Train] | type[Evaluate], round: int, parties) -> None:
        """theta to every rank that hosts one of `parties`, once per rank."""
        with self.watch("send model"):
            self.record.first_message()
            for rank, hosted in self.placement.by_rank(parties).items():
                alone = hosted[0] if len(hosted) == 1 else -1
                self.endpoint.send(rank, kind(round, alone, hosted, len(parties), self.theta))

    def aggregate(self, round: int, cohort: tuple[int, ...]) -> tuple[Sum, dict]:
        """Wait for the cohort's updates (and reports, if they may leave) and add them up."""
        own = self.config.aggregation.support == "own" and self.release.encoding.dimension < self.algorithm.dimension
        session = PlainServer(round, cohort, self.release.encoding, self.algorithm.dimension, own)
        reports: dict[int, TrainReport] = {}
        awaited = len(cohort) if self.config.privacy.metrics == "party" else 0

        def take(message: Message) -> None:
            if isinstance(message, TrainReport):
                reports[message.party] = message
                return
            with self.watch("aggregate"):
                for party, answer in session.receive(message):
                    self.endpoint.send(self.placement.rank_of(party), answer)

        with self.watch("wait for updates"):
            self.pump(take, lambda: session.done and len(reports) >= awaited, session.waiting)
        return session.result(), _figures(reports, self.config.privacy.clip)

    def step(self, total: Sum) -> None:
        """theta + eta_g * sum / (qN): a fixed denominator, as the sensitivity assumes."""
        with self.watch("step"):
            expected = schedule.expected_cohort(self.config)
            by = expected if self.config.server.denominator == "expected" else len(total.survivors)
            mean = self.release.encoding.decode(total.total) * (self.config.server.server_lr / by)
            self.theta = self.algorithm.step(self.theta, mean, self._public_support(len(mean)))

    def evaluate(self, round: int) -> float | None:
        """Mean accuracy over all parties, each on its own test data; None where metrics stay home."""
        if self.config.privacy.metrics == "party":
            reports = self.ask_everyone(round)
            self.accuracy = float(np.mean([report.correct / report.total for report in reports]))
        return self.accuracy

    def measure_references(self) -> None:
        """Round 0: what the parties reach without any sharing, for the closing table."""
        if self.config.privacy.metrics == "party":
            reports = self.ask_everyone(0)
            self.references["accuracy_untrained"] = float(np.mean([r.correct / r.total for r in reports]))
            if self.config.evaluation.local_epochs:
                self.references["accuracy_local_only"] = float(np.mean([r.local_correct / r.total for r in reports]))

    def ask_everyone(self, round: int) -> list[EvalReport]:
        """Every party's report on the current model, in party order."""
        everyone = range(self.config.run.parties)
        self.send_model(Evaluate, round, everyone)
        reports: dict[int, EvalReport] = {}

        def take(message: Message) -> None:
            if not isinstance(message, EvalReport) or message.round != round:
                raise ProtocolError(f"sent {type(message).__name__}, expected EvalReport", party=message.party)
            reports[message.party] = message

        with self.watch("evaluation" if round else "references"):
            self.pump(take, lambda: len(reports) == len(everyone), lambda: set(everyone) - set(reports))
        return [reports[party] for party in everyone]

    def checkpoint(self, round: int) -> None:
        with self.watch("checkpoint"):
            for rank in self.placement.ranks():
                self.endpoint.send(rank, Checkpoint(round))
            self.collect(self.placement.ranks(), Account, self._take_account)
            state = {
                "privacy": self.privacy.checkpoint(),
                "references": self.references,
                "given": self.given + self.endpoint.bytes_given,
                "cpu": dict(self.watch.cpu),
                "wall": dict(self.watch.wall),
            }
            checkpoint.save_server(self.config, round, self.theta, self.endpoint.ledger.table(), state)

    def restore(self, round: int) -> None:
        self.theta, ledger, state = checkpoint.load_server(self.config, round)
        self.endpoint.ledger.merge(ledger)
        self.given = state["given"]
        self.references = state["references"]
        self.privacy.restore(state["privacy"])
        self.watch.add(state["cpu"])
        for phase, seconds in state["wall"].items():
            self.watch.wall[phase] += seconds
        if self.config.privacy.entropy == "os":
            # Rounds after the checkpoint were released before the interruption; fresh noise releases them once more.
            # The one under way may have reached the server too.
            for cohort in self.record.released_after(round):
                self.privacy.spend(tuple(range(cohort)), tuple(range(cohort)))

    def finish(self) -> dict:
        for rank in self.placement.ranks():
            self.endpoint.send(rank, Stop())
        self.collect(self.placement.ranks(), Account, self._take_account)
        self.endpoint.flush(self.config.run.round_deadline)
        given, counted = self.given + self.endpoint.bytes_given, self.endpoint.ledger.bytes_given()
        if given != counted:
            raise AssertionError(f"the ledger counts {counted} bytes, the ranks gave {given} to the transport")
        facts = {
            "task": self.algorithm.task,
            "ranks": self.endpoint.size,
            "accuracy": self.accuracy,
            **self.references,
            "model_sha256": hashlib.sha256(np.ascontiguousarray(self.theta, "<f4").tobytes()).hexdigest(),
            "seconds": self.watch.as_dict(),
            "memory_pss": sum(self.pss.values()) + proportional_set_size(),
            "dropouts": {"planned": 0, "real": 0},
        }
        return self.record.closing(facts, self.privacy, self.endpoint.ledger)

    # ---- waiting ----

    def pump(self, take, done, waiting) -> None:
        """Hand every message to `take` until `done`; the deadline names who is still missing."""
        deadline = time.monotonic() + self.config.run.round_deadline
        while not done():
            arrived = self.endpoint.poll(max(0.0, deadline - time.monotonic()))
            if arrived is None:
                missing = ", ".join(map(str, sorted(waiting())[:10])) or "a report"
                raise TransportError(
                    f"no answer within {self.config.run.round_deadline:g} s (round_deadline); missing: {missing}"
                )
            source, message = arrived
            if message.party >= 0 and message.party not in self.placement.parties_of(source):
                raise ProtocolError(f"spoke through rank {source}, which does not host it", party=message.party)
            take(message)

    def collect(self, ranks, kind: type[Message], take) -> None:
        """One message of `kind` from each rank."""
        missing = set(ranks)
        deadline = time.monotonic() + self.config.run.round_deadline
        while missing:
            arrived = self.endpoint.poll(max(0.0, deadline - time.monotonic()))
            if arrived is None:
                raise TransportError(f"no {kind.__name__} from ranks {sorted(missing)} (round_deadline)")
            source, message = arrived
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

    def _take_account(self, source: int, message: Account) -> None:
        self.endpoint.ledger.merge(message.rows)
        self.given += message.bytes_given
        self.pss[source] = int(message.facts.get("pss", 0))
        self.watch.add(message.facts.get("cpu", {}))

    def _public_support(self, size: int) -> np.ndarray | None:
        return None if size == self.algorithm.dimension else self.algorithm.public_support(self.theta)


def _figures(reports: dict[int, TrainReport], clip: float) -> dict:
    """Means over the cohort, in party order so that they do not depend on arrival."""
    if not reports:
        return {}
    ordered = [reports[party] for party in sorted(reports)]
    return {
        "loss": float(np.mean([report.loss for report in ordered])),
        "head_loss": float(np.mean([report.head_loss for report in ordered])),
        "penalty": float(np.mean([report.penalty for report in ordered])),
        "update_norm": float(np.mean([report.norm for report in ordered])),
        "clipped": float(np.mean([report.norm > clip for report in ordered])),
    }
