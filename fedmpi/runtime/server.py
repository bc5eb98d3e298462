"""Rank 0. One round reads top to bottom in `Server.round`:

sample -> log who is asked -> send the model -> (local work, on the clients) -> aggregate -> log the step -> step -> evaluate -> record
"""

import collections
import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from fedmpi.aggregation import figures
from fedmpi.aggregation.base import Sum
from fedmpi.aggregation.dropout import planned
from fedmpi.aggregation.protocol import Session, chosen_clear, digest
from fedmpi.algorithm import Algorithm
from fedmpi.errors import TransportError
from fedmpi.log import open_log
from fedmpi.privacy.account import Releases
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.privacy.releases import Asked, Ended, Failed, Opened, Shown, Stepped
from fedmpi.report.record import Record
from fedmpi.report.savings import hybrid_savings
from fedmpi.runtime import build, checkpoint, keep, resume, schedule, signals
from fedmpi.runtime.adoption import Adoption
from fedmpi.runtime.conduct import Conduct
from fedmpi.runtime.downloads import Downloads
from fedmpi.runtime.evaluate import add_reports
from fedmpi.runtime.gather import Gathering, Outcome
from fedmpi.runtime.handshake import Readiness
from fedmpi.runtime.limits import Limits
from fedmpi.runtime.mailbox import Mailbox
from fedmpi.runtime.mirror import frozen, move
from fedmpi.runtime.placement import Placement, named
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.runtime.tallies import Tallies
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.control import NOT_HEARD_OF
from fedmpi.wire.message import alone
from fedmpi.wire.messages import Checkpoint, Evaluate, Fill, GoOn, Nonces, Ready, Setup, Stop, Tally, Train
from fedmpi.wire.phases import Phase, Purpose


def run_server(endpoint: Endpoint, orders: build.Orders, placement: Placement, record: Record) -> dict[str, Any]:
    """The whole life of rank 0; returns the summary."""
    config, watch = orders.config, Stopwatch()
    endpoint.ledger.detailed = build.detailed_ledger(config)
    open_log(config.run.log, endpoint.rank)
    endpoint.watch(config.run.rank_deadline)
    endpoint.spoken_of = record.terminal.warn
    mailbox = Mailbox(
        endpoint, placement, config.run.round_deadline, warn=record.terminal.warn, on_loss=config.run.on_loss
    )
    with watch("setup"):
        text = orders.to_text()
        mailbox.to_hosts(range(config.run.parties), lambda hosted: Setup(config=text, parties=hosted))
        # While the other ranks are busy with the same:
        algorithm = build.algorithm(config, device="cpu")
        mechanism = build.mechanism(orders, algorithm)
        server = Server(orders, algorithm, mechanism, mailbox, record, watch)
        server.handshake()
    return server.run()


def finite(figures: Mapping[str, float | None]) -> dict[str, float | None]:
    """As JSON has them: None for what is not a number, as the loss of a run that diverged."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()}


class Server:
    def __init__(
        self,
        orders: build.Orders,
        algorithm: Algorithm,
        mechanism: Mechanism,
        mailbox: Mailbox,
        record: Record,
        watch: Stopwatch,
    ):
        self.orders, self.config, self.resume_round = orders, orders.config, orders.resume_round
        self.algorithm, self.mechanism = algorithm, mechanism
        self.mailbox, self.record, self.watch = mailbox, record, watch
        rank_of = mailbox.placement.rank_of
        self.end = build.server_end(orders, algorithm, mechanism, lambda phase, cost: watch(cost), rank_of)
        self.tallies = Tallies(mailbox.endpoint, mailbox.placement, watch)
        mailbox.endpoint.limits = Limits(self.config, algorithm, mechanism, mailbox.placement)
        # Who shares in the clear; a method's rule adds to these when ranks are ready, and then nobody does.
        self.clear = chosen_clear(self.config)
        self.dropouts: collections.Counter[str] = collections.Counter()
        self.lost_before: list[dict[str, Any]] = []  # ranks, before the run was interrupted
        self.lost: list[str] = []  # what a dropout plan would say of the parties of lost ranks, and of who was late
        self.adoption = Adoption(self.config, mailbox, record.terminal.warn)
        self.downloads = Downloads(self.config, mailbox.endpoint, algorithm, mechanism, record.terminal.warn)
        mailbox.resend = self.downloads.resend
        self.theta = frozen(algorithm.initial())
        self.references: dict[str, float | None] = dict.fromkeys(algorithm.reference_scores)
        self.scores: dict[str, float | None] = dict.fromkeys(algorithm.scores)
        self.told: dict[int, int] = {}  # who was asked for the last test -> on which rank

    def handshake(self) -> None:
        """Everybody is there with the same model and data, and it is settled who shares in the clear."""
        self.releases: Releases = build.releases(self.orders, self.mechanism, type(self.algorithm))
        ready = Readiness(self.config, self.algorithm, self.mailbox.placement, self.resume_round)
        lacking = self.mailbox.collect("handshake", Ready, ready.take, strict=True)
        self.clear |= ready.clear
        silent = lacking - self.conduct.gone_ranks
        if silent or len(lacking) == len(self.mailbox.placement.ranks()):
            raise TransportError(f"no Ready from ranks {sorted(silent or lacking)} (round_deadline)")
        if self.config.aggregation.aggregation == "hybrid" and self.algorithm.chooses_clear:
            self.adoption.unheard = lacking
        state = self.go_on(ready.reach) if self.config.run.resume else {}
        # Not before: who was benched when the run was interrupted still has its say in who shares in the clear.
        self.conduct.restore(state.get("conduct", {}))
        for rank in self.conduct.benched_ranks:
            self.mailbox.endpoint.mute(rank)
        self.end.rules.check(self.clear)
        if self.config.aggregation.adversary == "active":
            nonces = ready.all_nonces()
            told = self.reachable(range(self.config.run.parties))
            self.mailbox.to_hosts(told, lambda hosted: Nonces(nonces=nonces, parties=hosted))
            self.end.rules.meet(nonces)
        self.record.opening(self.mechanism, self.algorithm.pays_below, self.algorithm.measured_with)

    def go_on(self, reach: dict[int, int]) -> dict[str, Any]:
        """From the newest checkpoint that all ranks have (`reach`: the last one of each); returns what else it holds."""
        mark = self.orders.mark
        self.resume_round = round = resume.settle(
            self.config, mark, self.resume_round, reach, self.releases, self.record
        )
        self.mailbox.to_all(GoOn(round))
        checkpoint.forget_after(self.config, round)
        return self.restore(round) if round else {}

    # ---- the run ----

    def run(self) -> dict[str, Any]:
        if self.resume_round == 0:
            self.measure_references()
        first = self.resume_round + 1 if self.algorithm.shares else self.config.run.rounds
        for round in range(first, self.config.run.rounds + 1):
            if signals.end_before(round, self.config.run.rounds):
                self.leave(round - 1)
            self.regroup()
            self.round(round)
        return self.finish()

    def leave(self, done: int) -> NoReturn:
        """A signal asked for the end: keep what was done so far, and let everybody go."""
        if done > self.resume_round and not schedule.checkpoint_due(self.config, done):
            self.checkpoint(done)
        self.dismiss()
        signals.end()

    def round(self, round: int) -> None:
        started = time.monotonic()
        row: dict[str, Any] = {"round": round}
        drawn = schedule.cohort(self.config, round)
        fillers = self.fillers(round, drawn)
        cohort = tuple(sorted(drawn + fillers))
        row["cohort"] = len(drawn)
        if fillers:
            row["fillers"] = len(fillers)
        if not self.algorithm.shares:
            row["skipped"] = f"{self.config.run.method} shares nothing"
        elif schedule.enough(self.config.privacy.min_cohort, cohort, self.clear):
            self.releases.note(self.asked(round, drawn, cohort))
            self.adoption.asked(round, drawn, self.theta)
            self.send_model(Train, round, drawn, fillers)
            outcome = self.aggregate(round, cohort)
            if outcome.sum is not None:
                self.releases.note(Stepped(round, outcome.sum.survivors, outcome.coordinates))
                self.step(round, outcome.sum, drawn)
            else:
                self.releases.note(Failed(round))
            if outcome.sum is None or outcome.disputed:
                # Who sat out because it has none may be what was lacking; and a lie of the one set-up is held against nobody twice.
                self.end.renew_keys()
            row |= self.figures(round, outcome)
        else:
            row["skipped"] = f"cohort below min_cohort ({self.config.privacy.min_cohort})"
        if schedule.evaluation_due(self.config, round):
            row |= self.evaluate(round)
        row["seconds"] = time.monotonic() - started
        self.record.round(row, self.releases.account.statement(quick=True))
        if schedule.checkpoint_due(self.config, round):
            self.checkpoint(round)

    def regroup(self) -> None:
        """Where ranks were lost: others take their parties over, or there are enough left for another sum. Otherwise the run ends, and
        can be resumed with everybody from before the loss."""
        self.adoption.mend()
        if self.adoption.moved:
            self.end.renew_keys()
            self.adoption.moved = False
        hidden = set(range(self.config.run.parties)) - self.clear if self.mailbox.losses else set()
        if not hidden or self.config.privacy.sampling < 1 or not self.algorithm.shares:
            return
        left = {party for party in hidden if not self.conduct.is_absent(party)}
        rules = self.end.rules.of(Session(0), len(hidden), self.mechanism.encoding)
        if len(left) < rules.threshold or len(hidden) - len(left) > rules.tolerated:
            least = max(rules.threshold, len(hidden) - rules.tolerated)
            raise TransportError(
                f"{len(left)} of {len(hidden)} parties are left, a sum needs {least}: no later round can have one; "
                f"--resume {self.config.out} goes on from the last checkpoint, with everybody that it has"
            )

    # ---- its steps ----

    def fillers(self, round: int, drawn: tuple[int, ...]) -> tuple[int, ...]:
        """Only where noise hides an update: a sum of one update and nothing else is not filled up but skipped. With supports
        of the parties' own no epsilon holds anyway, and a filler has none."""
        if not self.mechanism.noisy or self.mechanism.own_coordinates:
            return ()
        return schedule.fillers(self.config, round, drawn, self.clear)

    def asked(self, round: int, drawn: tuple[int, ...], cohort: tuple[int, ...]) -> Asked:
        hidden = len(set(cohort) - self.clear)
        return Asked(
            round=round,
            drawn=drawn,
            cohort=cohort,
            clear=tuple(party for party in cohort if party in self.clear),
            share=self.mechanism.share(len(cohort)) / self.mechanism.encoding.sensitivity,
            exposed=hidden > 0 and self.end.rules.opens(hidden, self.config.aggregation.colluding),
            figures=self.config.privacy.shown == "party",
        )

    def send_model(self, kind: type[Train] | type[Evaluate], round: int, parties, fillers=()) -> None:
        """What it lacks of theta to every rank that hosts one of `parties`, and what to do with it; fillers do not need it. Who is benched is
        not told."""
        with self.watch("send model"):
            self.record.first_message()
            asked = {*parties, *fillers}
            sizes = len(asked), len(asked - self.clear)
            # A rank that does not take its post would have rank 0 keep a model for it every round.
            self.conduct.behind = self.mailbox.endpoint.behind(self.config.aggregation.phase_deadline)
            parties, fillers = (self.reachable(group) for group in (parties, fillers))
            if kind is Evaluate:
                self.told = {party: self.mailbox.placement.rank_of(party) for party in parties}
            for rank, hosted in self.mailbox.placement.by_block(parties):
                self.downloads.bring(rank, hosted, self.theta)
            told = *sizes, self.downloads.version, digest(self.theta)
            keys = self.keys_of(round) if kind is Train else 0
            self.mailbox.to_hosts(parties, lambda hosted: kind(round, alone(hosted), hosted, *told, keys))
            self.mailbox.to_hosts(fillers, lambda hosted: Fill(round, alone(hosted), hosted, *told))

    def keys_of(self, round: int) -> int:
        """The round that makes, or made, the keys of this one, where several rounds' are made together."""
        return self.end.keys_of(round) if len(self.clear) < self.config.run.parties else 0

    def reachable(self, parties: Iterable[int]) -> tuple[int, ...]:
        """Who of an announced cohort is told of it. The others count in its size, as those that a dropout plan has vanish."""
        return tuple(party for party in parties if not self.conduct.is_absent(party))

    @property
    def conduct(self) -> Conduct:
        return self.mailbox.conduct

    def aggregate(self, round: int, cohort: tuple[int, ...]) -> Outcome:
        """Carry the aggregation's messages until it has its sum, or cannot have it any more."""

        def before_opening(parties: tuple[int, ...], coordinates: int) -> None:
            self.releases.note(Opened(round, parties, coordinates))

        with self.watch("wait for updates"):
            about, most_lost = digest(self.theta), self.algorithm.most_lost(self.theta)
            what = Session(round, most_lost=most_lost, about=about, keys=self.keys_of(round))
            session = self.end.training(what, cohort, self.clear)
            columns = len(self.algorithm.report_columns) + 2 if self.config.privacy.shown == "party" else 0
            gathering = Gathering(
                self.mailbox, self.watch, self.config.aggregation.phase_deadline, before_opening, columns
            )
            return gathering.run(session, round, cohort, self.clear)

    def step(self, round: int, found: Sum, drawn: tuple[int, ...]) -> None:
        """Move the model by server_lr * sum / expected size of a cohort. The divisor is fixed, because the proof bounds the sum, and
        not a mean over whoever survived."""
        with self.watch("step"):
            settings = self.config.server
            by = {
                "expected": schedule.expected_cohort(self.config),
                "survivors": max(1, len(set(found.survivors) & set(drawn))),
                "none": 1,
            }[settings.denominator]
            sum_and_rate = found.total, settings.server_lr / by, found.support
            self.theta = move(self.algorithm, self.mechanism, self.theta, *sum_and_rate, round)
            self.downloads.stepped(round, *sum_and_rate)

    def figures(self, round: int, outcome: Outcome) -> dict[str, float | str | None]:
        """What the round's row says of it, and the warnings. Parties' figures in party order, and of the survivors only: whether
        a dropped party's report came in time is chance. Those of a party whose training diverged are in no mean of others."""
        self.dropouts += outcome.dropouts
        # Each round's losses stand for that round alone: where keys serve several rounds, a plan's `share` would mean all of them.
        keyless = (Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS) if self.config.aggregation.key_rounds else ()
        phases = {p: Phase.MASKED_INPUT if at in keyless else at for p, at in (outcome.late | outcome.lost).items()}
        self.lost += [planned(round, party, phase) for party, phase in sorted(phases.items())]
        for line in outcome.complaints:
            self.record.terminal.warn(line)
        survivors = outcome.reports if outcome.sum is None else outcome.sum.survivors
        rows = np.array([outcome.reports[party] for party in sorted(survivors) if party in outcome.reports])
        said: dict[str, float | str | None] = {}
        if len(rows):
            whole = np.isfinite(rows).all(axis=1)
            rows = rows[whole] if whole.any() else rows
            # The method's columns, then the engine's two.
            said |= finite(self.algorithm.summarise_training(rows[:, :-2]))
            said |= finite({"update_norm": float(rows[:, -2].mean()), "clipped": float(rows[:, -1].mean())})
        if outcome.lost:
            said["lost"] = len(outcome.lost)
        return said | ({"failed": outcome.failed} if outcome.sum is None else {"survivors": len(survivors)})

    # ---- tests ----

    def evaluate(self, round: int) -> dict[str, float | None]:
        """The scores over all parties, each on its own test data; None where metrics stay home."""
        total = self.ask_everyone(round, self.algorithm.score_columns)
        self.scores = dict.fromkeys(self.algorithm.scores)
        if total is not None:
            self.scores |= finite(self.algorithm.summarise(total))
        return self.scores

    def measure_references(self) -> None:
        """Round 0: what the parties reach without any sharing, for the closing table."""
        total = self.ask_everyone(0, self.algorithm.reference_columns) if self.algorithm.reference_scores else None
        if total is not None:
            self.references = finite(self.algorithm.summarise_references(total))

    def ask_everyone(self, round: int, columns: int) -> np.ndarray | None:
        """The sum of every party's figures; None where metrics stay home, or could not be had. Round 0: the references."""
        shown, everyone = self.config.privacy.shown, tuple(range(self.config.run.parties))
        if shown == "none":
            if self.config.run.keep_parties and round == self.config.run.rounds:
                self.adoption.mend()
                self.send_model(Evaluate, round, everyone)  # for the parts that they keep; nobody answers
            return None
        self.adoption.mend()
        self.releases.note(Shown(round, shown))
        self.send_model(Evaluate, round, everyone)
        with self.watch("evaluation" if round else "references"):
            if shown == "securesum":
                return self.sum_of_figures(round, everyone, columns)
            caught = self.mailbox.caught
            total, heard = add_reports(
                self.mailbox,
                round,
                self.reachable(everyone),
                columns,
                lambda figures: self.algorithm.plausible(figures, round),
            )
            self.dropouts["caught"] += self.mailbox.caught - caught
            self.say_of_whom(round, heard)
            return total

    def say_of_whom(self, round: int, heard: int) -> None:
        if heard < self.config.run.parties:
            self.record.terminal.warn(
                f"test figures of round {round} are those of {heard} of {self.config.run.parties} parties"
            )

    def sum_of_figures(self, round: int, everyone: tuple[int, ...], columns: int) -> np.ndarray | None:
        """The sum through the protocol, over whoever is left at its end."""
        session = self.end.test(round, digest(self.theta), everyone, columns)
        gathering = Gathering(self.mailbox, self.watch, self.config.aggregation.phase_deadline)
        outcome = gathering.run(session, round, everyone, purpose=Purpose.TEST)
        self.dropouts += outcome.dropouts
        for line in outcome.complaints:
            self.record.terminal.warn(f"test figures of round {round}: {line}")
        if outcome.sum is None:
            return None
        self.say_of_whom(round, len(outcome.sum.survivors))
        return figures.encoding(columns).decode(outcome.sum.total)

    # ---- between rounds, and the end ----

    def checkpoint(self, round: int) -> None:
        with self.watch("checkpoint"):
            while True:
                self.regroup()
                losses = len(self.mailbox.losses)
                self.mailbox.to_all(Checkpoint(round))
                _, silent = self.collect_tallies(f"checkpoint of round {round}")
                for rank in silent:
                    self.mailbox.give_up(rank, "kept no checkpoint within round_deadline")
                if len(self.mailbox.losses) == losses:
                    break  # otherwise once more, without a rank that was lost over it, or with its parties elsewhere
            ledger, counted = self.tallies.state()
            state = {
                "releases": self.releases.log.position(),
                "references": self.references,
                "dropouts": dict(self.dropouts),
                "lost": self.losses(),
                "conduct": self.conduct.state(),
                "tally": counted,
            }
            arrays = {"theta": self.theta, "ledger": ledger}
            arrays |= {f"method.{name}": value for name, value in self.algorithm.server_state().items()}
            checkpoint.save_server(self.config, round, arrays, state, self.orders.mark)
            self.adoption.checkpointed(round)

    def losses(self) -> dict[str, Any]:
        """Of ranks, and what a dropout plan would say of their parties."""
        return {
            "ranks": self.lost_before + [dataclasses.asdict(loss) for loss in self.mailbox.losses],
            "plan": self.lost,
        }

    def restore(self, round: int) -> dict[str, Any]:
        """Go on from a checkpoint; returns what else it holds: of who broke the rules."""
        arrays, state = checkpoint.load_server(self.config, round, self.orders.mark)
        self.theta = frozen(arrays.pop("theta"))
        self.downloads.go_on(round)
        self.tallies.restore(arrays.pop("ledger"), state["tally"])
        self.algorithm.load_server_state({name.partition(".")[2]: value for name, value in arrays.items()})
        self.dropouts.update(state["dropouts"])
        self.references = state["references"]
        lost = state.get("lost", {"ranks": [], "plan": []})
        self.lost_before, self.lost = lost["ranks"], lost["plan"]
        self.adoption.checkpointed(round)
        return state

    def collect_tallies(self, session: str) -> tuple[set[int], list[int]]:
        """(ranks without a tally that can be used, those of them that sent none): they are named, and their figures are missing."""
        caught = self.mailbox.caught
        lacking = self.mailbox.collect(session, Tally, self.tallies.take)
        self.dropouts["caught"] += self.mailbox.caught - caught
        self.tallies.untallied |= lacking
        silent = sorted(rank for rank in lacking if not self.conduct.is_out(rank))
        if silent:
            self.record.terminal.warn(f"{session}: no Tally from ranks {silent} (round_deadline)")
        return lacking, silent

    def dismiss(self) -> None:
        """Everybody leaves, once it has said what it sent and spent."""
        endpoint = self.mailbox.endpoint
        self.adoption.mend()
        endpoint.parted.clear()
        endpoint.closing = True
        self.mailbox.to_all(Stop())
        for rank in self.conduct.lost_ranks if self.adoption.wanted else ():
            endpoint.send(rank, Stop(code=NOT_HEARD_OF))
        lacking, _ = self.collect_tallies("end of the run")
        for rank in lacking:
            endpoint.mute(rank)  # nothing more is expected of it, nor that it takes what it was sent
        try:
            endpoint.flush(
                self.config.aggregation.phase_deadline
            )  # whoever has sent its tally has taken all that came before it
        except TransportError as error:
            self.record.terminal.warn(f"end of the run: {error}; nobody waits for that any more")
            for rank in endpoint.behind(0):
                endpoint.mute(rank)
        self.tallies.check()

    def say_who_is_not_kept(self) -> None:
        """Their ranks were lost, or out, or took them over after the model was finished."""
        kept = {party for party, rank in self.told.items() if rank not in self.conduct.gone_ranks}
        kept = {party for party in kept if self.mailbox.placement.rank_of(party) == self.told[party]}
        missing = set(range(self.config.run.parties)) - kept
        if self.config.run.keep_parties and missing:
            self.record.terminal.warn(
                f"{named(missing)} may be lacking in {self.config.out / 'parties'}: lost with their ranks"
            )

    def finish(self) -> dict[str, Any]:
        self.dismiss()
        self.say_who_is_not_kept()
        if self.algorithm.shares and not any(isinstance(event, Stepped) for event in self.releases.log.events):
            self.record.terminal.warn("no round had a sum: the model is the one that the run began with")
        name = keep.save_model(self.config, self.algorithm, self.theta)
        self.releases.note(Ended(self.config.run.rounds))
        facts = {
            "task": self.algorithm.task,
            "ranks": self.mailbox.endpoint.size,
            "scores": self.scores | self.references,
            "coordinates": self.mechanism.encoding.dimension,
            "data_crc32": f"{self.algorithm.data_fingerprint:08x}",
            "model_sha256": name,
            "seconds": self.watch.as_dict(),
            "memory_pss": self.tallies.memory(),
            "dropouts": {kind: self.dropouts[kind] for kind in ("planned", "real", "caught", "failed_rounds")}
            | {"benched": list(self.conduct.benched), "lost": self.losses()},
            "untallied_ranks": sorted(self.tallies.untallied),
        }
        if self.config.aggregation.aggregation == "hybrid":
            facts["hybrid"] = hybrid_savings(
                self.tallies.ledger, self.watch.cpu, len(self.clear), self.config.run.parties
            )
        return self.record.closing(facts, self.releases.account, self.tallies.ledger, self.tallies.costs)
