"""HKDF with SHA-256 (RFC 5869) on `hashlib`.

A party derives two keys a peer, and the HKDF of `cryptography` sets up two HMAC objects a key: this takes two thirds of its
time. Both halves are spelled out, HMAC(k, m) = H((k ^ opad) H((k ^ ipad) m)); without a salt the first key is zero, and
what SHA-256 makes of its pads is kept.
"""

import hmac
from hashlib import sha256

DIGEST_BYTES = 32
_BLOCK_BYTES = 64  # of SHA-256: what HMAC fills its key up to, with zeros
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))
_INNER_END = _INNER[:1] * (_BLOCK_BYTES - DIGEST_BYTES)
_OUTER_END = _OUTER[:1] * (_BLOCK_BYTES - DIGEST_BYTES)
_INNER_OF_ZERO = sha256(_INNER[:1] * _BLOCK_BYTES)
_OUTER_OF_ZERO = sha256(_OUTER[:1] * _BLOCK_BYTES)


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """`length` bytes, at most 255 digests."""
    key = hmac.digest(salt, secret, "sha256") if salt else _extract(secret)
    inner_key, outer_key = key.translate(_INNER) + _INNER_END, key.translate(_OUTER) + _OUTER_END
    block = derived = sha256(outer_key + sha256(inner_key + info + b"\x01").digest()).digest()
    for counter in range(2, -(-length // DIGEST_BYTES) + 1):
        block = sha256(outer_key + sha256(inner_key + block + info + bytes([counter])).digest()).digest()
        derived += block
    return derived[:length]


def _extract(secret: bytes) -> bytes:
    inner, outer = _INNER_OF_ZERO.copy(), _OUTER_OF_ZERO.copy()
    inner.update(secret)
    outer.update(inner.digest())
    return outer.digest()
