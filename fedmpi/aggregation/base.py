"""What the round asks of an aggregation: two small state machines that exchange messages.

Neither side sends anything by itself: a call returns the messages to send, and the caller carries them. A phase of the
server's machine ends when everybody in it has answered or is gone; `drop` takes one party out, `expire` all who are late.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from fedmpi.wire.messages import Message

Answers = list[tuple[int, Message]]


@dataclass(frozen=True)
class Sum:
    """The exact sum of the survivors' encodings: on the public support, or over all coordinates."""

    total: np.ndarray  # int64
    survivors: tuple[int, ...]


class ServerSession(ABC):
    reason: str = ""  # why the round failed
    faults: list[str]  # who was caught at what
    openable: tuple[int, ...] = ()  # hidden parties whose sum the server has asked to open, whether or not it got it

    @property
    @abstractmethod
    def phase_name(self) -> str:
        """The phase that it is in, by the name that the ledger and a dropout plan use."""

    @abstractmethod
    def receive(self, message: Message) -> Answers:
        """Take a party's message; returns (party, answer) pairs. ProtocolError changes nothing."""

    @abstractmethod
    def drop(self, party: int, fault: str = "") -> Answers:
        """The party is gone, or was caught at something: go on without it."""

    @abstractmethod
    def expire(self) -> Answers:
        """The phase's deadline has passed: everybody who is waited for is gone."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """The sum is there, or it never will be."""

    @property
    def failed(self) -> bool:
        return False

    @abstractmethod
    def waiting(self) -> tuple[int, ...]:
        """Parties whose message is still to come."""

    @abstractmethod
    def result(self) -> Sum: ...


class PartySession(ABC):
    @abstractmethod
    def start(self) -> list[Message]:
        """The first messages, once the party has its encoded update."""

    @abstractmethod
    def receive(self, message: Message) -> list[Message]:
        """The answers to a message of the server; ProtocolError changes nothing."""
