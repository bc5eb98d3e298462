"""The party's side of one secure-aggregation round: a state machine that is given messages and returns answers.

    start() -> AdvertiseKeys;  KeyList -> ShareKeys;  ShareList -> MaskedInput;  [SurvivorList -> ConsistencyCheck];
    UnmaskRequest -> Unmask

A refused message changes nothing. Randomness is an argument. What is no longer needed is dropped as soon as it can be.
"""

import enum
import os
from collections.abc import Callable, Mapping

import numpy as np

from fedmpi.crypto.keys import SELF_MASK, Agreement, Channel, commit, derive, sign, verify
from fedmpi.crypto.masks import MASK_KEY_BYTES, add_masks
from fedmpi.crypto.shamir import create_shares, encode_share, is_share, secret_to_int
from fedmpi.errors import CryptoError, ProtocolError
from fedmpi.secagg.messages import (
    SHARE,
    AdvertiseKeys,
    Bundle,
    ConsistencyCheck,
    KeyList,
    MaskedInput,
    PairKeyShare,
    PeerKeys,
    SelfMaskShare,
    ShareKeys,
    ShareList,
    SurvivorList,
    Unmask,
    UnmaskRequest,
    Unopened,
)
from fedmpi.secagg.pairs import Contexts, bundle_channel, mask_key
from fedmpi.secagg.rules import Meter, Rules, no_meter, share_points
from fedmpi.wire.bits import pack
from fedmpi.wire.message import Message


class Phase(enum.Enum):
    """The last thing that this party did."""

    NEW = "has not started"
    ADVERTISED = "advertised its keys"
    SHARED = "shared its keys"
    MASKED = "sent its input"
    SIGNED = "signed the survivors"
    DONE = "opened its shares"


# The legal moves. A message that is not here is refused and changes nothing.
NEXT = {
    (Phase.ADVERTISED, KeyList): Phase.SHARED,
    (Phase.SHARED, ShareList): Phase.MASKED,
    (Phase.MASKED, UnmaskRequest): Phase.DONE,
}
NEXT_ACTIVE = {
    (Phase.ADVERTISED, KeyList): Phase.SHARED,
    (Phase.SHARED, ShareList): Phase.MASKED,
    (Phase.MASKED, SurvivorList): Phase.SIGNED,
    (Phase.SIGNED, UnmaskRequest): Phase.DONE,
}


class Identity:
    """A party's signing key and everybody's public ones, from a file at launch and never from rank 0."""

    def __init__(self, private: bytes, public: Mapping[int, bytes]):
        self._private = private
        self.public = dict(public)

    def sign(self, text: bytes) -> bytes:
        return sign(self._private, text)

    def verifies(self, party: int, text: bytes, signature: bytes) -> bool:
        return party in self.public and verify(self.public[party], text, signature)

    def __repr__(self) -> str:
        return "Identity(secret)"


class SecAggParty:
    def __init__(
        self,
        rules: Rules,
        party: int,
        values: np.ndarray,
        *,
        identity: Identity | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
        meter: Meter = no_meter,
    ):
        """`values` in Z_{2^b}, one per coordinate."""
        if rules.active and identity is None:
            raise ProtocolError("has no identity key, which an active adversary calls for", party=party)
        self.rules = rules
        self.party = party
        self.phase = Phase.NEW
        self._moves = NEXT_ACTIVE if rules.active else NEXT
        self._values = values
        self._identity = identity
        self._random = random_bytes
        self._meter = meter
        self._cipher: Agreement | None = None
        self._mask: Agreement | None = None
        self._mask_private = b""
        self._self_mask = b""
        self._peers: dict[int, PeerKeys] = {}
        self._contexts: dict[int, Contexts] = {}
        self._channels: dict[int, Channel] = {}
        self._held: dict[
            int, tuple[bytes, bytes] | None
        ] = {}  # owner -> (share of b, share of s^SK); None: did not open
        self._signed: tuple[int, ...] | None = None

    def start(self) -> AdvertiseKeys:
        if self.phase is not Phase.NEW:
            raise self._wrong("AdvertiseKeys", "was asked to start twice")
        with self._meter("DH"):
            self._mask_private = self._random(32)
            self._cipher, self._mask = Agreement(self._random(32)), Agreement(self._mask_private)
        keys = self._cipher.public, self._mask.public
        signature = self._identity.sign(self.rules.keys_text(self.party, *keys)) if self.rules.active else b""
        self.phase = Phase.ADVERTISED
        return AdvertiseKeys(self.rules.round, self.party, *keys, signature)

    def receive(self, message: Message) -> Message:
        """The answer to a legal message; ProtocolError, and no change, for any other."""
        after = self._moves.get((self.phase, type(message)))
        if after is None:
            raise self._wrong(message.PHASE, f"got {type(message).__name__}, but it {self.phase.value}")
        if message.round != self.rules.round or message.party != self.party:
            raise self._wrong(message.PHASE, f"got a message of round {message.round} for party {message.party}")
        handlers = {
            KeyList: self._share_keys,
            ShareList: self._mask_input,
            SurvivorList: self._check_consistency,
            UnmaskRequest: self._unmask,
        }
        answer = handlers[type(message)](message)
        self.phase = after
        return answer

    # ---- round 1 ----

    def _share_keys(self, message: KeyList) -> ShareKeys:
        rules, peers = self.rules, {peer.party: peer for peer in message.peers}
        self._check_peers(message, peers)
        self_mask = self._random(32)
        points = share_points(self.party, peers)
        with self._meter("Shamir split"):
            secrets = [secret_to_int(self_mask), secret_to_int(self._mask_private)]
            shares = create_shares(secrets, rules.threshold, list(points.values()), self._random)
            texts = dict(zip(points, zip(*(map(encode_share, row) for row in shares))))
        contexts = rules.pair_contexts(self.party, peers)
        with self._meter("DH"):
            channels = {party: self._channel(peer, contexts[party]) for party, peer in peers.items()}
        with self._meter("AEAD"):
            bundles = tuple(
                [Bundle(party, channel.seal(b"".join(texts[party]))) for party, channel in channels.items()]
            )
        commitment = commit(self_mask, rules.context(self.party))
        self._self_mask, self._peers, self._channels, self._contexts = self_mask, peers, channels, contexts
        self._held = {self.party: texts[self.party]}
        self._cipher, self._mask_private = None, b""  # every bundle is sealed, and its keys are derived
        return ShareKeys(rules.round, self.party, bundles, commitment)

    def _check_peers(self, message: KeyList, peers: dict[int, PeerKeys]) -> None:
        rules = self.rules
        if len(peers) != len(message.peers) or self.party in peers:
            raise self._wrong("AdvertiseKeys", "was shown a list that names a party twice, or itself")
        if not rules.threshold - 1 <= len(peers) <= rules.degree:
            raise self._wrong(
                "AdvertiseKeys", f"was shown {len(peers)} peers, expected {rules.threshold - 1} to {rules.degree}"
            )
        own = {self._cipher.public, self._mask.public}
        keys = own | {key for peer in peers.values() for key in (peer.cipher_key, peer.mask_key)}
        if len(keys) != 2 * len(peers) + 2:
            raise self._wrong("AdvertiseKeys", "was shown the same key twice")
        if rules.active:
            for peer in peers.values():
                text = rules.keys_text(peer.party, peer.cipher_key, peer.mask_key)
                if not self._identity.verifies(peer.party, text, peer.signature):
                    raise self._wrong("AdvertiseKeys", f"was shown keys of party {peer.party} that it did not sign")

    def _channel(self, peer: PeerKeys, contexts: Contexts) -> Channel:
        try:
            return bundle_channel(self._cipher, peer.cipher_key, self.party < peer.party, contexts)
        except CryptoError:
            raise self._wrong("AdvertiseKeys", f"cannot agree with the key of party {peer.party}") from None

    # ---- round 2 ----

    def _mask_input(self, message: ShareList) -> MaskedInput:
        rules, senders = self.rules, {bundle.party: bundle.sealed for bundle in message.bundles}
        if len(senders) != len(message.bundles) or not senders.keys() <= self._peers.keys():
            raise self._wrong("ShareKeys", "was shown bundles of a stranger, or two of one party")
        if len(senders) + 1 < rules.threshold:
            raise self._wrong("ShareKeys", f"was shown {len(senders)} bundles, expected {rules.threshold - 1} or more")
        with self._meter("AEAD"):
            opened = {sender: self._open(sender, sealed) for sender, sealed in senders.items()}
        keys, signs = [derive(self._self_mask, SELF_MASK, rules.context(self.party), MASK_KEY_BYTES)], [1]
        with self._meter("DH"):
            for peer in senders:
                keys.append(self._pair_mask_key(peer))
                signs.append(1 if self.party < peer else -1)  # MMF (8): + towards higher parties, - towards lower ones
        with self._meter("PRG"):
            total = self._values.astype(rules.lane)
            add_masks(total, keys, signs)
        with self._meter("encode"):
            total &= rules.lane.type((1 << rules.bits) - 1)
            packed = pack(total, rules.bits)
        self._held |= opened
        # Masks are on: neither the update nor the keys that would take them off are needed here any more.
        self._mask, self._self_mask, self._values, self._channels, self._contexts = None, b"", None, {}, {}
        return MaskedInput(rules.round, self.party, packed)

    def _open(self, sender: int, sealed: bytes) -> tuple[bytes, bytes] | None:
        try:
            text = self._channels[sender].open(sealed)
        except CryptoError:
            return None
        of_self_mask, of_mask_key = text[:SHARE], text[SHARE:]
        return (of_self_mask, of_mask_key) if is_share(of_self_mask) and is_share(of_mask_key) else None

    def _pair_mask_key(self, peer: int) -> bytes:
        try:
            return mask_key(self._mask, self._peers[peer].mask_key, self.party < peer, self._contexts[peer])
        except CryptoError:
            raise self._wrong("MaskedInput", f"cannot agree with the key of party {peer}") from None

    # ---- round 3 ----

    def _check_consistency(self, message: SurvivorList) -> ConsistencyCheck:
        self._check_survivors(message.survivors, "ConsistencyCheck")
        self._signed = message.survivors
        signature = self._identity.sign(self.rules.survivors_text(message.survivors))
        return ConsistencyCheck(self.rules.round, self.party, signature)

    def _check_survivors(self, survivors: tuple[int, ...], phase: str) -> None:
        if list(survivors) != sorted(set(survivors)):
            raise self._wrong(phase, "was shown survivors out of order, or one twice")
        if self.party not in survivors or not set(survivors) <= self._held.keys():
            raise self._wrong(phase, "was shown survivors that include a stranger, or not itself")
        if len(survivors) < self.rules.threshold:
            raise self._wrong(phase, f"was shown {len(survivors)} survivors, expected {self.rules.threshold} or more")
        # In a sparse graph it sees its neighbours only: no more of them may be lost than of all.
        lost = self.rules.degree + 1 - len(survivors)
        if lost > self.rules.tolerated:
            raise self._wrong(
                phase, f"was shown survivors without {lost} parties, expected {self.rules.tolerated} or fewer"
            )

    # ---- round 4 ----

    def _unmask(self, message: UnmaskRequest) -> Unmask:
        self._check_survivors(message.survivors, "Unmask")
        if self.rules.active:
            self._check_signatures(message)
        survivors, answers = set(message.survivors), []
        for owner, shares in sorted(self._held.items()):
            if shares is None:
                answers.append(Unopened(owner))
            elif owner in survivors:
                answers.append(SelfMaskShare(owner, shares[0]))
            else:
                answers.append(PairKeyShare(owner, shares[1]))
        self._held, self._peers = {}, {}  # it answers once: the other half of each pair is gone
        return Unmask(self.rules.round, self.party, tuple(answers))

    def _check_signatures(self, message: UnmaskRequest) -> None:
        if message.survivors != self._signed:
            raise self._wrong("Unmask", "was shown other survivors than it signed")
        text = self.rules.survivors_text(message.survivors)
        valid = {
            entry.party
            for entry in message.signatures
            if entry.party in message.survivors and self._identity.verifies(entry.party, text, entry.signature)
        }
        if len(valid) < self.rules.threshold:
            raise self._wrong(
                "Unmask", f"was shown {len(valid)} valid signatures on the survivors, expected {self.rules.threshold}"
            )

    def _wrong(self, phase: str, what: str) -> ProtocolError:
        return ProtocolError(what, party=self.party, phase=phase)
