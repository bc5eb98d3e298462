"""Every message of the engine, in the order in which a run sends them.

Each class carries its own size law, `wire_size(...)`: the payload bytes as a function of what is sent. Tests hold it
equal to the encoded length and to the ledger. `shares()` says which parties a message serves and what it would have cost
each of them on a link of its own; that is the ledger's logical column.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedmpi.errors import WireError
from fedmpi.wire.bits import pack, pack_signed, packed_size, unpack, unpack_signed
from fedmpi.wire.frame import FRAMING, NOBODY, Header, Reader, array_bytes

COUNT = struct.Struct("<I")


@dataclass(frozen=True)
class Message:
    """Fields shared by all: the round (0 outside one) and the party (NOBODY: the rank as a whole)."""

    round: int = 0
    party: int = NOBODY

    TYPE: ClassVar[int]
    PHASE: ClassVar[str]

    def buffers(self) -> list:
        """The payload as consecutive bytes-like pieces."""
        return []

    def shares(self) -> Iterable[tuple[int, int]]:
        """(party, payload bytes it would take alone) for every party that this message serves."""
        yield self.party, sum(len(piece) for piece in self.buffers())

    @classmethod
    def parse(cls, header: Header, reader: Reader) -> "Message":
        return cls(header.round, header.party)


# ---- Before the rounds -----------------------------------------------------------------------------------------------
# Rank 0 resolves the configuration and tells every rank; a client rank never guesses. Each rank answers with the length
# of the shared vector that it built, so that a rank with another code version is found before it spoils a sum.


@dataclass(frozen=True)
class Setup(Message):
    """Rank 0 to every rank: the resolved configuration and the parties that this rank hosts."""

    TYPE = 1
    PHASE = "setup"
    config: str = ""
    parties: tuple[int, ...] = ()

    def buffers(self):
        return [_parties(self.parties), self.config.encode()]

    def shares(self):
        size = self.wire_size(len(self.config.encode()), 1)
        return [(party, size) for party in self.parties]

    @staticmethod
    def wire_size(config_bytes: int, parties: int) -> int:
        return COUNT.size + 4 * parties + config_bytes

    @classmethod
    def parse(cls, header, reader):
        parties = _read_parties(reader)
        try:
            text = bytes(reader.rest()).decode()
        except UnicodeDecodeError as error:
            raise WireError(f"Setup: configuration is not UTF-8 ({error.reason})") from None
        return cls(header.round, header.party, text, parties)


@dataclass(frozen=True)
class Ready(Message):
    """Every rank to rank 0: it has its model and its data, and these are they."""

    TYPE = 2
    PHASE = "setup"
    LAYOUT = struct.Struct("<QI")
    dimension: int = 0  # length of the shared vector
    data: int = 0  # fingerprint of the prepared data
    clear: tuple[int, ...] = ()  # hybrid: its parties that will share in the clear
    parties: tuple[int, ...] = ()  # known to the sender's ledger, not sent

    def buffers(self):
        return [self.LAYOUT.pack(self.dimension, self.data), _parties(self.clear)]

    def shares(self):
        chosen = set(self.clear)
        return [(party, self.wire_size(int(party in chosen))) for party in self.parties]

    @staticmethod
    def wire_size(clear: int) -> int:
        return Ready.LAYOUT.size + COUNT.size + 4 * clear

    @classmethod
    def parse(cls, header, reader):
        dimension, data = reader.fields(cls.LAYOUT)
        return cls(header.round, header.party, dimension, data, _read_parties(reader))


# ---- A round ---------------------------------------------------------------------------------------------------------
# Train carries theta_ext^t to the ranks that host a sampled party, once per rank. Every sampled party answers with its
# encoded update and, where metrics are allowed to leave, with a report.


@dataclass(frozen=True)
class _Asked(Message):
    """Some parties of one rank take part in a round."""

    LAYOUT = struct.Struct("<II")
    parties: tuple[int, ...] = ()
    cohort: int = 0  # n_t, DSU (13): the size of the whole cohort
    hidden: int = 0  # how many of them go through secure aggregation


@dataclass(frozen=True)
class Fill(_Asked):
    """Rank 0 to a rank: these parties were not drawn; they fill up a small cohort with noise alone."""

    TYPE = 14
    PHASE = "model"

    def buffers(self):
        return [_parties(self.parties), self.LAYOUT.pack(self.cohort, self.hidden)]

    def shares(self):
        return [(party, self.wire_size(1)) for party in self.parties]

    @classmethod
    def wire_size(cls, parties: int) -> int:
        return COUNT.size + 4 * parties + cls.LAYOUT.size

    @classmethod
    def parse(cls, header, reader):
        parties = _read_parties(reader)
        return cls(header.round, header.party, parties, *reader.fields(cls.LAYOUT))


@dataclass(frozen=True)
class _Model(_Asked):
    """The shared vector for some parties of one rank."""

    theta: np.ndarray = None

    def buffers(self):
        return [_parties(self.parties), self.LAYOUT.pack(self.cohort, self.hidden), array_bytes(self.theta, "<f4")]

    def shares(self):
        size = self.wire_size(len(self.theta), 1)
        return [(party, size) for party in self.parties]

    @classmethod
    def wire_size(cls, dimension: int, parties: int) -> int:
        return COUNT.size + 4 * parties + cls.LAYOUT.size + 4 * dimension

    @classmethod
    def parse(cls, header, reader):
        parties = _read_parties(reader)
        cohort, hidden = reader.fields(cls.LAYOUT)
        rest = reader.rest()
        if len(rest) % 4:
            raise WireError(f"{cls.__name__}: {len(rest)} bytes are not a whole number of float32")
        return cls(header.round, header.party, parties, cohort, hidden, np.frombuffer(rest, "<f4"))


@dataclass(frozen=True)
class Train(_Model):
    """Rank 0 to a rank: train these parties from theta."""

    TYPE = 3
    PHASE = "model"


@dataclass(frozen=True)
class _Support(Message):
    PHASE = "support"
    support: bytes = b""  # coded by wire.support

    def buffers(self):
        return [self.support]

    @staticmethod
    def wire_size(support_bytes: int) -> int:
        return support_bytes

    @classmethod
    def parse(cls, header, reader):
        return cls(header.round, header.party, bytes(reader.rest()))


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
    PHASE = "update"
    support: bytes = b""  # coded by wire.support; empty where the support is public
    values: bytes = b""  # packed by wire.bits

    def buffers(self):
        return [COUNT.pack(len(self.support)), self.support, self.values]

    @staticmethod
    def wire_size(support_bytes: int, value_bytes: int) -> int:
        return COUNT.size + support_bytes + value_bytes

    @classmethod
    def parse(cls, header, reader):
        (size,) = reader.fields(COUNT)
        return cls(header.round, header.party, bytes(reader.take(size)), bytes(reader.rest()))


@dataclass(frozen=True)
class PlainRows(Message):
    """Encoded updates in the clear of some parties of one rank, where each touches some rows of a shared matrix.

    The parties' contents stand side by side, nothing is added up: row numbers and values are one packed run each, party
    after party, so that a server can take in ten million ratings without looking at parties one by one.
    """

    TYPE = 13
    PHASE = "update"
    WIDTHS = struct.Struct("<BBI")  # bits of a row number, bits of a value, values of a row
    parties: tuple[int, ...] = ()
    counts: np.ndarray = None  # rows of each party
    rows: np.ndarray = None  # row numbers
    values: np.ndarray = None  # (rows, width) signed integers
    row_bits: int = 0
    value_bits: int = 0

    def buffers(self):
        width = self.values.shape[1]
        return [
            _parties(self.parties),
            self.WIDTHS.pack(self.row_bits, self.value_bits, width),
            array_bytes(self.counts, "<u4"),
            pack(self.rows, self.row_bits),
            pack_signed(self.values.ravel(), self.value_bits),
        ]

    def shares(self):
        width = self.values.shape[1]
        return [
            (party, self.wire_size(1, count, self.row_bits, self.value_bits, width))
            for party, count in zip(self.parties, self.counts.tolist())
        ]

    @classmethod
    def wire_size(cls, parties: int, rows: int, row_bits: int, value_bits: int, width: int) -> int:
        packed = packed_size(rows, row_bits) + packed_size(rows * width, value_bits)
        return COUNT.size + 8 * parties + cls.WIDTHS.size + packed

    @classmethod
    def parse(cls, header, reader):
        parties = _read_parties(reader)
        row_bits, value_bits, width = reader.fields(cls.WIDTHS)
        counts = reader.array(len(parties), "<u4").astype(np.int64)
        total = int(counts.sum())
        if not (1 <= row_bits <= 32 and 2 <= value_bits <= 64 and width >= 1):
            raise WireError(f"PlainRows: rows of {width} values, {row_bits} bits a row number and {value_bits} a value")
        rows = unpack(reader.take(packed_size(total, row_bits)), total, row_bits).view(np.int64)
        values = unpack_signed(reader.take(packed_size(total * width, value_bits)), total * width, value_bits)
        return cls(
            header.round, header.party, parties, counts, rows, values.reshape(total, width), row_bits, value_bits
        )


@dataclass(frozen=True)
class _Report(Message):
    """Figures of some parties of one rank, a row each, by columns that the method names."""

    SHAPE = struct.Struct("<I")
    parties: tuple[int, ...] = ()
    figures: np.ndarray = None  # (parties, columns) float64

    def buffers(self):
        return [_parties(self.parties), self.SHAPE.pack(self.figures.shape[1]), array_bytes(self.figures, "<f8")]

    def shares(self):
        size = self.wire_size(1, self.figures.shape[1])
        return [(party, size) for party in self.parties]

    @classmethod
    def wire_size(cls, parties: int, columns: int) -> int:
        return COUNT.size + 4 * parties + cls.SHAPE.size + 8 * parties * columns

    @classmethod
    def parse(cls, header, reader):
        parties = _read_parties(reader)
        (columns,) = reader.fields(cls.SHAPE)
        figures = reader.array(len(parties) * columns, "<f8").reshape(len(parties), columns)
        return cls(header.round, header.party, parties, figures)


@dataclass(frozen=True)
class TrainReport(_Report):
    """The parties' own figures of their local work. They leave unprotected: `metrics: none` keeps them home."""

    TYPE = 5
    PHASE = "report"


# ---- Evaluation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluate(_Model):
    """Rank 0 to a rank: test theta on these parties, each as its method has it; round 0: measure the references."""

    TYPE = 6
    PHASE = "evaluation"


@dataclass(frozen=True)
class EvalReport(_Report):
    """Test figures; in round 0 those of the references. Like TrainReport, a release that no epsilon covers."""

    TYPE = 7
    PHASE = "evaluation"


# ---- Between rounds, and the end --------------------------------------------------------------------------------------
# On Checkpoint a rank writes its parties' state to its own disk; on Stop it ends. It answers both with its account. These
# exist only because the parties share ranks and a record is kept, so no party is charged for them.


@dataclass(frozen=True)
class Checkpoint(Message):
    """Rank 0 to every rank: `round` is over, keep your parties' state."""

    TYPE = 8
    PHASE = "bookkeeping"

    def shares(self):
        return ()

    @staticmethod
    def wire_size() -> int:
        return 0


@dataclass(frozen=True)
class Stop(Message):
    """Rank 0 to every rank: the run is over, or (code != 0) cannot be."""

    TYPE = 9
    PHASE = "bookkeeping"
    code: int = 0

    def buffers(self):
        return [COUNT.pack(self.code)]

    def shares(self):
        return ()

    @staticmethod
    def wire_size() -> int:
        return COUNT.size

    @classmethod
    def parse(cls, header, reader):
        return cls(header.round, header.party, *reader.fields(COUNT))


@dataclass(frozen=True)
class Account(Message):
    """A rank's account since its last one: ledger rows, bytes given to the transport, what it measured of itself."""

    TYPE = 10
    PHASE = "bookkeeping"
    LAYOUT = struct.Struct("<QI")
    COLUMNS: ClassVar[int] = 11
    bytes_given: int = 0
    rows: np.ndarray = None  # (n, COLUMNS) int64, as Ledger.table() makes them
    facts: dict = None  # seconds by phase, memory

    def buffers(self):
        facts = json.dumps(self.facts or {}, sort_keys=True).encode()
        return [self.LAYOUT.pack(self.bytes_given, len(self.rows)), array_bytes(self.rows, "<i8"), facts]

    def shares(self):
        return ()

    @staticmethod
    def wire_size(rows: int, facts_bytes: int) -> int:
        return Account.LAYOUT.size + 8 * Account.COLUMNS * rows + facts_bytes

    @classmethod
    def parse(cls, header, reader):
        bytes_given, count = reader.fields(cls.LAYOUT)
        rows = reader.array(count * cls.COLUMNS, "<i8").reshape(count, cls.COLUMNS)
        try:
            facts = json.loads(bytes(reader.rest()))
        except (ValueError, RecursionError):
            raise WireError("Account: facts are not JSON") from None
        if not isinstance(facts, dict):
            raise WireError("Account: facts are not a JSON object")
        return cls(header.round, header.party, bytes_given, rows, facts)


# Every phase that a ledger can name, in the order of a run. Ledger rows carry the index, so the order is part of the format.
PHASES = (
    "setup",
    "model",
    "support",
    "AdvertiseKeys",
    "ShareKeys",
    "MaskedInput",
    "ConsistencyCheck",
    "Unmask",
    "update",
    "report",
    "evaluation",
    "bookkeeping",
)
MESSAGES: dict[int, type[Message]] = {}


def register(*kinds: type[Message]) -> None:
    """Make messages known to `decode`; a protocol that has its own does this where it defines them."""
    for kind in kinds:
        if MESSAGES.setdefault(kind.TYPE, kind) is not kind or kind.PHASE not in PHASES:
            raise ValueError(f"{kind.__name__}: type {kind.TYPE} is taken, or its phase {kind.PHASE!r} is unknown")


register(
    Setup, Ready, Fill, Train, SupportProposal, SupportUnion, PlainInput, PlainRows, TrainReport, Evaluate, EvalReport
)
register(Checkpoint, Stop, Account)


def speakers(message: Message) -> tuple[int, ...]:
    """The parties that a message from a client rank speaks for; none for one about the rank itself."""
    return getattr(message, "parties", ()) or ((message.party,) if message.party >= 0 else ())


def encode(message: Message) -> memoryview:
    """The message as one frame."""
    pieces = message.buffers()
    length = sum(len(piece) for piece in pieces)
    frame = memoryview(np.empty(FRAMING + length, np.uint8))  # unlike a bytearray, not zeroed first
    frame[:FRAMING] = Header(message.TYPE, message.round, message.party, length).pack()
    at = FRAMING
    for piece in pieces:
        frame[at : at + len(piece)] = piece
        at += len(piece)
    return frame


def decode(frame) -> Message:
    """The message that a frame holds; WireError for anything else."""
    header = Header.unpack(frame)
    if header.length != len(frame) - FRAMING:
        raise WireError(f"frame announces {header.length} payload bytes and has {len(frame) - FRAMING}")
    kind = MESSAGES.get(header.type)
    if kind is None:
        raise WireError(f"frame has unknown type {header.type}")
    reader = Reader(memoryview(frame)[FRAMING:], kind.__name__)
    message = kind.parse(header, reader)
    reader.end()
    return message


def _parties(parties: tuple[int, ...]) -> bytes:
    return COUNT.pack(len(parties)) + np.asarray(parties, "<u4").tobytes()


def _read_parties(reader: Reader) -> tuple[int, ...]:
    (count,) = reader.fields(COUNT)
    return tuple(reader.array(count, "<u4").tolist())
