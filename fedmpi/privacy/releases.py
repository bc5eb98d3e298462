"""The log of releases: what left the parties, each line on the disk before the act that it stands for.

OUT/releases.jsonl, append-only. A line that an interruption cut short stands for nothing, because the act comes after it; a
round that was asked for and has no end was interrupted. Whatever a run says about epsilon is a function of these lines (see
`fedmpi.privacy.account`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpi.errors import DataError
from fedmpi.files import append_line, write_text, writing
from fedmpi.privacy.mechanism import Mechanism

NAME = "releases.jsonl"
Parties = tuple[int, ...]


@dataclass(frozen=True)
class Terms:
    """What all releases of a run have in common: how they are made, and who is trusted with what."""

    mechanism: Mechanism
    parties: int
    rounds: int
    delta: float
    accountant: str
    sampling: float
    entropy: str
    aggregation: str
    support: str
    denominator: str
    graph: str
    adversary: str
    colluding: int
    clear_by_data: bool = False  # whether the parties' data decide who shares in the clear, which rank 0 learns
    # Adversary active: what a rank 0 that lies can get opened at worst, a sum with `least_noises` honest shares of the noise, made
    # for a cohort of `least_cohort`; 0: no such bound.
    least_noises: int = 0
    least_cohort: int = 0


@dataclass(frozen=True)
class Started:
    """The run began, or went on after a round that it had kept; ranks are about to say that they are ready."""

    terms: Terms
    after: int = 0
    figures: bool = False  # whether a checksum of the data leaves with that
    run: str = ""  # the session of the run's first start, in every checkpoint's mark; older logs lack it


@dataclass(frozen=True)
class Asked:
    """These parties are asked for their updates."""

    round: int
    drawn: Parties  # whose updates are in the round; who only fills it up gives nothing away
    cohort: Parties  # everybody who adds noise
    clear: Parties  # of these, whose own updates rank 0 will see: once asked they may reach it at any time, even late
    share: float  # one party's noise, divided by the largest norm that an update can have
    exposed: bool  # whether so many collude that they open any single input with rank 0
    figures: bool  # whether each party's own figures of its training leave with it


@dataclass(frozen=True)
class Opened:
    """Rank 0 asks for what opens the sum of these hidden parties, and may have it, in time or late."""

    round: int
    parties: Parties
    coordinates: int


@dataclass(frozen=True)
class Stepped:
    """The model takes a step with the sum of these, and everybody will see it."""

    round: int
    survivors: Parties
    coordinates: int


@dataclass(frozen=True)
class Failed:
    """The round had no sum."""

    round: int


@dataclass(frozen=True)
class Shown:
    """Everybody's test figures leave: each party's own, or their sum."""

    round: int
    figures: str  # party, securesum


@dataclass(frozen=True)
class Ended:
    """The run is complete."""

    round: int


class Forgotten(DataError):
    """A log that lacks what a checkpoint knows of."""


Event = Started | Asked | Opened | Stepped | Failed | Shown | Ended
EVENTS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in typing.get_args(Event)}


class ReleaseLog:
    """The events of a run so far, and the file that holds them."""

    def __init__(self, path: Path, events: list[Event], size: int):
        self.path = path
        self.events = events
        self._size = size  # bytes of whole lines

    @classmethod
    def create(cls, out: Path) -> ReleaseLog:
        write_text(out / NAME, "")
        return cls(out / NAME, [], 0)

    @classmethod
    def read(cls, out: Path) -> ReleaseLog:
        """The log of the run in this folder; DataError if there is none, or if it is damaged."""
        path = out / NAME
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): what was released is unknown") from None
        whole = content[: content.rfind(b"\n") + 1]
        events = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                events.append(parse(line.decode()))
            except (ValueError, TypeError, KeyError, AttributeError, DataError) as error:
                raise DataError(
                    f"{path} line {number} cannot be used ({error}): what was released is unknown"
                ) from None
        if events and not isinstance(events[0], Started):
            raise DataError(f"{path} line 1 does not say how releases are made: what was released is unknown")
        return cls(path, events, len(whole))

    @classmethod
    def go_on(cls, out: Path, terms: Terms) -> ReleaseLog:
        """To write on where an interruption ended; DataError if it is the log of another run."""
        log = cls.read(out)
        if any(isinstance(event, Started) and event.terms != terms for event in log.events):
            raise DataError(f"{log.path} is the log of a run with other settings: what was released is unknown")
        os.truncate(log.path, log._size)  # the line that was cut short
        return log

    @property
    def under_secret_noise(self) -> bool:
        """Whether something was asked for that cannot be drawn again, and so counts whatever becomes of the run."""
        first = self.events[0] if self.events else None
        secret = isinstance(first, Started) and first.terms.entropy == "os" and first.terms.mechanism.noisy
        return secret and any(isinstance(event, (Asked, Shown)) for event in self.events)

    @property
    def run(self) -> str:
        """The run's name, as it was first given one."""
        return next((event.run for event in self.events if isinstance(event, Started) and event.run), "")

    def append(self, event: Event) -> None:
        """On the disk when it returns; then the act may follow."""
        line = unparse(event)
        with writing(self.path):
            size = self.path.stat().st_size
        if size != self._size:
            raise DataError(f"{self.path} was changed by somebody else: what was released is unknown")
        append_line(self.path, line)
        self._size += len(line.encode()) + 1
        self.events.append(event)

    def position(self) -> dict[str, Any]:
        """For a checkpoint: what the log must at least hold when the run goes on from there."""
        return {"bytes": self._size, "sha256": self._digest(self._size)}

    def check_covers(self, position: dict[str, Any]) -> None:
        """DataError unless everything up to `position` is in the log as it was."""
        if self._size < position["bytes"] or self._digest(position["bytes"]) != position["sha256"]:
            raise Forgotten(
                f"{self.path} is older than the checkpoint beside it, or was changed: what was released since is unknown, so "
                "no epsilon can be stated; start a new run"
            )

    def _digest(self, size: int) -> str:
        with self.path.open("rb") as stream:
            return hashlib.sha256(stream.read(size)).hexdigest()


def unparse(event: Event) -> str:
    """An event as a line of JSON, sets of parties as ranges."""
    said: dict[str, Any] = {"event": type(event).__name__.lower()}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if isinstance(value, Terms):
            facts = {name.name: getattr(value, name.name) for name in dataclasses.fields(value)}
            value = facts | {"mechanism": value.mechanism.facts()}
        said[field.name] = ranges(value) if isinstance(value, tuple) else value
    return json.dumps(said, allow_nan=False)


def parse(line: str) -> Event:
    said = json.loads(line)
    kind = EVENTS[said.pop("event")]
    hints = typing.get_type_hints(kind)
    if set(said) | ({"run"} if kind is Started else set()) != set(hints):
        raise ValueError(f"{kind.__name__.lower()} has {', '.join(sorted(said))}; expected {', '.join(sorted(hints))}")
    event: Event = kind(**{name: _value(value, hints[name], name) for name, value in said.items()})
    return event


def _value(value: Any, hint: Any, name: str) -> Any:
    if hint is Terms:
        hints = typing.get_type_hints(Terms)
        if set(value) | {"least_noises", "least_cohort"} != set(hints):  # which older logs lack
            raise ValueError(f"terms are {', '.join(sorted(value))}; expected {', '.join(sorted(hints))}")
        return Terms(**{field: _value(part, hints[field], field) for field, part in value.items()})
    if hint is Mechanism:
        return Mechanism.from_facts(value)
    if hint == Parties:
        return parties_of(value)
    fits = isinstance(value, (int, float)) if hint is float else isinstance(value, hint)
    if not fits or (hint is not bool and isinstance(value, bool)):
        raise ValueError(f"{name} = {value!r}")
    return float(value) if hint is float else value


def ranges(parties: Parties) -> str:
    """Ascending numbers as text: 0-5,7."""
    found: list[list[int]] = []
    for party in parties:
        if found and found[-1][1] == party - 1:
            found[-1][1] = party
        else:
            found.append([party, party])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def parties_of(text: str) -> Parties:
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += [int(first)] if not last else [int(first), *range(int(first) + 1, int(last)), int(last)]
    if found != sorted(set(found)):
        raise ValueError(f"parties {text} do not ascend")
    return tuple(found)
