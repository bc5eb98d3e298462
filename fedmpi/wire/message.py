"""What every message is, and how it becomes a frame and a message again.

Each class carries its own size law, `wire_size(...)`: the payload bytes as a function of what is sent. Tests hold it
equal to the encoded length and to the ledger. `shares()` says which parties a message serves and what it would have cost
each of them on a link of its own; that is the ledger's logical column.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedmpi.errors import WireError
from fedmpi.wire.frame import COUNT, FRAMING, NOBODY, Buffer, Header, Reader
from fedmpi.wire.phases import Phase, Purpose

MESSAGES: dict[int, type["Message"]] = {}


@dataclass(frozen=True)
class Message:
    """Fields shared by all: the round (0 outside one), the party (NOBODY: the rank as a whole), and what the round is for."""

    round: int = 0
    party: int = NOBODY
    purpose: Purpose = field(default=Purpose.TRAINING, kw_only=True)

    TYPE: ClassVar[int]
    PHASE: ClassVar[Phase]

    def buffers(self) -> list[Buffer]:
        """The payload as consecutive bytes-like pieces."""
        return []

    def shares(self) -> Iterable[tuple[int, int]]:
        """(party, payload bytes it would take alone) for every party that this message serves."""
        return [(self.party, sum(len(piece) for piece in self.buffers()))]

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        """The class's own fields, in their order, from a payload; WireError for anything else."""
        return ()


def register(*kinds: type[Message]) -> None:
    """Make messages known to `decode`; a protocol that has its own does this where it defines them."""
    for kind in kinds:
        if MESSAGES.setdefault(kind.TYPE, kind) is not kind:
            raise ValueError(f"{kind.__name__}: type {kind.TYPE} is taken by {MESSAGES[kind.TYPE].__name__}")


def speakers(message: Message) -> tuple[int, ...]:
    """The parties that a message from a client rank speaks for; none for one about the rank itself."""
    return getattr(message, "parties", ()) or ((message.party,) if message.party >= 0 else ())


def alone(parties: tuple[int, ...]) -> int:
    """The party field of a message for, or of, these: the one, or nobody in particular."""
    return parties[0] if len(parties) == 1 else NOBODY


def fresh(size: int) -> memoryview:
    return np.empty(size, np.uint8).data  # unlike a bytearray, not zeroed first


def encode(message: Message, place: Callable[[int], memoryview] = fresh) -> memoryview:
    """The message as one frame, in a `place` of that many bytes."""
    pieces = message.buffers()
    length = sum(len(piece) for piece in pieces)
    frame = place(FRAMING + length)
    frame[:FRAMING] = Header(message.TYPE, message.round, message.party, length, message.purpose).pack()
    at = FRAMING
    for piece in pieces:
        frame[at : at + len(piece)] = piece
        at += len(piece)
    return frame


def is_same(message: Message, other: Message) -> bool:
    """Whether both are made of the very same values, none of which can have changed in between: then they have the same frame."""
    mine, others = vars(message).values(), vars(other).values()
    return type(message) is type(other) and all(one is two and _is_fixed(one) for one, two in zip(mine, others))


def _is_fixed(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return not value.flags.writeable
    return isinstance(value, (int, float, bytes)) or isinstance(value, tuple) and all(map(_is_fixed, value))


def decode(frame: Buffer, header: Header | None = None) -> Message:
    """The message that a frame holds; WireError for anything else. `header`: of this frame, if it was read already."""
    header = header or Header.unpack(frame)
    if header.length != len(frame) - FRAMING:
        raise WireError(f"frame announces {header.length} payload bytes and has {len(frame) - FRAMING}")
    kind = MESSAGES.get(header.type)
    if kind is None:
        raise WireError(f"frame has unknown type {header.type}")
    reader = Reader(memoryview(frame)[FRAMING:], kind.__name__)
    fields = kind.parse(reader)
    reader.end()
    return kind(header.round, header.party, *fields, purpose=header.purpose)


def pack_parties(parties: tuple[int, ...]) -> bytes:
    return COUNT.pack(len(parties)) + np.asarray(parties, "<u4").tobytes()


def read_parties(reader: Reader) -> tuple[int, ...]:
    return tuple(reader.array(reader.count(), "<u4").tolist())
