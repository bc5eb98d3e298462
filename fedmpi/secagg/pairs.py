"""What two parties of a round derive from an agreement: the channel of their bundles, and the key of their mask.

`contexts` are a party's from `Transcript.pair_contexts`. Both ends must derive the same, so the context with the lower party
first is the one that counts.
"""

from fedmpi.crypto.keys import PAIR_MASK, SHARE_BUNDLE, Agreement, Channel, derive
from fedmpi.crypto.masks import MASK_KEY_BYTES

Contexts = tuple[bytes, bytes]  # (from here to there, from there to here)


def bundle_channel(cipher: Agreement, peer_key: bytes, lower: bool, contexts: Contexts) -> Channel:
    """`lower`: whether this party is the lower one. CryptoError for a key of low order."""
    there, back = contexts
    key = derive(cipher.shared(peer_key), SHARE_BUNDLE, there if lower else back)
    return Channel(key, lower, there, back)


def mask_key(mask: Agreement, peer_key: bytes, lower: bool, contexts: Contexts) -> bytes:
    """Of the mask that the lower party adds and the higher one subtracts. CryptoError for a key of low order."""
    return derive(mask.shared(peer_key), PAIR_MASK, contexts[0 if lower else 1], MASK_KEY_BYTES)
