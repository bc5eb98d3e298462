"""The transcript: an instance and everybody's keys in it, as one digest that enters every key, seal and signature from there on.

Two parties that saw anything differently (another model, other settings, another list of keys, an earlier round) have other
transcripts: what one seals for the other does not open, and what one signs does not verify.
"""

import hashlib
from collections.abc import Iterable, Mapping

from fedmpi.crypto.keys import bind
from fedmpi.secagg.messages import AdvertiseKeys, PeerKeys
from fedmpi.secagg.rules import Rules

TRANSCRIPT = b"fedmpi/transcript/1"
ROUND = b"fedmpi/batch-round/1"
SIGNED_SURVIVORS = b"fedmpi/signed-survivors/3"


def digest_of_keys(keys: Mapping[int, AdvertiseKeys | PeerKeys]) -> bytes:
    """Of the whole list, by party."""
    rows = [party.to_bytes(8, "big") + keys[party].cipher_key + keys[party].mask_key for party in sorted(keys)]
    return hashlib.sha256(b"".join(rows)).digest()


class Transcript:
    __slots__ = ("digest", "_place")

    def __init__(self, digest: bytes):
        self.digest = digest
        self._place = bind(digest)

    @classmethod
    def of(cls, rules: Rules, keys: bytes) -> "Transcript":
        """`keys`: their digest."""
        return cls(hashlib.sha256(bind(TRANSCRIPT, rules.instance, keys)).digest())

    def of_round(self, rules: Rules) -> "Transcript":
        """Of one round of the batch whose keys this is the transcript of: with all that is the round's own."""
        own = rules.round, rules.dimension, rules.bits, rules.lost_text, rules.about
        return Transcript(hashlib.sha256(bind(ROUND, self.digest, *own)).digest())

    def context(self, *parties: int) -> bytes:
        """What a derived key or a sealed bundle is for: this transcript and the parties in order."""
        return self._place + bind(*parties)  # `bind` of more parts is `bind` of these, then of those

    def pair_contexts(self, party: int, peers: Iterable[int]) -> dict[int, tuple[bytes, bytes]]:
        """context(party, peer) and context(peer, party) for every peer; every byte of them is put together once."""
        peers, own, place = tuple(peers), bind(party), self._place
        here, size, numbers = place + own, len(own), bind(*peers)
        others = (numbers[at : at + size] for at in range(0, len(numbers), size))
        return {peer: (here + other, place + other + own) for peer, other in zip(peers, others, strict=True)}

    def survivors_text(self, survivors: tuple[int, ...]) -> bytes:
        return bind(SIGNED_SURVIVORS) + self._place + bind(*survivors)
