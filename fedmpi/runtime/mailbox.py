"""Rank 0's post: what arrives, by when, and whether its sender may speak for whom it speaks; and what leaves, for which rank."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from fedmpi.aggregation.base import Answers
from fedmpi.errors import ProtocolError, TransportError
from fedmpi.runtime.placement import Placement
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.frame import NOBODY
from fedmpi.wire.message import Message, speakers
from fedmpi.wire.phases import Purpose

Kind = TypeVar("Kind", bound=Message)


class Mailbox:
    def __init__(self, endpoint: Endpoint, placement: Placement, patience: float):
        """`patience`: seconds that a rank, or a party at its local work, is waited for."""
        self.endpoint, self.placement, self.patience = endpoint, placement, patience

    # ---- what leaves ----

    def to_all(self, message: Message) -> None:
        for rank in self.placement.ranks():
            self.endpoint.send(rank, message)

    def to_hosts(self, parties: Iterable[int], message_for: Callable[[tuple[int, ...]], Message]) -> None:
        """One message to every rank that hosts some of `parties`, made for those."""
        for rank, hosted in self.placement.by_rank(parties).items():
            self.endpoint.send(rank, message_for(hosted))

    def answer(self, answers: Answers) -> None:
        for party, message in answers:
            self.endpoint.send(self.placement.rank_of(party), message)

    # ---- what arrives ----

    def take(self, deadline: float) -> tuple[int, Message] | None:
        """The next message and the rank that it came from; None at the deadline."""
        arrived = self.endpoint.poll(max(0.0, deadline - time.monotonic()))
        if arrived is not None:
            self._check_host(*arrived)
        return arrived

    def take_of(self, round: int, purpose: Purpose, deadline: float) -> Message | None:
        """The next message of this session; None at the deadline. What is late, the last words of a party that was dropped, is
        let go of."""
        while True:
            arrived = self.take(deadline)
            if arrived is None:
                return None
            source, message = arrived
            if not speakers(message):
                raise ProtocolError(f"rank {source} sent {type(message).__name__}, which is not its turn")
            if (message.round, message.purpose) == (round, purpose):
                return message

    def collect(self, kind: type[Kind], take: Callable[[int, Kind], None]) -> None:
        """One message of `kind` from every rank; `take` is given each."""
        missing, deadline = set(self.placement.ranks()), time.monotonic() + self.patience
        while missing:
            arrived = self.take(deadline)
            if arrived is None:
                raise TransportError(f"no {kind.__name__} from ranks {sorted(missing)} (round_deadline)")
            source, message = arrived
            if speakers(message):
                continue  # late: the last words of a party that was dropped
            if not isinstance(message, kind) or source not in missing:
                raise ProtocolError(f"rank {source} sent {type(message).__name__}, expected {kind.__name__}")
            missing.remove(source)
            take(source, message)

    def _check_host(self, source: int, message: Message) -> None:
        hosted = self.placement.parties_of(source)
        for party in (*speakers(message), *([message.party] if message.party != NOBODY else ())):
            if not hosted[0] <= party <= hosted[-1]:  # blocks are contiguous
                raise ProtocolError(f"spoke through rank {source}, which does not host it", party=party)
