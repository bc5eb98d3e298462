"""Plain aggregation: every party sends its encoded update in the clear, the server adds integers."""

import numpy as np

from fedmpi.aggregation.base import Answers, Listening, PartySession, Sum
from fedmpi.errors import Fault, ProtocolError, WireError
from fedmpi.privacy.encoding import Encoding
from fedmpi.wire.bits import pack, packed_size, unpack
from fedmpi.wire.message import Message
from fedmpi.wire.messages import PlainInput
from fedmpi.wire.phases import Phase, Purpose
from fedmpi.wire.support import decode_support, encode_support


class PlainParty(PartySession):
    def __init__(
        self,
        round: int,
        party: int,
        encoding: Encoding,
        dimension: int,
        values: np.ndarray,
        support: np.ndarray | None = None,
    ):
        """`values`, integers modulo 2^bits, on `support`; None: the round's public support, which need not be sent."""
        coded = b"" if support is None else encode_support(support, dimension)
        self._message = PlainInput(round, party, coded, pack(values, encoding.bits))

    def start(self) -> list[Message]:
        return [self._message]

    def receive(self, message: Message) -> list[Message]:
        raise ProtocolError(f"got {type(message).__name__}, but it has nothing more to say", phase=Phase.UPDATE)


class PlainServer(Listening):
    phase_name = Phase.UPDATE

    def __init__(
        self,
        round: int,
        cohort: tuple[int, ...],
        encoding: Encoding,
        dimension: int,
        own_support: bool = False,
        most_lost: int | None = None,
        width: int = 1,
    ):
        """`dimension` of the sum; `most_lost`: with more of the cohort lost there is none, as under the protocol; `width` of a
        row, where parties send rows."""
        super().__init__(cohort)
        self._round = round
        self._cohort, self._tolerated = len(cohort), len(cohort) if most_lost is None else most_lost
        self._encoding = encoding
        self._dimension = dimension
        self._own = own_support
        self._width = width
        self._heard: list[int] = []
        self._faults: list[Fault] = []
        self._total = self._zeros()

    def _zeros(self) -> np.ndarray:
        return np.zeros(self._dimension, np.uint64)

    def receive(self, message: Message) -> Answers:
        values, support = self._check(message)
        # Integers modulo 2^64, cut to 2^b at the end: the order of arrival cannot matter.
        if support is None:
            self._total += values
        else:
            self._total[support] += values
        self._missing.remove(message.party)
        self._heard.append(message.party)
        return []

    def _check(self, message: Message) -> tuple[np.ndarray, np.ndarray | None]:
        def wrong(what: str) -> ProtocolError:
            return ProtocolError(what, party=message.party, phase=Phase.UPDATE)

        if not isinstance(message, PlainInput):
            raise wrong(f"sent {type(message).__name__}, expected PlainInput")
        if (message.round, message.purpose) != (self._round, Purpose.TRAINING):
            raise wrong(f"sent an update of round {message.round} in round {self._round}")
        if message.party not in self._missing:
            raise wrong("sent a second update" if message.party in self._heard else "is not in this round's cohort")
        if bool(message.support) != self._own:
            raise wrong("sent a support, none was asked for" if message.support else "sent no support")
        count, bits = self._encoding.dimension, self._encoding.bits
        if len(message.values) != packed_size(count, bits):
            raise wrong(f"sent {len(message.values)} bytes of values, expected {packed_size(count, bits)}")
        try:
            values = unpack(message.values, count, bits)
            support = decode_support(message.support, self._dimension, max_count=count) if self._own else None
        except WireError as error:
            raise wrong(str(error)) from None
        if support is not None and len(support) != count:
            raise wrong(f"sent a support of {len(support)} coordinates, expected {count}")
        return values, support

    @property
    def coordinates(self) -> int:
        return self._encoding.dimension

    @property
    def faults(self) -> list[Fault]:
        return self._faults

    @property
    def failed(self) -> bool:
        return self.done and self._cohort - len(self._heard) > self._tolerated

    @property
    def reason(self) -> str:
        if not self.failed:
            return ""
        return (
            f"round {self._round}, {self.phase_name}: {self._cohort - len(self._heard)} of {self._cohort} parties are lost, "
            f"with more than {self._tolerated} the sum is not opened"
        )

    def result(self) -> Sum:
        return Sum(self._encoding.unwrap(self._total), tuple(sorted(self._heard)))
