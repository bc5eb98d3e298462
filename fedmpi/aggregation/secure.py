"""Secure aggregation as the round sees it: the protocol of `secagg` over encoded updates; and the hybrid of both kinds."""

import numpy as np

from fedmpi.aggregation.base import Answers, Forwarding, PartySession, ServerSession, Sum
from fedmpi.aggregation.plain import PlainServer
from fedmpi.errors import Fault, ProtocolError
from fedmpi.privacy.encoding import Encoding
from fedmpi.secagg.party import SecAggParty
from fedmpi.secagg.server import SecAggServer
from fedmpi.wire.message import Message, speakers


class SecureParty(PartySession):
    def __init__(self, machine: SecAggParty):
        self._machine = machine

    def start(self) -> list[Message]:
        return [self._machine.start()]

    def receive(self, message: Message) -> list[Message]:
        return [self._machine.receive(message)]


class SilentParty(PartySession):
    """A party that missed the making of the keys that a round is masked with: it sits the round out."""

    def start(self) -> list[Message]:
        return []

    def receive(self, message: Message) -> list[Message]:
        raise ProtocolError(
            f"rank 0 sent {type(message).__name__}, and it has no keys", party=message.party, phase=message.PHASE
        )


class SecureServer(Forwarding):
    """The protocol's machine, over encoded updates."""

    planned = 0

    def __init__(self, machine: SecAggServer, encoding: Encoding):
        super().__init__(machine)
        self._encoding = encoding

    def start(self) -> Answers:
        return []

    @property
    def coordinates(self) -> int:
        return self._encoding.dimension

    def result(self) -> Sum:
        total, survivors = self._inner.result()
        return Sum(self._encoding.unwrap(total), survivors)


class HybridServer(Forwarding):
    """MMF 3.2: some parties share in the clear, the others through the protocol, in one round and into one sum. Whether it
    failed, and whose sum was asked for, is decided by its protocol half."""

    def __init__(self, plain: PlainServer, secure: SecureServer, clear: frozenset[int]):
        super().__init__(secure)
        self._plain, self._clear = plain, clear

    def _side(self, party: int) -> ServerSession:
        return self._plain if party in self._clear else self._inner

    def receive(self, message: Message) -> Answers:
        spoken_for = speakers(message)
        return (self._side(spoken_for[0]) if spoken_for else self._plain).receive(message)

    def drop(self, party: int) -> Answers:
        return self._side(party).drop(party)

    def expire(self) -> Answers:
        return self._plain.expire() + self._inner.expire()

    @property
    def faults(self) -> list[Fault]:
        return [*self._plain.faults, *self._inner.faults]

    @property
    def done(self) -> bool:
        return self.failed or (self._plain.done and self._inner.done)

    def waiting(self) -> tuple[int, ...]:
        return tuple(sorted(self._plain.waiting() + self._inner.waiting()))

    def result(self) -> Sum:
        clear, hidden = self._plain.result(), self._inner.result()
        return Sum(np.add(clear.total, hidden.total), tuple(sorted(clear.survivors + hidden.survivors)))
