"""Key agreement, key derivation, authenticated encryption, signatures and commitments, on `cryptography` and `hashlib`.

Bytes in, bytes out. Which primitive: X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), AES-256-GCM (NIST SP 800-38D),
Ed25519 (RFC 8032), SHA-256. What a key is for is a label, where it is used is a context built by `bind`. No error
message holds a key, a plaintext or a tag.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedmpi.crypto.hkdf import DIGEST_BYTES, hkdf
from fedmpi.errors import CryptoError

KEY_BYTES = 32  # X25519 and Ed25519 keys, shared secrets, AEAD keys
SEED_BYTES = 16  # what mask keys are derived from, if it is not an agreement
SIGNATURE_BYTES = 64
COMMITMENT_BYTES = 32
AEAD_OVERHEAD = 16  # the tag; the nonce is not sent

# What a derived key is for. The last number changes with the format.
PAIR_MASK = b"fedmpi/pair-mask/1"
SELF_MASK = b"fedmpi/self-mask/1"
SHARE_BUNDLE = b"fedmpi/share-bundle/1"
_COMMITMENT = b"fedmpi/commitment/1"

_NONCES = bytes(12), bytes(11) + b"\x01"  # of the two directions of a channel
_MAX_DERIVED = 255 * DIGEST_BYTES  # RFC 5869: the counter of blocks is one byte


def bind(*parts: bytes | int) -> bytes:
    """The parts as one string, such that different parts never give the same string: a context or associated data, for
    example `bind(session, round, sender, receiver)`. Numbers are 8 bytes, strings carry their length."""
    texts: tuple[Any, ...] = parts  # what is neither raises
    try:
        return b"".join(
            [
                b"i" + part.to_bytes(8, "big") if type(part) is int else b"s" + len(part).to_bytes(4, "big") + part
                for part in texts
            ]
        )
    except (OverflowError, TypeError):
        raise CryptoError("a context holds strings of bytes, and numbers that fit 64 bits without a sign") from None


class Agreement:
    """One side of X25519: the private key is loaded once and meets many peers."""

    __slots__ = ("_private", "public")

    def __init__(self, private: bytes):
        """`private`: 32 random bytes, any value (the curve's clamping happens inside)."""
        self._private = X25519PrivateKey.from_private_bytes(_sized(private, KEY_BYTES, "an X25519 private key"))
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def shared(self, peer_public: bytes) -> bytes:
        """The secret shared with a peer: not uniform, to be put through `derive`. A peer key of low order would make it
        the same known value for everybody, and is refused."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError:
            _sized(peer_public, KEY_BYTES, "an X25519 public key")
            raise CryptoError("an X25519 public key is of low order: it shares no secret") from None

    def __repr__(self) -> str:
        return "Agreement(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Agreement holds a private key and is never serialised")


def public_key(private: bytes) -> bytes:
    """The X25519 public key of 32 private bytes."""
    return Agreement(private).public


def derive(shared: bytes, label: bytes, context: bytes, length: int = KEY_BYTES) -> bytes:
    """HKDF-SHA256 without salt: `length` bytes for the purpose `label` in the place `context` (from `bind`). Other
    labels or contexts give unrelated keys. `shared` is an X25519 secret or a uniform seed."""
    if not 1 <= length <= _MAX_DERIVED:
        raise CryptoError(f"HKDF derives 1 to {_MAX_DERIVED} bytes, not {length}")
    return hkdf(shared, b"", _head(label, len(context)) + context, length)


@lru_cache(maxsize=64)  # every peer has the same label, and a context of the same size
def _head(label: bytes, size: int) -> bytes:
    """What comes before a context of this size in `bind(label, context)`."""
    return bind(label, bytes(size))[: -size or None]


class Channel:
    """One end of what two parties seal for each other, by AES-256-GCM: one message each way, under one key.

    GCM needs (key, nonce) to be unique. The key is, if it comes from `derive` under a context of session, round and both
    parties, with fresh X25519 keys every round; the nonce then only tells the directions apart. A second, different
    message the same way would reveal the XOR of both and let anybody forge.
    """

    __slots__ = ("_key", "_nonces", "_there", "_back")

    def __init__(self, key: bytes, first: bool, there: bytes, back: bytes):
        """`first` at one end and not at the other. `there` and `back` are authenticated with the message that goes out
        and the one that comes in; at the other end they change places."""
        self._key = _sized(key, KEY_BYTES, "an AEAD key")
        self._nonces = _NONCES if first else _NONCES[::-1]
        self._there, self._back = there, back

    def seal(self, plaintext: bytes) -> bytes:
        """Ciphertext, then a tag of 16 bytes."""
        return AESGCM(self._key).encrypt(self._nonces[0], plaintext, self._there)

    def open(self, sealed: bytes) -> bytes:
        """The plaintext, if key, direction, ciphertext and associated data are all what they were in `seal`."""
        try:
            return AESGCM(self._key).decrypt(self._nonces[1], sealed, self._back)
        except InvalidTag:
            raise CryptoError("a sealed message does not authenticate: it, its place or its key is wrong") from None

    def __repr__(self) -> str:
        return "Channel(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Channel holds a key and is never serialised")


def signing_public(private: bytes) -> bytes:
    """The Ed25519 public key of 32 private bytes."""
    return _signer(private).public_key().public_bytes_raw()


def sign(private: bytes, message: bytes) -> bytes:
    """An Ed25519 signature of 64 bytes. The message starts with what it is about: `bind(label, session, ...)`."""
    return _signer(private).sign(message)


def verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the signature is the key owner's on this message. A key of another size is an error, not a false."""
    key = Ed25519PublicKey.from_public_bytes(_sized(public, KEY_BYTES, "an Ed25519 public key"))
    try:
        key.verify(bytes(signature), message)
    except InvalidSignature:
        return False
    return True


def _signer(private: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(_sized(private, KEY_BYTES, "an Ed25519 private key"))


def commit(secret: bytes, context: bytes) -> bytes:
    """SHA-256 over label, context and secret. It hides the secret because that is 16 uniform bytes or more, too many to guess (and a
    guess is one at this context's secret alone), and binds because two openings would be a collision."""
    if len(secret) < SEED_BYTES:
        raise CryptoError(f"a committed secret has {SEED_BYTES} bytes or more, not {len(secret)}")
    return hashlib.sha256(bind(_COMMITMENT, context, secret)).digest()


def opens(commitment: bytes, secret: bytes, context: bytes) -> bool:
    """Whether the secret is the one committed to."""
    return hmac.compare_digest(commit(secret, context), bytes(commitment))


def _sized(data: bytes, size: int, what: str) -> bytes:
    if len(data) != size:
        raise CryptoError(f"{what} has {size} bytes, not {len(data)}")
    return bytes(data)
