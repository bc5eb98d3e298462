"""Support `union`: before a round's aggregation the parties agree on its coordinates.

Each names those that its data ask for, and has the union of all back; then everybody takes part over the union, with zeros where
it had nothing to say. Both classes wrap the aggregation that follows, whichever it is.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from fedmpi.aggregation.base import Answers, Forwarding, Listening, PartySession, ServerSession, Sum
from fedmpi.aggregation.protocol import Session
from fedmpi.errors import ProtocolError, WireError
from fedmpi.privacy.mechanism import Kind
from fedmpi.wire.message import Message
from fedmpi.wire.messages import SupportProposal, SupportUnion
from fedmpi.wire.phases import Phase
from fedmpi.wire.support import decode_support, encode_support


def over(mechanism: Kind, coordinates: int) -> Kind:
    """The mechanism over a union; its integers were made wide enough for what the method declared, and no more."""
    if coordinates > mechanism.encoding.dimension:
        raise ProtocolError(
            f"{coordinates} coordinates are sent, and the method declared {mechanism.encoding.dimension} at most",
            phase=Phase.SUPPORT,
        )
    return mechanism.over(coordinates)


def over_union(session: Session, coded: bytes) -> Session:
    """The session once its coordinates are settled, which are then part of what it is about."""
    return dataclasses.replace(session, about=hashlib.sha256(session.about + coded).digest())


class Proposals(Listening):
    """The first half: everybody's coordinates."""

    phase_name = Phase.SUPPORT
    coordinates = 0

    def __init__(self, cohort: tuple[int, ...], dimension: int):
        super().__init__(cohort)
        self._dimension = dimension
        self.heard: dict[int, np.ndarray] = {}

    def receive(self, message: Message) -> Answers:
        def wrong(what: str) -> ProtocolError:
            return ProtocolError(what, party=message.party, phase=Phase.SUPPORT)

        if not isinstance(message, SupportProposal):
            raise wrong(f"sent {type(message).__name__}, expected SupportProposal")
        if message.party not in self._missing:
            raise wrong("proposed a second support, or is not in this round's cohort")
        try:
            self.heard[message.party] = decode_support(message.support, self._dimension)
        except WireError as error:
            raise wrong(str(error)) from None
        return self.drop(message.party)

    def result(self) -> Sum:
        raise ProtocolError("the support is not a sum", phase=Phase.SUPPORT)


class UnionServer(Forwarding):
    def __init__(
        self, round: int, cohort: tuple[int, ...], dimension: int, follow: Callable[[bytes, int], ServerSession]
    ):
        """`follow(coded, coordinates)` makes the aggregation over the union, so many coordinates, as it is sent."""
        self._proposals = Proposals(cohort, dimension)
        super().__init__(self._proposals)
        self._round, self._cohort, self._dimension, self._follow = round, cohort, dimension, follow
        self._union = np.zeros(0, np.int64)

    def _onwards(self, answers: Answers) -> Answers:
        """Once everybody has spoken or is gone: the union to those who spoke, and the aggregation without the others."""
        if self._inner is not self._proposals or not self._proposals.done:
            return answers
        heard = self._proposals.heard
        self._union = np.unique(np.concatenate([*heard.values(), np.array([0])]))  # never empty
        coded = encode_support(self._union, self._dimension)
        self._inner = self._follow(coded, len(self._union))
        answers = answers + [(party, SupportUnion(self._round, party, coded)) for party in sorted(heard)]
        answers += self._inner.start()
        for party in self._cohort:
            if party not in heard:
                answers += self._inner.drop(party)
        return answers

    def result(self) -> Sum:
        found = super().result()
        return Sum(found.total, found.survivors, self._union)


class UnionParty(PartySession):
    def __init__(
        self,
        round: int,
        party: int,
        dimension: int,
        values: np.ndarray,
        support: np.ndarray | None,
        follow: Callable[[bytes, np.ndarray], PartySession],
    ):
        """`follow(coded, values)` makes the aggregation of an update over the union's coordinates, as it was sent them."""
        self._round, self._party, self._dimension = round, party, dimension
        self._values, self._follow = values, follow
        self._support = np.arange(dimension) if support is None else support
        self._inner: PartySession | None = None

    def start(self) -> Iterable[Message]:
        return [SupportProposal(self._round, self._party, encode_support(self._support, self._dimension))]

    def receive(self, message: Message) -> Iterable[Message]:
        if self._inner is not None:
            return self._inner.receive(message)
        if not isinstance(message, SupportUnion):
            raise ProtocolError(f"rank 0 sent {type(message).__name__} before the support", party=self._party)
        union = decode_support(message.support, self._dimension)
        at = np.searchsorted(union, self._support)
        if not len(union) or not np.array_equal(union[np.minimum(at, len(union) - 1)], self._support):
            raise ProtocolError(
                "rank 0 sent a union without this party's own coordinates", party=self._party, phase=Phase.SUPPORT
            )
        values = np.zeros(len(union))
        values[at] = self._values
        self._inner = self._follow(message.support, values)
        return self._inner.start()
