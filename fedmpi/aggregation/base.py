"""What the round asks of an aggregation: two small state machines that exchange messages.

Neither side sends anything by itself: a call returns the messages to send, and the caller carries them. The server's
machine is `done` when it has its sum; `waiting` names the parties that it still needs, for the error message when a
deadline passes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from fedmpi.wire.messages import Message


@dataclass(frozen=True)
class Sum:
    """The exact sum of the survivors' encodings: on the public support, or over all coordinates."""

    total: np.ndarray  # int64
    survivors: tuple[int, ...]


class ServerSession(ABC):
    @abstractmethod
    def receive(self, message: Message) -> list[tuple[int, Message]]:
        """Take a party's message; returns (party, answer) pairs. ProtocolError changes nothing."""

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def waiting(self) -> tuple[int, ...]:
        """Parties whose message is still to come."""

    @abstractmethod
    def result(self) -> Sum: ...


class PartySession(ABC):
    @abstractmethod
    def start(self) -> list[Message]:
        """The first messages, once the party has its encoded update."""
