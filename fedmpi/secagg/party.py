"""The party's side of one instance of secure aggregation: a state machine that is given messages and returns answers.

    start() -> AdvertiseKeys;  KeyList -> ShareKeys;  ShareList -> MaskedInput or Withdrawal;
    [SurvivorList -> ConsistencyCheck];  UnmaskRequest -> Unmask

    with the keys of an earlier round, in a batch: start() -> MaskedInput or Withdrawal

Each state is an object with what the party still needs from there on: what it needs no longer is gone with the state before.
A message either leads to the next state or is refused and changes nothing. Randomness is an argument.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedmpi.crypto.keys import Agreement, sign, verify
from fedmpi.crypto.masks import add_masks
from fedmpi.errors import ProtocolError
from fedmpi.secagg.batch import BatchDealing, BatchRing
from fedmpi.secagg.dealing import Dealing, Keyed, Meeting, Ring, RoundDealing
from fedmpi.secagg.messages import (
    AdvertiseKeys,
    Answer,
    ConsistencyCheck,
    KeyList,
    MaskedInput,
    PairMask,
    PeerKeys,
    SelfMaskShare,
    ShareBatch,
    ShareKeys,
    ShareList,
    SurvivorList,
    Unmask,
    UnmaskRequest,
    Withdrawal,
)
from fedmpi.secagg.rules import Meter, Rules, no_meter, round_name
from fedmpi.secagg.transcript import Transcript, digest_of_keys
from fedmpi.wire.bits import pack
from fedmpi.wire.message import Message
from fedmpi.wire.phases import Cost, Phase

Values = NDArray[np.unsignedinteger[Any]]


class State:
    """Where a party is, named by the last thing that it did. Never printed: a state holds secrets."""

    DID: ClassVar[str]


@dataclass(frozen=True, repr=False, eq=False)
class New(State):
    DID = "has not started"
    values: Values


@dataclass(frozen=True, repr=False, eq=False)
class Advertised(State):
    DID = "advertised its keys"
    values: Values
    cipher: Agreement
    mask: Agreement
    mask_private: bytes


@dataclass(frozen=True, repr=False, eq=False)
class Shared(State):
    """Every bundle is sealed: the key that agrees on channels is gone."""

    DID = "shared its keys"
    values: Values
    dealing: Dealing


@dataclass(frozen=True, repr=False, eq=False)
class Masked(State):
    """Masks are on: neither the update, nor its own mask, nor the key that agreed on the others is here any more."""

    DID = "sent its input"
    transcript: Transcript
    held: dict[int, tuple[bytes, bytes]]  # by owner: whom it masked with, and itself
    masks: dict[int, bytes]  # the keys of the masks that it agreed on, by peer
    of_dropped: Callable[[int, bytes], Answer]


@dataclass(frozen=True, repr=False, eq=False)
class Signed(State):
    DID = "signed the survivors"
    masked: Masked
    survivors: tuple[int, ...]


class Done(State):
    """It answers once: the other half of each pair of shares is gone."""

    DID = "opened its shares"


class Withdrawn(State):
    """It never sent its input, and holds nothing any more."""

    DID = "withdrew"


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
        values: Values,
        *,
        identity: Identity | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
        meter: Meter = no_meter,
        ring: BatchRing | None = None,
    ):
        """`values` in Z_{2^b}, one per coordinate. `ring`: keys that were made in an earlier round; it begins with its input."""
        if rules.active and identity is None:
            raise ProtocolError("has no identity key, which an active adversary calls for", party=party)
        self.rules = rules
        self.party = party
        self.state: State = New(values)
        self.ring = ring  # in a batch, once its peers' bundles are there
        self._identity = identity or Identity(b"", {})  # which nobody asks unless the adversary is active
        self._random = random_bytes
        self._meter = meter

    def start(self) -> AdvertiseKeys | MaskedInput | Withdrawal:
        if not isinstance(self.state, New):
            raise self._wrong(Phase.ADVERTISE_KEYS, "was asked to start twice")
        if self.ring is not None:
            if not self.ring.is_for(self.rules):
                raise self._wrong(
                    Phase.MASKED_INPUT,
                    "has keys that were made for another cohort, threshold or session, or other settings",
                )
            self.state, message = self._input(self.state.values, self.ring)
            return message
        with self._meter(Phase.ADVERTISE_KEYS, Cost.DH):
            private = self._random(32)
            cipher, mask = Agreement(self._random(32)), Agreement(private)
        keys = cipher.public, mask.public
        signature = self._identity.sign(self.rules.keys_text(self.party, *keys)) if self.rules.active else b""
        self.state = Advertised(self.state.values, cipher, mask, private)
        return self.rules.message(AdvertiseKeys, self.party, *keys, signature)

    def receive(self, message: Message) -> Message:
        """The answer to a legal message; ProtocolError, and no change, for any other."""
        if not self.rules.covers(message) or message.party != self.party:
            name = round_name(message.round, message.purpose)
            raise self._wrong(message.PHASE, f"got a message of {name} for party {message.party}")
        self.state, answer = self._move(message)
        return answer

    def _move(self, message: Message) -> tuple[State, Message]:
        """The legal moves, all of them."""
        active = self.rules.active
        match self.state, message:
            case Advertised() as state, KeyList() as keys:
                return self._share_keys(state, keys)
            case Shared() as state, ShareList() as bundles:
                return self._mask_input(state, bundles)
            case Masked() as state, SurvivorList() as shown if active:
                return self._sign_survivors(state, shown)
            case Masked() as state, UnmaskRequest() as request if not active:
                return Done(), self._unmask(state, request)
            case Signed() as state, UnmaskRequest() as request:
                self._check_signatures(state, request)
                return Done(), self._unmask(state.masked, request)
        raise self._wrong(message.PHASE, f"got {type(message).__name__}, but it {self.state.DID}")

    # ---- round 1 ----

    def _share_keys(self, state: Advertised, message: KeyList) -> tuple[Shared, ShareKeys | ShareBatch]:
        peers = {peer.party: peer for peer in message.peers}
        self._check_peers(state, message, peers)
        keys = state.cipher, state.mask, state.mask_private
        transcript = self._transcript(state, message, peers)
        meeting = Meeting(self.rules, self.party, peers, transcript, *keys, self._random, self._meter)
        kind: type[Dealing] = RoundDealing if self.rules.batch is None else BatchDealing
        dealing, said = kind.deal(meeting)
        return Shared(state.values, dealing), said

    def _transcript(self, state: Advertised, message: KeyList, peers: dict[int, PeerKeys]) -> Transcript:
        """Over the list that it was shown and its own keys; of a sparse graph it sees a part, and takes the digest of the rest."""
        if not self.rules.complete:
            return Transcript.of(self.rules, message.digest)
        own = PeerKeys(self.party, state.cipher.public, state.mask.public)
        return Transcript.of(self.rules, digest_of_keys({**peers, self.party: own}))

    def _check_peers(self, state: Advertised, message: KeyList, peers: dict[int, PeerKeys]) -> None:
        rules, phase = self.rules, Phase.ADVERTISE_KEYS
        if len(peers) != len(message.peers) or self.party in peers:
            raise self._wrong(phase, "was shown a list that names a party twice, or itself")
        if not rules.threshold - 1 <= len(peers) <= rules.degree:
            raise self._wrong(phase, f"was shown {len(peers)} peers, expected {rules.threshold - 1} to {rules.degree}")
        if bool(message.digest) == rules.complete:
            raise self._wrong(phase, "was shown a digest of all keys where it sees them, or none where it does not")
        own = {state.cipher.public, state.mask.public}
        keys = own | {key for peer in peers.values() for key in (peer.cipher_key, peer.mask_key)}
        if len(keys) != 2 * len(peers) + 2:
            raise self._wrong(phase, "was shown the same key twice")
        if rules.active:
            for peer in peers.values():
                text = rules.keys_text(peer.party, peer.cipher_key, peer.mask_key)
                if not self._identity.verifies(peer.party, text, peer.signature):
                    raise self._wrong(phase, f"was shown keys of party {peer.party} that it did not sign")

    # ---- round 2 ----

    def _mask_input(self, state: Shared, message: ShareList) -> tuple[Masked | Withdrawn, MaskedInput | Withdrawal]:
        rules, senders = self.rules, {b.party: b.sealed for b in message.bundles}
        if len(senders) != len(message.bundles) or not senders.keys() <= state.dealing.peers.keys():
            raise self._wrong(message.PHASE, "was shown bundles of a stranger, or two of one party")
        if len(senders) + 1 < rules.threshold:
            raise self._wrong(
                message.PHASE, f"was shown {len(senders)} bundles, expected {rules.threshold - 1} or more"
            )
        with self._meter(Phase.MASKED_INPUT, Cost.AEAD):
            ring = state.dealing.open(senders)
        after = self._input(state.values, ring)
        if isinstance(ring, BatchRing):
            self.ring = ring
        return after

    def _input(self, values: Values, ring: Ring) -> tuple[Masked | Withdrawn, MaskedInput | Withdrawal]:
        """Masked with everybody whose bundle opened, and with nobody else."""
        rules = self.rules
        if ring.holds < rules.threshold:
            return Withdrawn(), rules.message(Withdrawal, self.party, ring.unopened)
        keyed = ring.take(rules, self._meter)
        packed = self._masked(values, keyed)
        after = Masked(keyed.transcript, keyed.held, keyed.masks, keyed.of_dropped)
        return after, rules.message(MaskedInput, self.party, packed, ring.unopened)

    def _masked(self, values: Values, keyed: Keyed) -> bytes:
        rules, phase = self.rules, Phase.MASKED_INPUT
        with self._meter(phase, Cost.PRG):
            total = values.astype(rules.lane)
            # MMF (8): + towards higher parties, - towards lower ones
            signs = [1, *(1 if self.party < peer else -1 for peer in keyed.masks)]
            add_masks(total, [keyed.own_mask, *keyed.masks.values()], signs)
        with self._meter(phase, Cost.ENCODE):
            total &= rules.lane.type((1 << rules.bits) - 1)
            return pack(total, rules.bits)

    # ---- round 3 ----

    def _sign_survivors(self, state: Masked, message: SurvivorList) -> tuple[Signed, ConsistencyCheck]:
        self._check_survivors(state, message)
        signature = self._identity.sign(state.transcript.survivors_text(message.survivors))
        return Signed(state, message.survivors), self.rules.message(ConsistencyCheck, self.party, signature)

    def _check_survivors(self, state: Masked, message: SurvivorList | UnmaskRequest) -> None:
        survivors, phase = message.survivors, message.PHASE
        if list(survivors) != sorted(set(survivors)):
            raise self._wrong(phase, "was shown survivors out of order, or one twice")
        if self.party not in survivors or not set(survivors) <= state.held.keys():
            raise self._wrong(
                phase, "was shown survivors that include a party that it did not mask with, or not itself"
            )
        if len(survivors) < self.rules.threshold:
            raise self._wrong(phase, f"was shown {len(survivors)} survivors, expected {self.rules.threshold} or more")
        # In a sparse graph it sees its neighbours only: no more of them may be lost than of all.
        lost = self.rules.degree + 1 - len(survivors)
        if lost > self.rules.tolerated:
            raise self._wrong(
                phase, f"was shown survivors without {lost} parties, expected {self.rules.tolerated} or fewer"
            )

    # ---- round 4 ----

    def _unmask(self, state: Masked, message: UnmaskRequest) -> Unmask:
        self._check_survivors(state, message)
        survivors, direct, answers = set(message.survivors), set(message.direct), list[Answer]()
        if direct & survivors:
            raise self._wrong(Phase.UNMASK, "was asked for the mask of a party that survived")
        for owner, (of_self_mask, of_masks) in sorted(state.held.items()):
            if owner in survivors:
                answers.append(SelfMaskShare(owner, of_self_mask))
            elif owner in direct:
                answers.append(PairMask(owner, state.masks[owner]))
            else:
                answers.append(state.of_dropped(owner, of_masks))
        return self.rules.message(Unmask, self.party, tuple(answers))

    def _check_signatures(self, state: Signed, message: UnmaskRequest) -> None:
        if message.survivors != state.survivors:
            raise self._wrong(Phase.UNMASK, "was shown other survivors than it signed")
        text = state.masked.transcript.survivors_text(message.survivors)
        valid = {
            entry.party
            for entry in message.signatures
            if entry.party in message.survivors and self._identity.verifies(entry.party, text, entry.signature)
        }
        if len(valid) < self.rules.threshold:
            raise self._wrong(
                Phase.UNMASK,
                f"was shown {len(valid)} valid signatures on the survivors, expected {self.rules.threshold}",
            )

    def _wrong(self, phase: Phase, what: str) -> ProtocolError:
        return ProtocolError(what, party=self.party, phase=phase)
