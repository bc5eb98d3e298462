"""What every attack is: a name, who lies, how it is played on each rank, and what came of it."""

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedmpi.aggregation import party_end
from fedmpi.aggregation.protocol import ProtocolRules, Session
from fedmpi.config import Config
from fedmpi.crypto.keys import verify
from fedmpi.errors import FedmpiError
from fedmpi.liars.stage import Forged, Quiet, Report, attend, close, report_in
from fedmpi.privacy.encoding import Encoding
from fedmpi.runtime.server import run_server
from fedmpi.runtime.start import Start, start_run
from fedmpi.secagg import server as secagg_server
from fedmpi.secagg.party import SecAggParty
from fedmpi.secagg.server import SecAggServer
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.message import Message

TRANSPORT = "played by fedmpi attack"
LEAST_RANKS = 3  # a server, a victim, and somebody else


@dataclass(frozen=True)
class Verdict:
    got: str  # by the liar, in a line
    broken: bool = False  # whether it is something that it must not have
    known: bool = (
        False  # whether it is something that nobody promised to keep from it, and that it must not have elsewhere
    )

    @property
    def word(self) -> str:
        return "BROKEN" if self.broken else "not promised" if self.known else "held"


class Attack(ABC):
    """One for each time that it is played: on every rank of a job over MPI, or one for all its ranks in memory."""

    name: ClassVar[str]
    side: ClassVar[str]  # server, client
    tries: ClassVar[str]
    acts: ClassVar[int] = 1  # how often all ranks are started
    adversaries: ClassVar[tuple[str, ...]] = ("passive", "active")
    flags: ClassVar[str] = ""  # of the run, in front of the user's

    def __init__(self, adversary: str):
        self.active = adversary == "active"
        self.untried = ""  # why it cannot be played against this run
        self.ended = ""  # the error that ended rank 0's run, if one did
        self.silent: set[int] = set()  # ranks that did not come to an end
        self.reports: list[dict[int, Report]] = []  # what the others said, by act

    def fits(self, config: Config) -> str:
        """Why it cannot be played against this run; empty if it can."""
        return ""

    def own(self, config: Config) -> Config:
        """What all ranks are started for."""
        return config

    def lead(self, endpoint: Endpoint, config: Config, act: int) -> None:
        """Rank 0, for one act."""
        reports: dict[int, Report] = {}
        spoken: Endpoint = endpoint
        try:
            if not self.untried:
                spoken = self.mouth(endpoint)
                self._begin(spoken, config, act)
        finally:
            reports |= getattr(spoken, "reports", {})
            self.silent |= close(spoken, reports)
            self.reports.append(reports)

    def mouth(self, endpoint: Endpoint) -> Endpoint:
        """What rank 0 speaks through."""
        return endpoint

    def _begin(self, endpoint: Endpoint, config: Config, act: int) -> None:
        terminal = Quiet()
        try:
            start = start_run(self.said(config, act), endpoint.size, TRANSPORT, terminal)
        except FedmpiError as error:
            self.untried = str(error)
            return
        try:
            self.play(endpoint, start, terminal, act)
        except FedmpiError as error:
            self.ended = str(error)
        finally:
            start.record.close()

    def said(self, config: Config, act: int) -> Config:
        """What rank 0 is started for."""
        return config

    @abstractmethod
    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None: ...

    def follow(self, endpoint: Endpoint, config: Config, act: int) -> None:
        """Any other rank, for one act."""
        attend(endpoint, config)

    @abstractmethod
    def judge(self) -> Verdict: ...

    def verdict(self) -> Verdict:
        if self.silent:
            return Verdict(f"rank {', '.join(map(str, sorted(self.silent)))} never came to an end", broken=True)
        return self.judge()

    def answers(self) -> list[str]:
        """What the honest side said, a line each."""
        lines: dict[str, list[int]] = {}
        for act in self.reports:
            for rank, report in sorted(act.items()):
                if report.refused and rank not in lines.setdefault(report.refused, []):
                    lines[report.refused].append(rank)
        return [f"rank {', '.join(map(str, ranks))} refused: {line}" for line, ranks in lines.items()]


class ServerAttack(Attack):
    """Rank 0 lies. It runs the real server, whose words are changed on their way out, and does not check what it knows is false."""

    side = "server"

    def __init__(self, adversary: str):
        super().__init__(adversary)
        self.act = 0
        self.heard: list[list[tuple[int, Message]]] = []  # by act, reports not among it

    def mouth(self, endpoint: Endpoint) -> Endpoint:
        return Forged(endpoint, self)

    def lead(self, endpoint: Endpoint, config: Config, act: int) -> None:
        self.act = act
        self.heard.append([])
        super().lead(endpoint, config, act)

    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None:
        with unchecked():
            run_server(endpoint, *start)

    def says(self, endpoint: Forged, rank: int, message: Message) -> Iterable[Message]:
        return [message]

    def hears(self, endpoint: Forged, source: int, message: Message) -> Message | None:
        if report_in(message) is None:
            self.heard[-1].append((source, message))
        return message

    def verdict(self) -> Verdict:
        """It held because somebody refused, or because there was nothing to be had; not because the liar fell over its own feet."""
        verdict = super().verdict()
        refused = any(report.refused for act in self.reports for report in act.values())
        if self.ended and not (refused or verdict.broken or verdict.known):
            self.untried = f"the liar's own run failed ({self.ended})"
        return verdict

    def heard_of(self, *kinds: type[Message], act: int = -1) -> list[Any]:
        return [message for _, message in self.heard[act] if isinstance(message, kinds)]


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Rank 0's machine takes any signature for good, because the liar knows better. Parties have a check of their own."""
    setattr(secagg_server, "verify", lambda *_: True)  # noqa: B010
    try:
        yield
    finally:
        setattr(secagg_server, "verify", verify)  # noqa: B010


@contextlib.contextmanager
def watched() -> Iterator[dict[tuple[int, int], np.ndarray]]:
    """What parties of this process put into the protocol, by (round, party): to hold what a liar found against it. Where ranks are
    processes of their own nobody can look, and it stays empty."""
    seen: dict[tuple[int, int], np.ndarray] = {}

    class Watched(SecAggParty):
        def __init__(self, rules, party, values, **options):
            seen.setdefault((rules.round, party), np.array(values))
            super().__init__(rules, party, values, **options)

    setattr(party_end, "SecAggParty", Watched)  # noqa: B010
    try:
        yield seen
    finally:
        setattr(party_end, "SecAggParty", SecAggParty)  # noqa: B010


@dataclass(frozen=True)
class Opened:
    """A sum that rank 0 has taken the masks off."""

    round: int
    parties: tuple[int, ...]
    total: np.ndarray
    bits: int


@contextlib.contextmanager
def opened() -> Iterator[list[Opened]]:
    """What rank 0 of this process made of masked inputs."""
    seen: list[Opened] = []
    result = SecAggServer.result

    def noted(self: SecAggServer) -> tuple[np.ndarray, tuple[int, ...]]:
        total, parties = result(self)
        seen.append(Opened(self.rules.round, parties, np.array(total), self.rules.bits))
        return total, parties

    setattr(SecAggServer, "result", noted)  # noqa: B010
    try:
        yield seen
    finally:
        setattr(SecAggServer, "result", result)  # noqa: B010


def changed(config: Config, layer: str, **values: Any) -> Config:
    """The configuration with other settings in one layer."""
    return dataclasses.replace(config, **{layer: dataclasses.replace(getattr(config, layer), **values)})


def threshold_of(config: Config) -> int:
    """Shares that open a secret in a round of everybody."""
    return ProtocolRules(config).of(Session(0), config.run.parties, Encoding(1.0, 1, 8, 1)).threshold


def only_secure(config: Config) -> str:
    kind = config.aggregation.aggregation
    return "" if kind == "secure" else f"aggregation = {kind}: this attack is on secure aggregation"


def first_values(values: np.ndarray) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values[:4].tolist()) + (" ...]" if len(values) > 4 else "]")


def parties_in_words(parties: Iterable[int]) -> str:
    listed = sorted(parties)
    if not listed:
        return "nobody"
    shown = ", ".join(map(str, listed[:8])) + (" ..." if len(listed) > 8 else "")
    return f"{'party' if len(listed) == 1 else 'parties'} {shown}"


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, with its content."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
