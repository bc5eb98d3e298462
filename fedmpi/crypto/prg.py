"""The secret source of random words: an AES-256 key stream in counter mode, for `entropy: os`.

`KeyStream` answers `words(n)` as `fedmpi.randomness.words.SeededWords` does, so noise and rounding read either. The key
is a party's own, from the operating system; it is never sent, never written to a checkpoint and never printed.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NoReturn

import numpy as np
from Crypto.Cipher import AES
from numpy.typing import NDArray

KEY_BYTES = 32
_STREAM = b"fedmpi/key-stream/1"


class KeyStream:
    """The stream of words under (key, label). Two labels give unrelated streams; the same pair gives the same stream,
    so a (key, label) must serve one purpose in one round."""

    __slots__ = ("_cipher",)

    def __init__(self, key: bytes, label: bytes):
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key stream takes a key of {KEY_BYTES} bytes, not {len(key)}")
        # HKDF-Expand of RFC 5869 for a single block: the key is already uniform, so the extract step has nothing to do.
        subkey = hmac.digest(key, _STREAM + len(label).to_bytes(4, "big") + label + b"\x01", "sha256")
        # The counter takes the whole block: the key is fresh for the label, so there is no nonce to keep apart.
        self._cipher = AES.new(subkey, AES.MODE_CTR, nonce=b"", initial_value=0)

    @classmethod
    def from_os(cls, label: bytes) -> KeyStream:
        """A stream under a new key of the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES), label)

    def words(self, n: int) -> NDArray[np.uint64]:
        # Little-endian whatever the machine, so that a stream can be compared across machines.
        stream = np.frombuffer(self._cipher.encrypt(bytes(8 * n)), dtype="<u8")
        return stream.astype(np.uint64, copy=False)

    def __repr__(self) -> str:
        return "KeyStream(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KeyStream holds a secret key and is never serialised")
