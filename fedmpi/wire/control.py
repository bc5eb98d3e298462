"""Messages between rank 0 and the ranks as such: before the rounds, between them, and at the end.

Rank 0 resolves the configuration and tells every rank; a client rank never guesses. Each rank answers with the length of the
shared vector that it built, so that a rank with another code version is found before it spoils a sum. On Checkpoint a rank
writes its parties' state to its own disk; on Stop it ends. It answers both with its tally. These last exist only because
the parties share ranks and a record is kept, so no party is charged for them.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import WireError
from fedmpi.wire.frame import COUNT, Buffer, Reader, array_bytes
from fedmpi.wire.message import Message, pack_parties, read_parties, register
from fedmpi.wire.phases import Phase

NOT_HEARD_OF = 3  # code of a Stop to a rank that was given up, should it come back
NONCE = 16  # bytes of a party's contribution to the name of a session


@dataclass(frozen=True)
class Setup(Message):
    """Rank 0 to every rank: the resolved configuration and the parties that this rank hosts."""

    TYPE = 1
    PHASE = Phase.SETUP
    config: str = ""
    parties: tuple[int, ...] = ()

    def buffers(self) -> list[Buffer]:
        return [pack_parties(self.parties), self.config.encode()]

    def shares(self) -> Iterable[tuple[int, int]]:
        size = self.wire_size(len(self.config.encode()), 1)
        return [(party, size) for party in self.parties]

    @staticmethod
    def wire_size(config_bytes: int, parties: int) -> int:
        return COUNT.size + 4 * parties + config_bytes

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        parties = read_parties(reader)
        try:
            return bytes(reader.rest()).decode(), parties
        except UnicodeDecodeError as error:
            raise WireError(f"Setup: configuration is not UTF-8 ({error.reason})") from None


@dataclass(frozen=True)
class Ready(Message):
    """Every rank to rank 0: it has its model and its data, and these are they. `round`: the checkpoint up to which a resumed rank
    can go on, which rank 0 answers with GoOn."""

    TYPE = 2
    PHASE = Phase.SETUP
    LAYOUT: ClassVar = struct.Struct("<QI")
    dimension: int = 0  # length of the shared vector
    data: int = 0  # fingerprint of the prepared data
    clear: tuple[int, ...] = ()  # hybrid: its parties that will share in the clear
    nonces: bytes = b""  # adversary active: a fresh one of each of its parties, in their order
    parties: tuple[int, ...] = ()  # known to the sender's ledger, not sent

    def buffers(self) -> list[Buffer]:
        return [self.LAYOUT.pack(self.dimension, self.data), pack_parties(self.clear), self.nonces]

    def shares(self) -> Iterable[tuple[int, int]]:
        chosen, nonces = set(self.clear), int(bool(self.nonces))
        return [(party, self.wire_size(int(party in chosen), nonces)) for party in self.parties]

    @classmethod
    def wire_size(cls, clear: int, nonces: int = 0) -> int:
        return cls.LAYOUT.size + COUNT.size + 4 * clear + NONCE * nonces

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return *reader.fields(cls.LAYOUT), read_parties(reader), bytes(reader.rest())


@dataclass(frozen=True)
class Nonces(Message):
    """Rank 0 to every rank, where the adversary is active: every party's nonce, in party order."""

    TYPE = 15
    PHASE = Phase.SETUP
    nonces: bytes = b""
    parties: tuple[int, ...] = ()  # known to the sender's ledger, not sent

    def buffers(self) -> list[Buffer]:
        return [self.nonces]

    def shares(self) -> Iterable[tuple[int, int]]:
        return [(party, len(self.nonces)) for party in self.parties]

    @staticmethod
    def wire_size(parties: int) -> int:
        return NONCE * parties

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return (bytes(reader.rest()),)


@dataclass(frozen=True)
class _Bookkeeping(Message):
    PHASE = Phase.BOOKKEEPING

    def shares(self) -> Iterable[tuple[int, int]]:
        return []


@dataclass(frozen=True)
class Adopt(_Bookkeeping):
    """Rank 0 to a rank: take over these parties of one that was lost, as they were after the checkpoint of `round`; then so many
    rounds are to be done once more, each with its Replay. Nobody: say that you are there. Its own: take them back."""

    TYPE = 17
    parties: tuple[int, ...] = ()
    replays: int = 0

    def buffers(self) -> list[Buffer]:
        return [pack_parties(self.parties), COUNT.pack(self.replays)]

    @staticmethod
    def wire_size(parties: int) -> int:
        return 2 * COUNT.size + 4 * parties

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return read_parties(reader), reader.count()


@dataclass(frozen=True)
class Release(_Bookkeeping):
    """Rank 0 to a rank: these parties, which it had taken over, are elsewhere again."""

    TYPE = 30
    parties: tuple[int, ...] = ()

    def buffers(self) -> list[Buffer]:
        return [pack_parties(self.parties)]

    @staticmethod
    def wire_size(parties: int) -> int:
        return COUNT.size + 4 * parties

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return (read_parties(reader),)


@dataclass(frozen=True)
class Adopted(_Bookkeeping):
    """A rank to rank 0: they are here, or (`why`) cannot be."""

    TYPE = 18
    LONGEST: ClassVar[int] = 1000  # bytes
    why: str = ""

    def buffers(self) -> list[Buffer]:
        return [self.why.encode()[: self.LONGEST].decode(errors="ignore").encode()]

    @staticmethod
    def wire_size(why_bytes: int) -> int:
        return why_bytes

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        try:
            return (bytes(reader.rest()).decode(),)
        except UnicodeDecodeError as error:
            raise WireError(f"Adopted: not UTF-8 ({error.reason})") from None


@dataclass(frozen=True)
class GoOn(_Bookkeeping):
    """Rank 0 to every rank of a resumed run, once all are ready: go on from your checkpoint of `round`; 0: from the beginning."""

    TYPE = 16
    PHASE = Phase.SETUP

    @staticmethod
    def wire_size() -> int:
        return 0


@dataclass(frozen=True)
class Checkpoint(_Bookkeeping):
    """Rank 0 to every rank: `round` is over, keep your parties' state."""

    TYPE = 8

    @staticmethod
    def wire_size() -> int:
        return 0


@dataclass(frozen=True)
class Stop(_Bookkeeping):
    """Rank 0 to every rank: the run is over, or (code != 0) cannot be."""

    TYPE = 9
    code: int = 0

    def buffers(self) -> list[Buffer]:
        return [COUNT.pack(self.code)]

    @staticmethod
    def wire_size() -> int:
        return COUNT.size

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return reader.fields(COUNT)


@dataclass(frozen=True)
class Tally(_Bookkeeping):
    """A rank's tally since its last one: ledger rows, bytes given to the transport, what it measured of itself."""

    TYPE = 10
    LAYOUT: ClassVar = struct.Struct("<QI")
    COLUMNS: ClassVar[int] = 12
    bytes_given: int = 0
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, Tally.COLUMNS), np.int64))  # `Ledger.table()`
    facts: dict[str, Any] = field(default_factory=dict)  # seconds by phase, memory

    def buffers(self) -> list[Buffer]:
        facts = json.dumps(self.facts, sort_keys=True).encode()
        return [self.LAYOUT.pack(self.bytes_given, len(self.rows)), array_bytes(self.rows, "<i8"), facts]

    @classmethod
    def wire_size(cls, rows: int, facts_bytes: int) -> int:
        return cls.LAYOUT.size + 8 * cls.COLUMNS * rows + facts_bytes

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        bytes_given, count = reader.fields(cls.LAYOUT)
        rows = reader.array(count * cls.COLUMNS, "<i8").reshape(count, cls.COLUMNS)
        try:
            facts = json.loads(bytes(reader.rest()))
        except (ValueError, RecursionError):
            raise WireError("Tally: facts are not JSON") from None
        if not isinstance(facts, dict):
            raise WireError("Tally: facts are not a JSON object")
        return bytes_given, rows, facts


register(Setup, Ready, Nonces, GoOn, Adopt, Release, Adopted, Checkpoint, Stop, Tally)
