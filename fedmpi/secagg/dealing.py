"""A party's keys: what it deals to its peers, and what it masks its input with once their bundles are there.

`RoundDealing` is the paper's, for the keys of one sum; `secagg.batch` has that for the keys of several rounds. Neither is printed:
both hold secrets.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedmpi.crypto.keys import SELF_MASK, Agreement, Channel, commit, derive
from fedmpi.crypto.masks import MASK_KEY_BYTES
from fedmpi.crypto.shamir import KEYS, SEEDS, create_shares, encode_share, is_share, secret_to_int
from fedmpi.errors import CryptoError, ProtocolError
from fedmpi.secagg.messages import (
    SEED_SHARE,
    Answer,
    Bundle,
    PairKeyShare,
    PeerKeys,
    ShareBatch,
    ShareKeys,
)
from fedmpi.secagg.pairs import Contexts, bundle_channel, mask_key
from fedmpi.secagg.rules import Meter, Rules, share_points
from fedmpi.secagg.transcript import Transcript
from fedmpi.wire.phases import Cost, Phase

Shares = tuple[bytes, bytes]  # of an owner's b, and of what opens its masks with others


@dataclass(frozen=True, repr=False, eq=False)
class Keyed:
    """What one input is masked with, and what is held of others for its opening."""

    transcript: Transcript
    own_mask: bytes  # the key of the mask that nobody else has
    masks: dict[int, bytes]  # the keys of those that it agreed on, by peer
    held: dict[int, Shares]  # by owner: whom it masks with, and itself
    of_dropped: Callable[[int, bytes], Answer]  # how a share of a dropped owner's second secret is given


class Ring(ABC):
    """A party's keys once its peers' bundles came."""

    unopened: tuple[int, ...]  # whose did not open: with them no mask is agreed on

    @property
    @abstractmethod
    def holds(self) -> int:
        """Of how many owners it has shares, itself included."""

    @abstractmethod
    def take(self, rules: Rules, meter: Meter) -> Keyed:
        """The keys of a round, once."""


@dataclass(frozen=True, repr=False, eq=False)
class Meeting:
    """A party that was shown its peers' keys."""

    rules: Rules
    party: int
    peers: Mapping[int, PeerKeys]
    transcript: Transcript
    cipher: Agreement
    mask: Agreement
    mask_private: bytes
    random: Callable[[int], bytes]
    meter: Meter

    def contexts(self) -> dict[int, Contexts]:
        return self.transcript.pair_contexts(self.party, self.peers)

    def points(self) -> dict[int, int]:
        return share_points(self.party, self.peers)

    def channels(self, contexts: Mapping[int, Contexts]) -> dict[int, Channel]:
        with self.meter(Phase.SHARE_KEYS, Cost.DH):
            return {peer: self._channel(keys, contexts[peer]) for peer, keys in self.peers.items()}

    def _channel(self, peer: PeerKeys, contexts: Contexts) -> Channel:
        try:
            return bundle_channel(self.cipher, peer.cipher_key, self.party < peer.party, contexts)
        except CryptoError:
            raise self.disagrees(peer.party) from None

    def disagrees(self, peer: int) -> ProtocolError:
        return ProtocolError(f"cannot agree with the key of party {peer}", party=self.party, phase=Phase.ADVERTISE_KEYS)


class Dealing(ABC):
    """A party that has dealt: its bundles are sealed, and the key that agreed on their channels is gone."""

    peers: Mapping[int, PeerKeys]

    @classmethod
    @abstractmethod
    def deal(cls, meeting: Meeting) -> tuple["Dealing", ShareKeys | ShareBatch]: ...

    @abstractmethod
    def open(self, sealed: Mapping[int, bytes]) -> Ring:
        """What its peers sealed for it. A bundle that opens was sealed in this very transcript by who holds the key."""


def seal(channels: Mapping[int, Channel], texts: Mapping[int, bytes], meter: Meter) -> tuple[Bundle, ...]:
    with meter(Phase.SHARE_KEYS, Cost.AEAD):
        return tuple([Bundle(peer, channel.seal(texts[peer])) for peer, channel in channels.items()])


def unseal(channel: Channel, sealed: bytes) -> bytes | None:
    try:
        return channel.open(sealed)
    except CryptoError:
        return None


# ---- of one round ----


@dataclass(frozen=True, repr=False, eq=False)
class RoundDealing(Dealing):
    """s^SK has been dealt, and b."""

    party: int
    peers: Mapping[int, PeerKeys]
    mask: Agreement
    self_mask: bytes
    own: Shares
    transcript: Transcript
    contexts: dict[int, Contexts]
    channels: dict[int, Channel]

    @classmethod
    def deal(cls, meeting: Meeting) -> tuple["RoundDealing", ShareKeys]:
        rules, party, points = meeting.rules, meeting.party, meeting.points()
        self_mask = meeting.random(SEEDS.secret_bytes)
        with meeting.meter(Phase.SHARE_KEYS, Cost.SHAMIR_SPLIT):
            secrets = [secret_to_int(self_mask, SEEDS), secret_to_int(meeting.mask_private)]
            shares = create_shares(secrets, rules.threshold, list(points.values()), meeting.random, (SEEDS, KEYS))
            pairs = [(encode_share(of_mask, SEEDS), encode_share(of_key)) for of_mask, of_key in zip(*shares)]
            texts = dict(zip(points, pairs))
        contexts = meeting.contexts()
        channels = meeting.channels(contexts)
        bundles = seal(channels, {holder: b"".join(pair) for holder, pair in texts.items()}, meeting.meter)
        commitment = commit(self_mask, meeting.transcript.context(party))
        after = cls(party, meeting.peers, meeting.mask, self_mask, texts[party], meeting.transcript, contexts, channels)
        return after, rules.message(ShareKeys, party, bundles, commitment)

    def open(self, sealed: Mapping[int, bytes]) -> "RoundRing":
        read = {sender: _shares(unseal(self.channels[sender], text)) for sender, text in sealed.items()}
        opened = {sender: shares for sender, shares in read.items() if shares is not None}
        return RoundRing(self, opened, tuple(sorted(sealed.keys() - opened.keys())))


def _shares(text: bytes | None) -> Shares | None:
    if text is None:
        return None
    of_self_mask, of_mask_key = text[:SEED_SHARE], text[SEED_SHARE:]
    return (of_self_mask, of_mask_key) if is_share(of_self_mask, SEEDS) and is_share(of_mask_key) else None


@dataclass(frozen=True, repr=False, eq=False)
class RoundRing(Ring):
    dealt: RoundDealing
    opened: dict[int, Shares]
    unopened: tuple[int, ...]

    @property
    def holds(self) -> int:
        return len(self.opened) + 1

    def take(self, rules: Rules, meter: Meter) -> Keyed:
        dealt = self.dealt
        transcript, party = dealt.transcript, dealt.party
        own_mask = derive(dealt.self_mask, SELF_MASK, transcript.context(party), MASK_KEY_BYTES)
        with meter(Phase.MASKED_INPUT, Cost.DH):
            masks = {peer: self._mask_key(peer) for peer in self.opened}
        return Keyed(transcript, own_mask, masks, {party: dealt.own, **self.opened}, PairKeyShare)

    def _mask_key(self, peer: int) -> bytes:
        dealt = self.dealt
        try:
            return mask_key(dealt.mask, dealt.peers[peer].mask_key, dealt.party < peer, dealt.contexts[peer])
        except CryptoError:
            what = f"cannot agree with the key of party {peer}"
            raise ProtocolError(what, party=dealt.party, phase=Phase.MASKED_INPUT) from None
