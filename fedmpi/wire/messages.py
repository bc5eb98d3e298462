"""The messages of a round and of an evaluation, in the order in which they are sent; and, by import, those of `wire.control`.

A rank that hosts a party drawn for a round gets what it lacks of the model, and Train. Every such party answers with its encoded
update and, where metrics are allowed to leave, with a report.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import WireError
from fedmpi.wire.bits import packed_size
from fedmpi.wire.control import Checkpoint, GoOn, Nonces, Ready, Setup, Stop, Tally
from fedmpi.wire.frame import COUNT, Buffer, Reader, array_bytes
from fedmpi.wire.message import MESSAGES, Message, decode, encode, pack_parties, read_parties, register, speakers
from fedmpi.wire.phases import Phase

__all__ = [
    "MESSAGES",
    "Tally",
    "AskModel",
    "Checkpoint",
    "Delta",
    "EvalReport",
    "Evaluate",
    "Fill",
    "GoOn",
    "Message",
    "Model",
    "Nonces",
    "PlainInput",
    "PlainRows",
    "Ready",
    "Replay",
    "Setup",
    "Stop",
    "SupportProposal",
    "SupportUnion",
    "Train",
    "TrainReport",
    "decode",
    "encode",
    "speakers",
]

Ints = NDArray[np.int64]


def _no_ints() -> Ints:
    return np.empty(0, np.int64)


def _no_floats() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


def _read_floats(reader: Reader, what: str) -> NDArray[np.float32]:
    rest = reader.rest()
    if len(rest) % 4:
        raise WireError(f"{what}: {len(rest)} bytes are not a whole number of float32")
    return np.frombuffer(rest, "<f4")


# ---- the model ---------------------------------------------------------------------------------------------------------
# A model has a version: the round whose step made it; 0 is the one that every rank draws for itself before the first. What a rank
# lacks comes before what it is asked to do with it: Deltas, one after the other, or all of it.


@dataclass(frozen=True)
class _Download(Message):
    """To a rank, and through it to its parties. What each of them would have needed on a link of its own is known to who sends
    it, and charged by the ledger apart (`Ledger.charge`): a party may have missed what its rank has."""

    PHASE = Phase.MODEL

    def shares(self) -> Iterable[tuple[int, int]]:
        return []


@dataclass(frozen=True)
class Model(_Download):
    """Rank 0 to a rank: the shared vector, and what the server's steps keep between them. `round`: its version."""

    TYPE = 31
    theta: NDArray[np.float32] = field(default_factory=_no_floats)
    state: bytes = b""  # `wire.arrays`, empty where steps keep nothing

    def buffers(self) -> list[Buffer]:
        return [COUNT.pack(len(self.state)), self.state, array_bytes(self.theta, "<f4")]

    @staticmethod
    def wire_size(dimension: int, state_bytes: int = 0) -> int:
        return COUNT.size + state_bytes + 4 * dimension

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        state = bytes(reader.take(reader.count()))
        return _read_floats(reader, cls.__name__), state


@dataclass(frozen=True)
class Delta(_Download):
    """Rank 0 to a rank that has version `base`: the sum by which the server's step made the model of `round` from it."""

    TYPE = 32
    LAYOUT: ClassVar = struct.Struct("<IdIBI")
    base: int = 0
    rate: float = 0.0  # that the step was made with
    count: int = 0  # values
    scattered: bool = False  # `support` is where the sum of all coordinates is not zero, and not what the step is about
    support: bytes = b""  # coded by wire.support; empty where it follows from the model, or is everything
    values: bytes = b""  # coded by wire.sums

    def buffers(self) -> list[Buffer]:
        head = self.LAYOUT.pack(self.base, self.rate, self.count, self.scattered, len(self.support))
        return [head, self.support, self.values]

    @classmethod
    def wire_size(cls, support_bytes: int, value_bytes: int) -> int:
        return cls.LAYOUT.size + support_bytes + value_bytes

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        base, rate, count, scattered, size = reader.fields(cls.LAYOUT)
        if scattered > 1:
            raise WireError(f"Delta: a flag of {scattered}")
        support = bytes(reader.take(size))
        return base, rate, count, bool(scattered), support, bytes(reader.rest())


@dataclass(frozen=True)
class AskModel(_Download):
    """A rank to rank 0: what it has is not the model that it was told of; send all of it. `round`: its version."""

    TYPE = 33

    @staticmethod
    def wire_size() -> int:
        return 0


# ---- what to do with it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task(Message):
    """Rank 0 to a rank: something for these of its parties to do with the model of this version and digest."""

    LAYOUT: ClassVar = struct.Struct("<IIII")
    DIGEST: ClassVar[int] = 32
    parties: tuple[int, ...] = ()
    cohort: int = 0  # n_t, DSU (13): the size of the whole cohort
    hidden: int = 0  # how many of them go through secure aggregation
    version: int = 0
    model: bytes = bytes(DIGEST)  # digest of theta
    keys: int = 0  # the round in which the keys of its masks are made, where that is not done in every round

    def buffers(self) -> list[Buffer]:
        numbers = self.LAYOUT.pack(self.cohort, self.hidden, self.version, self.keys)
        return [pack_parties(self.parties), numbers, self.model]

    def shares(self) -> Iterable[tuple[int, int]]:
        return [(party, self.wire_size(1)) for party in self.parties]

    @classmethod
    def wire_size(cls, parties: int) -> int:
        return COUNT.size + 4 * parties + cls.LAYOUT.size + cls.DIGEST

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        parties, (cohort, hidden, version, keys) = read_parties(reader), reader.fields(cls.LAYOUT)
        return parties, cohort, hidden, version, bytes(reader.take(cls.DIGEST)), keys


@dataclass(frozen=True)
class Fill(_Task):
    """These parties were not drawn; they fill up a small cohort with noise alone. They do not need the model, but must have been told
    of it like everybody."""

    TYPE = 14
    PHASE = Phase.MODEL


@dataclass(frozen=True)
class Train(_Task):
    """Train these parties from it."""

    TYPE = 3
    PHASE = Phase.MODEL


@dataclass(frozen=True)
class Evaluate(_Task):
    """Test it on these parties, each as its method has it; round 0: measure the references."""

    TYPE = 6
    PHASE = Phase.EVALUATION


@dataclass(frozen=True)
class Replay(Message):
    """Rank 0 to a rank that takes parties over: do their local work of this round once more, from the model of that time. None of it
    leaves."""

    TYPE = 19
    PHASE = Phase.BOOKKEEPING
    parties: tuple[int, ...] = ()
    theta: NDArray[np.float32] = field(default_factory=_no_floats)

    def buffers(self) -> list[Buffer]:
        return [pack_parties(self.parties), array_bytes(self.theta, "<f4")]

    def shares(self) -> Iterable[tuple[int, int]]:
        return []  # it is for the ranks' sake

    @staticmethod
    def wire_size(dimension: int, parties: int) -> int:
        return COUNT.size + 4 * parties + 4 * dimension

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return read_parties(reader), _read_floats(reader, cls.__name__)


@dataclass(frozen=True)
class _Support(Message):
    PHASE = Phase.SUPPORT
    support: bytes = b""  # coded by wire.support

    def buffers(self) -> list[Buffer]:
        return [self.support]

    @staticmethod
    def wire_size(support_bytes: int) -> int:
        return support_bytes

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return (bytes(reader.rest()),)


@dataclass(frozen=True)
class SupportProposal(_Support):
    """Support `union`: the coordinates that a party would send."""

    TYPE = 11


@dataclass(frozen=True)
class SupportUnion(_Support):
    """Support `union`: the coordinates that everybody sends."""

    TYPE = 12


@dataclass(frozen=True)
class PlainInput(Message):
    """A party's encoded update in the clear: its support, if that is the party's own choice, and packed integers."""

    TYPE = 4
    PHASE = Phase.UPDATE
    support: bytes = b""  # coded by wire.support; empty where the support is public
    values: bytes = b""  # packed by wire.bits

    def buffers(self) -> list[Buffer]:
        return [COUNT.pack(len(self.support)), self.support, self.values]

    @staticmethod
    def wire_size(support_bytes: int, value_bytes: int) -> int:
        return COUNT.size + support_bytes + value_bytes

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return bytes(reader.take(reader.count())), bytes(reader.rest())


@dataclass(frozen=True)
class PlainRows(Message):
    """Encoded updates in the clear of some parties of one rank, where each touches some rows of a shared matrix.

    The parties' contents stand side by side, nothing is added up: row numbers and values are one packed run each, party
    after party, so that a server can take in ten million ratings without looking at parties one by one.
    """

    TYPE = 13
    PHASE = Phase.UPDATE
    WIDTHS: ClassVar = struct.Struct("<BBI")  # bits of a row number, bits of a value, values of a row
    parties: tuple[int, ...] = ()
    counts: Ints = field(default_factory=_no_ints)  # rows of each party
    # Both stay packed until the receiver has seen that they are what it asked for: unpacked they take up to forty times the room.
    rows: bytes = b""  # row numbers, packed by wire.bits
    values: bytes = b""  # signed, `width` a row
    row_bits: int = 0
    value_bits: int = 0
    width: int = 1

    def buffers(self) -> list[Buffer]:
        widths = self.WIDTHS.pack(self.row_bits, self.value_bits, self.width)
        return [pack_parties(self.parties), widths, array_bytes(self.counts, "<u4"), self.rows, self.values]

    def shares(self) -> Iterable[tuple[int, int]]:
        return [
            (party, self.wire_size(1, count, self.row_bits, self.value_bits, self.width))
            for party, count in zip(self.parties, self.counts.tolist())
        ]

    @classmethod
    def wire_size(cls, parties: int, rows: int, row_bits: int, value_bits: int, width: int) -> int:
        packed = packed_size(rows, row_bits) + packed_size(rows * width, value_bits)
        return COUNT.size + 8 * parties + cls.WIDTHS.size + packed

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        parties = read_parties(reader)
        row_bits, value_bits, width = reader.fields(cls.WIDTHS)
        counts = reader.array(len(parties), "<u4").astype(np.int64)
        total = int(counts.sum())
        if not (1 <= row_bits <= 32 and 2 <= value_bits <= 64 and width >= 1):
            raise WireError(f"PlainRows: rows of {width} values, {row_bits} bits a row number and {value_bits} a value")
        rows = bytes(reader.take(packed_size(total, row_bits)))
        values = bytes(reader.take(packed_size(total * width, value_bits)))
        return parties, counts, rows, values, row_bits, value_bits, width


@dataclass(frozen=True)
class _Report(Message):
    """Figures of some parties of one rank, a row each, by columns that the method names."""

    parties: tuple[int, ...] = ()
    figures: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))  # (parties, columns)

    def buffers(self) -> list[Buffer]:
        return [pack_parties(self.parties), COUNT.pack(self.figures.shape[1]), array_bytes(self.figures, "<f8")]

    def shares(self) -> Iterable[tuple[int, int]]:
        size = self.wire_size(1, self.figures.shape[1])
        return [(party, size) for party in self.parties]

    @staticmethod
    def wire_size(parties: int, columns: int) -> int:
        return 2 * COUNT.size + 4 * parties + 8 * parties * columns

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        parties, columns = read_parties(reader), reader.count()
        return parties, reader.array(len(parties) * columns, "<f8").reshape(len(parties), columns)


@dataclass(frozen=True)
class TrainReport(_Report):
    """The parties' own figures of their local work. They leave unprotected: `metrics: none` keeps them home."""

    TYPE = 5
    PHASE = Phase.REPORT


@dataclass(frozen=True)
class EvalReport(_Report):
    """Test figures; in round 0 those of the references. Like TrainReport, a release that no epsilon covers."""

    TYPE = 7
    PHASE = Phase.EVALUATION


register(Model, Delta, AskModel, Fill, Train, Evaluate, Replay)
register(SupportProposal, SupportUnion, PlainInput, PlainRows, TrainReport, EvalReport)
