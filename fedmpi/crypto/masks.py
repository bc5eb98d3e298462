"""Masks of secure aggregation: AES-128 key streams in counter mode, added to integer vectors modulo 2^8 ... 2^64.

The mask under a key is the key stream of counters 0, 1, 2, ... (128-bit big-endian blocks, NIST SP 800-38A), read as
little-endian lanes of the vector's type: lane i of a vector of b-bit lanes is the b/8 bytes from i b/8. AES-128, for
masks are where the time goes and 128 bits are what X25519 gives; keys come from `keys.derive` and serve one vector
each, so that every counter can start at 0.

Two libraries make the same stream. Counter mode is the encryption of the counter blocks, so pycryptodome's ECB over a
prepared array of counters does it at the speed of the hardware; `cryptography` has the mode itself. On long vectors
they are within a few per cent of each other, and pycryptodome is the default.

All masks pass over one chunk of the vector before the next, so that vector, key stream and counters stay in the cache.
Encryption and numpy's addition release the interpreter lock and counter mode starts anywhere: threads share a vector by
ranges. A chunk is as long as it is (512 KiB) for two reasons: a call costs some 2 us, and a thread that waits for the
lock needs longer than a short chunk to wake up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from Crypto.Cipher import AES
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedmpi.errors import CryptoError

Lanes = NDArray[np.unsignedinteger[Any]]

MASK_KEY_BYTES = 16
PYCRYPTODOME = "pycryptodome"
CRYPTOGRAPHY = "cryptography"
BACKENDS = (PYCRYPTODOME, CRYPTOGRAPHY)

_LANES = tuple(np.dtype(lane) for lane in (np.uint8, np.uint16, np.uint32, np.uint64))
_BLOCK = 16
_CHUNK = 1 << 19  # bytes; a power of two, so that a chunk's number and a block's place in it share no bit of a counter
_CHUNK_BLOCKS = _CHUNK // _BLOCK
_CIPHERS = 256  # prepared at a time: a server may take off hundreds of thousands of masks
_LEAST_PER_THREAD = _CHUNK  # bytes of the vector; shorter calls leave threads waiting for the lock
_ZEROS = memoryview(bytes(_CHUNK))


class _Workspace(threading.local):
    """What a thread reuses from chunk to chunk: fresh buffers would cost more than the encryption."""

    def __init__(self) -> None:
        self.stream = np.empty(_CHUNK + _BLOCK, dtype=np.uint8)
        self.output = self.stream.data
        self._words = np.zeros(2 * _CHUNK_BLOCKS, dtype=">u8")
        self._low = self._words.view(np.uint64)[1::2]
        self._blocks = self._words.view(np.uint8).data
        self._chunk: int | None = None

    def counters(self, chunk: int) -> memoryview:
        """The counter blocks of a chunk."""
        # Unknown while it changes: an interrupt in between must not leave counters that are not what they claim.
        last, self._chunk = self._chunk, None
        if last is None:
            self._words[1::2] = np.arange(chunk * _CHUNK_BLOCKS, (chunk + 1) * _CHUNK_BLOCKS, dtype=np.uint64)
        elif last != chunk:
            # All counters of a chunk carry its number in the same bits: one XOR replaces it.
            np.bitwise_xor(self._low, _swapped((last ^ chunk) * _CHUNK_BLOCKS), out=self._low)
        self._chunk = chunk
        return self._blocks


def _swapped(word: int) -> np.uint64:
    swapped: np.uint64 = np.frombuffer(word.to_bytes(8, "big"), dtype=np.uint64)[0]
    return swapped


_workspace = _Workspace()


def _prepared(key: bytes, first_block: int, backend: str) -> Callable[[memoryview, memoryview], object]:
    """A function (source, target) that writes the next piece of the key stream to target."""
    if backend == PYCRYPTODOME:
        return AES.new(key, AES.MODE_ECB).encrypt
    return Cipher(algorithms.AES(key), modes.CTR(first_block.to_bytes(_BLOCK, "big"))).encryptor().update_into


def _add_range(total: Lanes, keys: Sequence[bytes], signs: Sequence[int], start: int, end: int, backend: str) -> None:
    """The masks on bytes `start` (a multiple of 16) to `end` of the vector."""
    for first in range(0, len(keys), _CIPHERS):
        some = slice(first, first + _CIPHERS)
        _add_some(total, keys[some], signs[some], start, end, backend)


def _add_some(total: Lanes, keys: Sequence[bytes], signs: Sequence[int], start: int, end: int, backend: str) -> None:
    work = _workspace
    lane = total.dtype.newbyteorder("<")
    ciphers = [_prepared(key, start // _BLOCK, backend) for key in keys]
    operations = [np.add if sign > 0 else np.subtract for sign in signs]
    while start < end:
        chunk, inside = divmod(start, _CHUNK)
        stop = min(end, (chunk + 1) * _CHUNK)
        part = total[start // lane.itemsize : stop // lane.itemsize]
        size = -(-part.nbytes // _BLOCK) * _BLOCK
        if backend == PYCRYPTODOME:
            source, target = work.counters(chunk)[inside : inside + size], work.output[:size]
        else:
            source, target = _ZEROS[:size], work.output[: size + _BLOCK]  # it asks for room beyond the data
        mask = work.stream[: part.nbytes].view(lane)
        for encrypt, operation in zip(ciphers, operations):
            encrypt(source, target)
            operation(part, mask, out=part)
        start = stop


def add_masks(
    total: Lanes, keys: Sequence[bytes], signs: Sequence[int], *, threads: int = 1, backend: str = PYCRYPTODOME
) -> None:
    """In place: total += sum_i signs[i] * mask(keys[i]), modulo 2^b for a vector of b-bit unsigned lanes.

    The result does not depend on `threads` or `backend`.
    """
    if total.dtype not in _LANES or total.ndim != 1 or not total.flags.c_contiguous or not total.flags.writeable:
        raise CryptoError(
            f"masks are added to a contiguous, writeable vector of uint8, 16, 32 or 64, not to {total.ndim} dimensions"
            f" of {total.dtype}"
        )
    if len(signs) != len(keys) or any(sign not in (1, -1) for sign in signs):
        raise CryptoError(f"{len(keys)} masks take as many signs, each 1 or -1")
    for key in keys:
        if len(key) != MASK_KEY_BYTES:
            raise CryptoError(f"a mask key has {MASK_KEY_BYTES} bytes, not {len(key)}")
    if backend not in BACKENDS:
        raise CryptoError(f"there is no backend {backend!r} for masks: {' or '.join(BACKENDS)}")
    if threads < 1:
        raise CryptoError(f"masks need at least one thread, not {threads}")
    shares = max(1, min(threads, total.nbytes // _LEAST_PER_THREAD))
    bounds = [total.nbytes * i // shares // _BLOCK * _BLOCK for i in range(shares)] + [total.nbytes]
    own, *others = zip(bounds, bounds[1:])
    if not others:
        _add_range(total, keys, signs, *own, backend)
        return
    with ThreadPoolExecutor(len(others)) as pool:
        pending = [pool.submit(_add_range, total, keys, signs, *bytes_of, backend) for bytes_of in others]
        _add_range(total, keys, signs, *own, backend)
        for part in pending:
            part.result()
