"""Secure aggregation as the round sees it: the protocol of `secagg` over encoded updates; and the hybrid of both kinds."""

import numpy as np

from fedmpi.aggregation.base import Answers, PartySession, ServerSession, Sum
from fedmpi.aggregation.plain import PlainServer
from fedmpi.privacy.encoding import Encoding
from fedmpi.secagg.party import SecAggParty
from fedmpi.secagg.server import SecAggServer
from fedmpi.wire.messages import Message, PlainRows


class SecureParty(PartySession):
    def __init__(self, machine: SecAggParty):
        self.machine = machine

    def start(self):
        return [self.machine.start()]

    def receive(self, message):
        return [self.machine.receive(message)]


class SecureServer(ServerSession):
    def __init__(self, machine: SecAggServer, encoding: Encoding):
        self.machine = machine
        self._encoding = encoding

    @property
    def faults(self) -> list[str]:
        return [str(fault) for fault in self.machine.faults]

    @property
    def reason(self) -> str:
        return self.machine.reason

    @property
    def openable(self) -> tuple[int, ...]:
        return self.machine.openable

    @property
    def phase_name(self):
        return self.machine.phase_name

    def receive(self, message: Message) -> Answers:
        return self.machine.receive(message)

    def drop(self, party, fault=""):
        return self.machine.drop(party)  # whoever caught it has said so

    def expire(self):
        return self.machine.expire()

    @property
    def done(self):
        return self.machine.done

    @property
    def failed(self):
        return self.machine.failed

    def waiting(self):
        return self.machine.waiting()

    def result(self):
        total, survivors = self.machine.result()
        return Sum(self._encoding.unwrap(total), survivors)


class HybridServer(ServerSession):
    """MMF 3.2: some parties share in the clear, the others through the protocol, in one round and into one sum."""

    def __init__(self, plain: PlainServer, secure: SecureServer, clear: frozenset[int]):
        self._plain, self._secure, self._clear = plain, secure, clear

    def _side(self, party: int) -> ServerSession:
        return self._plain if party in self._clear else self._secure

    @property
    def faults(self) -> list[str]:
        return self._plain.faults + self._secure.faults

    @property
    def reason(self) -> str:
        return self._secure.reason

    @property
    def openable(self) -> tuple[int, ...]:
        return self._secure.openable

    @property
    def phase_name(self):
        return self._secure.phase_name

    def receive(self, message):
        side = self._plain if isinstance(message, PlainRows) else self._side(message.party)
        return side.receive(message)

    def drop(self, party, fault=""):
        return self._side(party).drop(party, fault)

    def expire(self):
        return self._plain.expire() + self._secure.expire()

    @property
    def done(self):
        return self._secure.failed or (self._plain.done and self._secure.done)

    @property
    def failed(self):
        return self._secure.failed

    def waiting(self):
        return tuple(sorted(self._plain.waiting() + self._secure.waiting()))

    def result(self):
        clear, hidden = self._plain.result(), self._secure.result()
        return Sum(np.add(clear.total, hidden.total), tuple(sorted(clear.survivors + hidden.survivors)))
