"""Key agreement, key derivation, authenticated encryption, signatures and commitments, from `cryptography`.

Bytes in, bytes out. Which primitive: X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), AES-256-GCM (NIST SP 800-38D),
Ed25519 (RFC 8032), SHA-256. What a key is for is a label, where it is used is a context built by `bind`. No error
message holds a key, a plaintext or a tag.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmpi.errors import CryptoError

_SHA256 = SHA256()  # made once: a derivation is done for every peer

KEY_BYTES = 32  # X25519 and Ed25519 keys, shared secrets, AEAD keys
SIGNATURE_BYTES = 64
COMMITMENT_BYTES = 32
AEAD_OVERHEAD = 16  # the tag; the nonce is not sent

# What a derived key is for. The last number changes with the format.
PAIR_MASK = b"fedmpi/pair-mask/1"
SELF_MASK = b"fedmpi/self-mask/1"
SHARE_BUNDLE = b"fedmpi/share-bundle/1"
_COMMITMENT = b"fedmpi/commitment/1"

_NONCE = bytes(12)
_MAX_DERIVED = 255 * 32  # RFC 5869: the counter of blocks is one byte


def bind(*parts: bytes | int) -> bytes:
    """The parts as one string, such that different parts never give the same string: a context or associated data, for
    example `bind(session, round, sender, receiver)`. Numbers are 8 bytes, strings carry their length."""
    try:
        return b"".join(
            [
                b"i" + part.to_bytes(8, "big") if type(part) is int else b"s" + len(part).to_bytes(4, "big") + part
                for part in parts
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
        peer = X25519PublicKey.from_public_bytes(_sized(peer_public, KEY_BYTES, "an X25519 public key"))
        try:
            return self._private.exchange(peer)
        except ValueError:
            raise CryptoError("an X25519 public key is of low order: it shares no secret") from None

    def __repr__(self) -> str:
        return "Agreement(secret)"

    def __reduce__(self):
        raise TypeError("an Agreement holds a private key and is never serialised")


def public_key(private: bytes) -> bytes:
    """The X25519 public key of 32 private bytes."""
    return Agreement(private).public


def agree(private: bytes, peer_public: bytes) -> bytes:
    """X25519 once. For many peers of one key, keep an `Agreement`."""
    return Agreement(private).shared(peer_public)


def derive(shared: bytes, label: bytes, context: bytes, length: int = KEY_BYTES) -> bytes:
    """HKDF-SHA256 without salt: `length` bytes for the purpose `label` in the place `context` (from `bind`). Other
    labels or contexts give unrelated keys. `shared` is an X25519 secret or a uniform seed."""
    if not 1 <= length <= _MAX_DERIVED:
        raise CryptoError(f"HKDF derives 1 to {_MAX_DERIVED} bytes, not {length}")
    return _hkdf(shared, b"", bind(label, context), length)


def _hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    return HKDF(algorithm=_SHA256, length=length, salt=salt, info=info).derive(secret)


def seal(key: bytes, plaintext: bytes, associated: bytes) -> bytes:
    """Encrypt and authenticate by AES-256-GCM: ciphertext, then a tag of 16 bytes; `associated` is authenticated only.

    A key seals exactly one message. The nonce is then of no use and fixed at zero: GCM needs (key, nonce) to be unique,
    and the key alone is. It has to come from `derive` under a context of session, round, sender and receiver, with
    fresh X25519 keys every round; sender before receiver makes it another key for each direction. A second, different
    message under the same key would reveal the XOR of both and let anybody forge.
    """
    return _aead(key).encrypt(_NONCE, plaintext, associated)


def open_sealed(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """The plaintext, if key, ciphertext and associated data are all what they were in `seal`."""
    if len(sealed) < AEAD_OVERHEAD:
        raise CryptoError(f"a sealed message has at least {AEAD_OVERHEAD} bytes, not {len(sealed)}")
    try:
        return _aead(key).decrypt(_NONCE, sealed, associated)
    except InvalidTag:
        raise CryptoError("a sealed message does not authenticate: it, its place or its key is wrong") from None


def _aead(key: bytes) -> AESGCM:
    return AESGCM(_sized(key, KEY_BYTES, "an AEAD key"))


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
    """SHA-256 over label, context and secret. It hides the secret because that is 32 uniform bytes, too many to guess,
    and binds because two openings would be a collision."""
    _sized(secret, KEY_BYTES, "a committed secret")
    return hashlib.sha256(bind(_COMMITMENT, context, secret)).digest()


def opens(commitment: bytes, secret: bytes, context: bytes) -> bool:
    """Whether the secret is the one committed to."""
    return hmac.compare_digest(commit(secret, context), bytes(commitment))


def _sized(data: bytes, size: int, what: str) -> bytes:
    if len(data) != size:
        raise CryptoError(f"{what} has {size} bytes, not {len(data)}")
    return bytes(data)
