"""A client rank that lies: rank 0 names it and goes on without it, and the model is the one of a run that never heard of its parties."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable

import numpy as np

from fedmpi.config import Config
from fedmpi.liars.base import Attack, Verdict, changed, parties_in_words
from fedmpi.liars.stage import Forged, Quiet, attend, report_in
from fedmpi.privacy.releases import Asked, ReleaseLog, Stepped
from fedmpi.runtime.rank import run_client
from fedmpi.runtime.server import run_server
from fedmpi.runtime.start import Start, start_run
from fedmpi.secagg.messages import AdvertiseKeys, MaskedInput, ShareBatch, ShareKeys, ShareList
from fedmpi.transport.endpoint import Endpoint
from fedmpi.transport.memory import run_ranks
from fedmpi.wire.frame import FRAMING, Header
from fedmpi.wire.message import Message, encode
from fedmpi.wire.messages import EvalReport, Setup, Stop, Tally, Train

LIAR = 1  # the rank
TEBIBYTE = 1 << 40
PIECE = 1 << 16  # bytes
BACKLOG = 64  # pieces on their way, so that a flood does not drown the machine that it is played on


class ClientAttack(Attack):
    """Rank 1 lies. It runs the real client, whose words are changed on their way out."""

    side = "client"
    # Noise from the seed, so that two runs can be compared.
    flags = "--entropy seeded --metrics none"

    def __init__(self, adversary: str):
        super().__init__(adversary)
        self.hosted: tuple[int, ...] = ()  # the liar's parties, once it knows
        self.summary: dict | None = None
        self.warnings: list[str] = []

    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None:
        self.config, self.ranks, self.warnings = start.orders.config, endpoint.size, terminal.warnings
        self.liars = start.placement.parties_of(LIAR)
        self.summary = run_server(endpoint, *start)

    def follow(self, endpoint: Endpoint, config: Config, act: int) -> None:
        attend(Forged(endpoint, self) if endpoint.rank == LIAR else endpoint, config)

    def says(self, endpoint: Forged, rank: int, message: Message) -> Iterable[Message]:
        return [message] if report_in(message) is not None else self.lies(message)

    def hears(self, endpoint: Forged, source: int, message: Message) -> Message | None:
        if isinstance(message, Setup):
            self.hosted = message.parties
        return self.instead(endpoint, message) if isinstance(message, Train) else message

    def lies(self, message: Message) -> Iterable[Message]:
        """What leaves in place of a message."""
        return [message]

    def instead(self, endpoint: Forged, model: Train) -> Message | None:
        """What the liar does when it is asked to train; returns what its client gets to see."""
        return model

    # ---- what came of it ----

    def answers(self) -> list[str]:
        named = [line for line in self.warnings if self.names_liar(line)]
        return [*super().answers(), *(f"rank 0 says: {line}" for line in named[:4])]

    def names_liar(self, line: str) -> bool:
        words = line.replace(",", " ").replace(":", " ").replace(";", " ")
        return any(f"{name} " in f"{words} " for name in (f"rank {LIAR}", *(f"party {p}" for p in self.liars)))

    def judge(self) -> Verdict:
        if self.summary is None:
            return Verdict(f"it ended the run: {self.ended}", broken=True)
        refused = [rank for rank, report in self.reports[-1].items() if report.refused and rank != LIAR]
        if refused:
            return Verdict(f"it drove rank {', '.join(map(str, refused))} out of the run", broken=True)
        if not any(map(self.names_liar, self.warnings)):
            return Verdict("it was not named", broken=True)
        left_out, others = self.who_was_out()
        if others:
            return Verdict(f"it had {parties_in_words(others)} left out, who are honest", broken=True)
        which = f"round{'s' * (len(left_out) > 1)} {', '.join(map(str, left_out))}" if left_out else "no round"
        done = f"nothing: it was named, and {parties_in_words(self.liars)} left out of {which}"
        if self.config.privacy.entropy == "os" and not math.isinf(self.config.privacy.epsilon):
            return Verdict(f"{done}; noise is the system's, so models were not compared")
        wanted = self.without_liar(left_out)["model_sha256"]
        if self.summary["model_sha256"] != wanted:
            return Verdict("the model is not the one of the same run without its parties", broken=True)
        return Verdict(f"{done}; the model is as if {'they had dropped out there' if left_out else 'it were honest'}")

    def who_was_out(self) -> tuple[dict[int, list[int]], set[int]]:
        """(the liar's parties that each round did without, everybody else's that one did without and no plan had vanish)"""
        events = ReleaseLog.read(self.config.out).events
        stepped = {event.round: set(event.survivors) for event in events if isinstance(event, Stepped)}
        out: dict[int, list[int]] = {}
        others: set[int] = set()
        for event in events:
            if isinstance(event, Asked):
                missing = set(event.cohort) - stepped.get(event.round, set())
                out[event.round] = sorted(missing & set(self.liars))
                if not self.config.aggregation.dropout and event.round in stepped:
                    others |= missing - set(self.liars)
        return {round: parties for round, parties in out.items() if parties}, others

    def without_liar(self, out: dict[int, list[int]]) -> dict:
        """The summary of the same run, everybody honest, in which these vanish by plan. In memory, and without signatures: neither
        changes a model."""
        plan = [f"{round}:{party}:support" for round, parties in out.items() for party in parties]
        dropout = ",".join(filter(None, (self.config.aggregation.dropout, *plan)))
        config = changed(self.config, "aggregation", dropout=dropout, adversary="passive", pki=None)
        config = changed(config, "run", out=f"{self.config.out}-planned")
        start = start_run(config, self.ranks, "in memory", Quiet())

        def rank(endpoint: Endpoint) -> dict | int:
            return run_server(endpoint, *start) if endpoint.rank == 0 else run_client(endpoint, config)

        try:
            return run_ranks(self.ranks, rank)[0]
        finally:
            start.record.close()


def until_stop(endpoint: Forged, act: Callable[[], object], at_once: int) -> Message:
    """Do it over and over, so often `at_once`, and hear nothing else, until rank 0 ends the run."""
    while True:
        if endpoint.backlog() < BACKLOG:
            for _ in range(at_once):
                act()
        arrived = endpoint.overhear(0)
        if arrived is not None and isinstance(arrived, Stop):
            return arrived
        time.sleep(0.002)


class Garbage(ClientAttack):
    name = "garbage"
    tries = "sends random bytes in place of its updates: wants the run to end"

    def instead(self, endpoint: Forged, model: Train) -> None:
        endpoint.raw(0, os.urandom(1000))


class ShortFrame(ClientAttack):
    name = "short-frame"
    tries = "sends 5 bytes, fewer than a header has: wants the run to end"

    def instead(self, endpoint: Forged, model: Train) -> None:
        endpoint.raw(0, b"FM\3\4\0")


class Foreign(ClientAttack):
    name = "foreign"
    tries = "speaks for a party that another rank hosts: wants that one's place in the sum"

    def lies(self, message: Message) -> Iterable[Message]:
        if message.party not in self.hosted:
            return [message]
        return [dataclasses.replace(message, party=self.hosted[-1] + 1)]  # rank 1 has the first block


class Huge(ClientAttack):
    name = "huge"
    tries = "announces a message of 1 TiB and keeps sending pieces of it: wants rank 0 to run out of memory"

    def instead(self, endpoint: Forged, model: Train) -> Message:
        header = Header(MaskedInput.TYPE, model.round, self.hosted[0], TEBIBYTE).pack()
        endpoint.raw(0, header + bytes(PIECE - FRAMING))
        return until_stop(endpoint, lambda: endpoint.raw(0, bytes(PIECE)), at_once=1)


class Flood(ClientAttack):
    name = "flood"
    tries = "sends messages of a round that there is not, without end: wants rank 0 to hear nobody else"

    def instead(self, endpoint: Forged, model: Train) -> Message:
        old = bytes(encode(AdvertiseKeys(model.round + 99, self.hosted[0], bytes(32), bytes(32))))
        return until_stop(endpoint, lambda: endpoint.raw(0, old), at_once=50)


class FalseReport(ClientAttack):
    name = "report"
    tries = "reports test figures that are no numbers, or too many of them: wants everybody's score spoilt, or the run to end"
    flags = "--entropy seeded --metrics party --eval-every 1"
    sent = 0

    def lies(self, message: Message) -> Iterable[Message]:
        if isinstance(message, EvalReport):
            self.sent += 1
            if self.sent % 2:
                message = dataclasses.replace(message, figures=np.full_like(message.figures, np.nan))
            else:
                message = dataclasses.replace(message, figures=message.figures[:, :-1])
        return [message]

    def judge(self) -> Verdict:
        scores = ("accuracy", "rmse")
        if self.summary and not any(self.summary.get(name) is not None for name in scores):
            return Verdict("the run has no score", broken=True)
        return super().judge()


class FalseTally(ClientAttack):
    name = "tally"
    tries = "gives a false account of the bytes that it sent: wants a ledger that is wrong, or a run that fails over it"

    def lies(self, message: Message) -> Iterable[Message]:
        if isinstance(message, Tally):
            message = dataclasses.replace(message, bytes_given=message.bytes_given + 1000)
        return [message]


class Dealer(ClientAttack):
    name = "dealer"
    tries = "seals rubbish for everybody, so that nobody can open its bundles: wants a sum that cannot be unmasked"

    def fits(self, config: Config) -> str:
        return "" if config.aggregation.aggregation != "plain" else "aggregation = plain: there are no bundles"

    def lies(self, message: Message) -> Iterable[Message]:
        if isinstance(message, ShareKeys | ShareBatch):
            rubbish = tuple(dataclasses.replace(one, sealed=os.urandom(len(one.sealed))) for one in message.bundles)
            message = dataclasses.replace(message, bundles=rubbish)
        return [message]


class Complainer(Dealer):
    name = "complainer"
    tries = "says that nobody's bundle opens: wants the honest ones put out"

    def __init__(self, adversary: str):
        super().__init__(adversary)
        self.senders: dict[int, tuple[int, ...]] = {}

    def hears(self, endpoint: Forged, source: int, message: Message) -> Message | None:
        if isinstance(message, ShareList):
            self.senders[message.party] = tuple(sorted(bundle.party for bundle in message.bundles))
        return super().hears(endpoint, source, message)

    def lies(self, message: Message) -> Iterable[Message]:
        if isinstance(message, MaskedInput):
            message = dataclasses.replace(message, unopened=self.senders[message.party])
        return [message]
