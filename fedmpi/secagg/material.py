"""What the set-up of keys leaves with the server: who masks with whom, and what an opened secret is held against and gives.

`RoundMaterial` is the paper's, for one sum. Of a batch of rounds `BatchMaterial` is kept from round to round, each of which has a part
of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedmpi.crypto.keys import SELF_MASK, Agreement, derive, opens, public_key
from fedmpi.crypto.masks import MASK_KEY_BYTES
from fedmpi.crypto.shamir import KEYS, SEEDS, Field
from fedmpi.errors import CryptoError
from fedmpi.secagg.batch import cut, list_channel, round_mask
from fedmpi.secagg.messages import AdvertiseKeys, Answer, ListKeyShare, PairKeyShare
from fedmpi.secagg.pairs import mask_key
from fedmpi.secagg.rules import Rules, share_points
from fedmpi.secagg.transcript import Transcript

Neighbours = Mapping[int, tuple[int, ...]]
Dealt = Mapping[
    int, tuple[tuple[bytes, ...], tuple[bytes, ...]]
]  # by dealer: commitments to b and, in a batch, sealed lists


class Material(ABC):
    """Of one round."""

    key_field: ClassVar[Field]  # of the secret that opens a dropped party's masks with others ...
    of_dropped: ClassVar[type[Answer]]  # ... and how shares of it are given

    def __init__(self, transcript: Transcript, neighbours: Neighbours, keys: Mapping[int, AdvertiseKeys], dealt: Dealt):
        """`transcript` that its masks are derived in; `keys` of those who advertised some, U1; `dealt` of those who dealt, U2."""
        self.transcript, self.neighbours, self.keys, self.dealt = transcript, neighbours, keys, dealt

    def places(self, owner: int) -> dict[int, int]:
        """Where the owner's shares were dealt."""
        return share_points(owner, self.met(owner))

    def met(self, owner: int) -> list[int]:
        """The peers whose keys it was shown."""
        return [peer for peer in self.neighbours[owner] if peer in self.keys]

    def self_mask(self, owner: int, seed: bytes) -> bytes:
        return derive(seed, SELF_MASK, self.transcript.context(owner), MASK_KEY_BYTES)

    @abstractmethod
    def fits_seed(self, owner: int, seed: bytes) -> bool:
        """Whether it is the b that the owner committed to."""

    @abstractmethod
    def fits_key(self, owner: int, secret: bytes) -> bool:
        """Whether it is what opens the owner's masks with others."""

    @abstractmethod
    def pair_masks(self, owner: int, secret: bytes, others: Iterable[int]) -> dict[int, bytes]:
        """The keys of the masks that these agreed on with a dropped owner."""


class RoundMaterial(Material):
    key_field, of_dropped = KEYS, PairKeyShare

    def fits_seed(self, owner: int, seed: bytes) -> bool:
        return opens(self.dealt[owner][0][0], seed, self.transcript.context(owner))

    def fits_key(self, owner: int, secret: bytes) -> bool:
        return public_key(secret) == self.keys[owner].mask_key

    def pair_masks(self, owner: int, secret: bytes, others: Iterable[int]) -> dict[int, bytes]:
        dropped, contexts = Agreement(secret), self.transcript.pair_contexts(owner, others)
        return {
            other: mask_key(dropped, self.keys[other].mask_key, owner < other, pair) for other, pair in contexts.items()
        }


@dataclass(frozen=True)
class BatchMaterial:
    """Of all rounds of a batch."""

    first: int
    last: int
    transcript: Transcript  # of the batch
    neighbours: Neighbours
    keys: Mapping[int, AdvertiseKeys]
    dealt: Dealt

    def of_round(self, rules: Rules) -> "ListMaterial":
        return ListMaterial(self, rules)


class ListMaterial(Material):
    """Of one round of a batch."""

    key_field, of_dropped = SEEDS, ListKeyShare

    def __init__(self, batch: BatchMaterial, rules: Rules):
        super().__init__(batch.transcript.of_round(rules), batch.neighbours, batch.keys, batch.dealt)
        self._batch, self._round, self._place = batch.transcript, rules.round, rules.round - batch.first

    def fits_seed(self, owner: int, seed: bytes) -> bool:
        return opens(self.dealt[owner][0][self._place], seed, self._batch.context(owner, self._round))

    def fits_key(self, owner: int, secret: bytes) -> bool:
        return self._list(owner, secret) is not None

    def pair_masks(self, owner: int, secret: bytes, others: Iterable[int]) -> dict[int, bytes]:
        keys = self._list(owner, secret)
        assert keys is not None, "it fits"
        place = {peer: at for at, peer in enumerate(sorted(self.met(owner)))}
        return {
            other: round_mask(cut(keys, MASK_KEY_BYTES, place[other]), self.transcript, owner, other)
            for other in others
        }

    def _list(self, owner: int, secret: bytes) -> bytes | None:
        try:
            return list_channel(secret, self._batch, owner, self._round, False).open(self.dealt[owner][1][self._place])
        except CryptoError:
            return None
