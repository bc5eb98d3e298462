"""A frame is a fixed header and a payload:

    offset  size  field
         0     2  magic "FM"
         2     1  version
         3     1  type, one of wire.messages
         4     4  round, unsigned (0 outside a round)
         8     4  party, signed (-1: the rank as a whole)
        12     1  purpose of the round, one of wire.phases
        13     7  payload length in bytes, unsigned

All numbers are little-endian. Header bytes are what the ledger calls framing.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import WireError
from fedmpi.wire.phases import Purpose

MAGIC = b"FM"
VERSION = 5
HEADER = struct.Struct("<2sBBIiB7s")
FRAMING = HEADER.size
COUNT = struct.Struct("<I")  # what every list starts with
NOBODY = -1  # the party field of a message for the rank as a whole
MAX_ROUND = (1 << 32) - 1
MAX_PAYLOAD = 1 << 40  # a length above this is damage, not a message

PURPOSES = {purpose.value: purpose for purpose in Purpose}

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Header:
    type: int
    round: int
    party: int
    length: int
    purpose: Purpose = Purpose.TRAINING

    def pack(self) -> bytes:
        if not 0 <= self.round <= MAX_ROUND:
            raise WireError(f"round {self.round} cannot be sent: must be between 0 and {MAX_ROUND}")
        length = self.length.to_bytes(7, "little")
        return HEADER.pack(MAGIC, VERSION, self.type, self.round, self.party, self.purpose, length)

    @classmethod
    def unpack(cls, data: Buffer) -> "Header":
        if len(data) < FRAMING:
            raise WireError(f"frame of {len(data)} bytes is shorter than its {FRAMING}-byte header")
        magic, version, kind, round, party, purpose, size = HEADER.unpack_from(data)
        if magic != MAGIC:
            raise WireError(f"frame starts with {bytes(magic)!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise WireError(f"frame has version {version}, this program speaks version {VERSION}")
        if purpose not in PURPOSES:
            raise WireError(f"frame has purpose {purpose}, expected one of {', '.join(map(str, PURPOSES))}")
        length = int.from_bytes(size, "little")
        if length > MAX_PAYLOAD:
            raise WireError(f"frame announces {length} bytes, the largest allowed is {MAX_PAYLOAD}")
        return cls(kind, round, party, length, PURPOSES[purpose])


def array_bytes(values: NDArray[Any], dtype: str) -> memoryview:
    """The array as raw little-endian bytes of `dtype`, without a copy where it already is that."""
    return np.ascontiguousarray(values, dtype=dtype).reshape(-1).view(np.uint8).data


class Reader:
    """Takes fields off a payload in order; whatever is missing or left over is a WireError."""

    def __init__(self, payload: Buffer, what: str):
        self._data = memoryview(payload).cast("B")
        self._at = 0
        self._what = what

    def take(self, size: int) -> memoryview:
        if size < 0 or size > len(self._data) - self._at:
            raise WireError(f"{self._what}: {size} bytes announced, {len(self._data) - self._at} left")
        self._at += size
        return self._data[self._at - size : self._at]

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def count(self) -> int:
        """The length of the list that follows."""
        return int(self.fields(COUNT)[0])

    def array(self, count: int, dtype: str) -> NDArray[Any]:
        """`count` values as a read-only view; the bytes are there before anything is allocated."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(count * kind.itemsize), dtype=kind)

    def rest(self) -> memoryview:
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        if self._at != len(self._data):
            raise WireError(f"{self._what}: {len(self._data) - self._at} bytes left over")
