"""What the round asks of an aggregation: two small state machines that exchange messages.

Neither side sends anything by itself: a call returns the messages to send, and the caller carries them. A phase of the
server's machine ends when everybody in it has answered or is gone; `drop` takes one party out, `expire` all who are late.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmpi.errors import Fault
from fedmpi.wire.message import Message

Answers = list[tuple[int, Message]]


@dataclass(frozen=True)
class Sum:
    """The exact sum of the survivors' encodings."""

    total: np.ndarray  # int64
    survivors: tuple[int, ...]
    support: np.ndarray | None = None  # its coordinates, where the round has found them; None: as the method has it


class ServerSession(ABC):
    def start(self) -> Answers:
        """Before the first message."""
        return []

    @abstractmethod
    def receive(self, message: Message) -> Answers:
        """Take a party's message; returns (party, answer) pairs. ProtocolError changes nothing."""

    @abstractmethod
    def drop(self, party: int) -> Answers:
        """The party is gone, or was caught at something: go on without it."""

    @abstractmethod
    def expire(self) -> Answers:
        """The phase's deadline has passed: everybody who is waited for is gone."""

    @abstractmethod
    def waiting(self) -> tuple[int, ...]:
        """Parties whose message is still to come."""

    @abstractmethod
    def result(self) -> Sum: ...

    @property
    @abstractmethod
    def phase_name(self) -> str:
        """The phase that it is in, by the name that the ledger and a dropout plan use."""

    @property
    @abstractmethod
    def coordinates(self) -> int:
        """That each party sends; 0 while that is not settled."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """The sum is there, or it never will be."""

    @property
    def failed(self) -> bool:
        return False

    @property
    def reason(self) -> str:
        """Why it failed."""
        return ""

    @property
    def faults(self) -> Sequence[Fault]:
        """Who was caught at what, beside those whose message was refused."""
        return ()

    @property
    def disputes(self) -> Collection[tuple[int, int]]:
        """(holder, dealer) pairs of which one lies, and nobody can tell which."""
        return ()

    @property
    def openable(self) -> tuple[int, ...]:
        """Hidden parties whose sum the server has asked to open, whether or not it got it."""
        return ()

    @property
    def planned(self) -> int:
        """How many were known to vanish, and were not waited for."""
        return 0

    @property
    def vanished(self) -> Collection[int]:
        """Who these are: should they speak all the same, it is not their turn and no offence."""
        return ()


class Listening(ServerSession):
    """A session in which every party says one thing."""

    def __init__(self, cohort: tuple[int, ...]):
        self._missing = set(cohort)

    def drop(self, party: int) -> Answers:
        self._missing.discard(party)
        return []

    def expire(self) -> Answers:
        self._missing.clear()
        return []

    def waiting(self) -> tuple[int, ...]:
        return tuple(sorted(self._missing))

    @property
    def done(self) -> bool:
        return not self._missing


class Forwarding(ServerSession):
    """A session that is another one, but for what a subclass changes."""

    def __init__(self, inner: Any):
        """`inner`: a ServerSession, or a machine of the protocol, which answers to the same names."""
        self._inner = inner

    def _onwards(self, answers: Answers) -> Answers:
        """After every move; what a subclass does then, it adds to the answers."""
        return answers

    def start(self) -> Answers:
        return self._onwards(self._inner.start())

    def receive(self, message: Message) -> Answers:
        return self._onwards(self._inner.receive(message))

    def drop(self, party: int) -> Answers:
        return self._onwards(self._inner.drop(party))

    def expire(self) -> Answers:
        return self._onwards(self._inner.expire())

    def waiting(self) -> tuple[int, ...]:
        return self._inner.waiting()

    def result(self) -> Sum:
        return self._inner.result()

    @property
    def phase_name(self) -> str:
        return self._inner.phase_name

    @property
    def coordinates(self) -> int:
        return self._inner.coordinates

    @property
    def done(self) -> bool:
        return self._inner.done

    @property
    def failed(self) -> bool:
        return self._inner.failed

    @property
    def reason(self) -> str:
        return self._inner.reason

    @property
    def faults(self) -> Sequence[Fault]:
        return self._inner.faults

    @property
    def disputes(self) -> Collection[tuple[int, int]]:
        return self._inner.disputes

    @property
    def openable(self) -> tuple[int, ...]:
        return self._inner.openable

    @property
    def planned(self) -> int:
        return self._inner.planned


class PartySession(ABC):
    @abstractmethod
    def start(self) -> Iterable[Message]:
        """The first messages, once the party has its encoded update."""

    @abstractmethod
    def receive(self, message: Message) -> Iterable[Message]:
        """The answers to a message of the server; ProtocolError changes nothing."""
