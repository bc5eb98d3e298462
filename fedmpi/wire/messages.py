"""The messages of a round and of an evaluation, in the order in which they are sent; and, by import, those of `wire.control`.

Train carries this round's shared weights to every rank that hosts a party drawn for it, once a rank. Every such party answers with
its encoded update and, where metrics are allowed to leave, with a report.
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
    "Checkpoint",
    "EvalReport",
    "Evaluate",
    "Fill",
    "GoOn",
    "Message",
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


@dataclass(frozen=True)
class Fill(Message):
    """Rank 0 to a rank: these parties were not drawn; they fill up a small cohort with noise alone."""

    TYPE = 14
    PHASE = Phase.MODEL
    LAYOUT: ClassVar = struct.Struct("<II")
    MODEL: ClassVar[int] = 32
    parties: tuple[int, ...] = ()
    cohort: int = 0  # n_t, DSU (13): the size of the whole cohort
    hidden: int = 0  # how many of them go through secure aggregation
    model: bytes = bytes(MODEL)  # digest of theta, which a filler does not need but must have been told like everybody

    def buffers(self) -> list[Buffer]:
        return [pack_parties(self.parties), self.LAYOUT.pack(self.cohort, self.hidden), self.model]

    def shares(self) -> Iterable[tuple[int, int]]:
        return [(party, self.wire_size(1)) for party in self.parties]

    @classmethod
    def wire_size(cls, parties: int) -> int:
        return COUNT.size + 4 * parties + cls.LAYOUT.size + cls.MODEL

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return read_parties(reader), *reader.fields(cls.LAYOUT), bytes(reader.take(cls.MODEL))


@dataclass(frozen=True)
class _Model(Message):
    """The shared vector for some parties of one rank."""

    LAYOUT: ClassVar = struct.Struct("<II")
    parties: tuple[int, ...] = ()
    cohort: int = 0  # as in Fill
    hidden: int = 0
    theta: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    def buffers(self) -> list[Buffer]:
        head = [pack_parties(self.parties), self.LAYOUT.pack(self.cohort, self.hidden)]
        return [*head, array_bytes(self.theta, "<f4")]

    def shares(self) -> Iterable[tuple[int, int]]:
        size = self.wire_size(len(self.theta), 1)
        return [(party, size) for party in self.parties]

    @classmethod
    def wire_size(cls, dimension: int, parties: int) -> int:
        return COUNT.size + 4 * parties + cls.LAYOUT.size + 4 * dimension

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        parties, sizes, rest = read_parties(reader), reader.fields(cls.LAYOUT), reader.rest()
        if len(rest) % 4:
            raise WireError(f"{cls.__name__}: {len(rest)} bytes are not a whole number of float32")
        return parties, *sizes, np.frombuffer(rest, "<f4")


@dataclass(frozen=True)
class Train(_Model):
    """Rank 0 to a rank: train these parties from theta."""

    TYPE = 3
    PHASE = Phase.MODEL


@dataclass(frozen=True)
class Replay(_Model):
    """Rank 0 to a rank that takes parties over: do their local work of this round once more. None of it leaves."""

    TYPE = 19
    PHASE = Phase.BOOKKEEPING

    def shares(self) -> Iterable[tuple[int, int]]:
        return []  # it is for the ranks' sake


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
class Evaluate(_Model):
    """Rank 0 to a rank: test theta on these parties, each as its method has it; round 0: measure the references."""

    TYPE = 6
    PHASE = Phase.EVALUATION


@dataclass(frozen=True)
class EvalReport(_Report):
    """Test figures; in round 0 those of the references. Like TrainReport, a release that no epsilon covers."""

    TYPE = 7
    PHASE = Phase.EVALUATION


register(Fill, Train, Replay, SupportProposal, SupportUnion, PlainInput, PlainRows, TrainReport, Evaluate, EvalReport)
