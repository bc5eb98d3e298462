"""The server's side of one secure-aggregation round.

It routes keys and bundles that it cannot read, adds masked inputs, and with the survivors' shares takes the masks off:
the sum of the survivors' inputs is all that is left. A phase ends when everybody who is still in it has answered, or was
dropped; `drop` and `expire` are how a silent or a lying party leaves. A refused message changes nothing.
"""

import enum
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.crypto.keys import SELF_MASK, Agreement, derive, opens, public_key, verify
from fedmpi.crypto.masks import MASK_KEY_BYTES, add_masks
from fedmpi.crypto.shamir import decode_share, is_share
from fedmpi.errors import CryptoError, Fault, ProtocolError
from fedmpi.secagg.messages import (
    AdvertiseKeys,
    Answer,
    Bundle,
    ConsistencyCheck,
    KeyList,
    MaskedInput,
    PairKeyShare,
    PeerKeys,
    SelfMaskShare,
    ShareKeys,
    ShareList,
    Signed,
    SurvivorList,
    Unmask,
    UnmaskRequest,
    Unopened,
)
from fedmpi.secagg.opening import Opening
from fedmpi.secagg.pairs import mask_key
from fedmpi.secagg.rules import Meter, Rules, no_meter, round_name, share_points
from fedmpi.wire.bits import PackedSum, packed_size
from fedmpi.wire.message import Message
from fedmpi.wire.phases import Cost, Phase

Answers = list[tuple[int, Message]]

PROBE = Agreement(b"\x55" * 32)  # any key will do: only points of low order make an agreement with it fail


class State(enum.Enum):
    """What the server waits for, or how its round ended."""

    KEYS = enum.auto()
    SHARES = enum.auto()
    INPUTS = enum.auto()
    SIGNATURES = enum.auto()
    ANSWERS = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


EXPECTED: dict[State, type[Message]] = {
    State.KEYS: AdvertiseKeys,
    State.SHARES: ShareKeys,
    State.INPUTS: MaskedInput,
    State.SIGNATURES: ConsistencyCheck,
    State.ANSWERS: Unmask,
}
# The legal moves: what follows when everybody has answered. Any of these may also fail.
NEXT = {
    State.KEYS: State.SHARES,
    State.SHARES: State.INPUTS,
    State.INPUTS: State.ANSWERS,
    State.ANSWERS: State.DONE,
}
NEXT_ACTIVE = NEXT | {State.INPUTS: State.SIGNATURES, State.SIGNATURES: State.ANSWERS}


class SecAggServer:
    def __init__(
        self,
        rules: Rules,
        neighbours: Mapping[int, tuple[int, ...]],
        *,
        identities: Mapping[int, bytes] | None = None,
        threads: int = 1,
        meter: Meter = no_meter,
    ):
        """`neighbours` of every party of the cohort, symmetric, each as many as the rules' degree."""
        self.rules = rules
        self.state = State.KEYS
        self.reason = ""  # why the round failed
        self.faults: list[Fault] = []  # who was caught at what
        self.openable: tuple[int, ...] = ()  # whose sum was asked for: enough answers open it, in time or late
        self._moves = NEXT_ACTIVE if rules.active else NEXT
        self._neighbours = {party: tuple(sorted(others)) for party, others in neighbours.items()}
        self._identities = identities or {}
        self._threads = threads
        self._meter = meter
        self._waiting = set(neighbours)
        self._keys: dict[int, AdvertiseKeys] = {}  # U1
        self._seen: set[bytes] = set()  # every public key of the round
        self._shared: dict[int, ShareKeys] = {}  # U2
        self._inputs: dict[int, bytes] = {}  # U3
        self._signatures: dict[int, bytes] = {}  # U4
        self._answers: dict[int, Unmask] = {}  # U5
        self._opening = Opening(rules.threshold)
        self._total: NDArray[np.uint64] | None = None

    # ---- what the round asks of it ----

    @property
    def phase_name(self) -> str:
        """The phase of the ledger that it waits in, or how the round ended."""
        return EXPECTED[self.state].PHASE if self.state in EXPECTED else self.state.name

    @property
    def done(self) -> bool:
        return self.state not in EXPECTED

    @property
    def failed(self) -> bool:
        return self.state is State.FAILED

    def waiting(self) -> tuple[int, ...]:
        return tuple(sorted(self._waiting))

    def receive(self, message: Message) -> Answers:
        self._check_expected(message)
        match message:
            case AdvertiseKeys():
                self._take_keys(message)
            case ShareKeys():
                self._take_shares(message)
            case MaskedInput():
                self._take_input(message)
            case ConsistencyCheck():
                self._take_signature(message)
            case Unmask():
                self._take_answers(message)
        self._waiting.remove(message.party)
        return self._advance()

    def drop(self, party: int, fault: Fault | None = None) -> Answers:
        """The party is gone, or was caught: the round goes on without it if it can."""
        if fault:
            self.faults.append(fault)
        if self.done:
            return []
        if self.state is State.INPUTS:
            self._inputs.pop(party, None)  # two different inputs: neither counts
        self._waiting.discard(party)
        return self._advance()

    def expire(self) -> Answers:
        """The phase's deadline has passed: whoever has not answered is gone."""
        self._waiting.clear()
        return self._advance()

    def result(self) -> tuple[NDArray[np.uint64], tuple[int, ...]]:
        """(the sum in Z_{2^b}, the parties that are in it)"""
        if self._total is None:
            raise ProtocolError(self.reason or "the sum is not there yet", phase=self.phase_name)
        return self._total, tuple(sorted(self._inputs))

    # ---- checks; each raises before it changes anything ----

    def _check_expected(self, message: Message) -> None:
        in_turn = type(message) is EXPECTED.get(self.state)
        if in_turn and not self.rules.covers(message):
            name, own = (round_name(of.round, of.purpose) for of in (message, self.rules))
            raise self._wrong(message, f"sent a message of {name} in {own}")
        if in_turn and message.party in self._waiting:
            return
        if isinstance(message, MaskedInput) and self._inputs.get(message.party, message.values) != message.values:
            raise self._wrong(message, "sent a second, different input")
        late = "sent a message that nobody waits for"
        raise self._wrong(message, late if in_turn else f"sent {type(message).__name__}, expected {self.phase_name}")

    def _take_keys(self, message: AdvertiseKeys) -> None:
        if bool(message.signature) != self.rules.active:
            raise self._wrong(message, "sent keys without a signature" if self.rules.active else "sent a signature")
        if message.cipher_key == message.mask_key:
            raise self._wrong(message, "sent the same key twice")
        try:
            PROBE.shared(message.cipher_key), PROBE.shared(message.mask_key)
        except CryptoError:
            raise self._wrong(message, "sent a key of low order") from None
        if self.rules.active:
            text = self.rules.keys_text(message.party, message.cipher_key, message.mask_key)
            known = self._identities.get(message.party)
            if known is None or not verify(known, text, message.signature):
                raise self._wrong(message, "sent keys that its identity did not sign")
        keys = {message.cipher_key, message.mask_key}
        if keys & self._seen:
            raise self._wrong(message, "sent a key of another party")
        self._seen |= keys
        self._keys[message.party] = message

    def _take_shares(self, message: ShareKeys) -> None:
        receivers = [bundle.party for bundle in message.bundles]
        expected = self._alive_neighbours(message.party, self._keys)
        if receivers != expected:
            strangers = set(receivers) - set(expected)
            if strangers:
                raise self._wrong(message, f"sent a share for party {min(strangers)}, which is none of its peers")
            raise self._wrong(message, f"sent {len(receivers)} shares, expected {len(expected)}")
        self._shared[message.party] = message

    def _take_input(self, message: MaskedInput) -> None:
        size = packed_size(self.rules.dimension, self.rules.bits)
        if len(message.values) != size:
            raise self._wrong(message, f"sent {len(message.values)} bytes, expected {size}")
        unused = 8 * size - self.rules.dimension * self.rules.bits
        if unused and message.values[-1] >> (8 - unused):
            raise self._wrong(message, "sent an input with bits set beyond its end")
        self._inputs[message.party] = message.values

    def _take_signature(self, message: ConsistencyCheck) -> None:
        text = self.rules.survivors_text(tuple(sorted(self._inputs)))
        if not verify(self._identities[message.party], text, message.signature):
            raise self._wrong(message, "sent a signature that does not fit the survivors")
        self._signatures[message.party] = message.signature

    def _take_answers(self, message: Unmask) -> None:
        owners = [answer.owner for answer in message.answers]
        expected = sorted([*self._alive_neighbours(message.party, self._shared), message.party])
        if owners != expected:
            raise self._wrong(message, f"answered for {len(owners)} peers, expected {len(expected)}")
        for answer in message.answers:
            wanted = SelfMaskShare if answer.owner in self._inputs else PairKeyShare
            if not isinstance(answer, (wanted, Unopened)):
                raise self._wrong(message, f"opened the wrong secret of party {answer.owner}")
            if not isinstance(answer, Unopened) and not is_share(answer.share):
                raise self._wrong(message, f"sent a share of party {answer.owner} that is no share")
        self._answers[message.party] = message

    # ---- from phase to phase ----

    def _advance(self) -> Answers:
        if self._waiting or self.done:
            return []
        leave = {
            State.KEYS: self._send_keys,
            State.SHARES: self._send_shares,
            State.INPUTS: self._ask_survivors,
            State.SIGNATURES: self._ask_shares,
            State.ANSWERS: self._finish,
        }
        return leave[self.state]()

    def _enter(self, answers: Answers) -> Answers:
        self.state = self._moves[self.state]
        self._waiting = {party for party, _ in answers}
        return answers

    def _fail(self, reason: str) -> Answers:
        self.reason = f"round {self.rules.round}, {self.phase_name}: {reason}"
        self.state = State.FAILED
        self._waiting = set()
        self._inputs, self._answers = {}, {}
        return []

    def _alive_neighbours(self, party: int, alive: Container[int]) -> list[int]:
        return [other for other in self._neighbours[party] if other in alive]

    def _prune(self, alive: dict[int, Any]) -> None:
        """Parties with too few peers left cannot be opened later: they are out before they send anything. Their leaving can
        cost others theirs, so until nothing changes."""
        while True:
            lonely = [p for p in alive if len(self._alive_neighbours(p, alive)) + 1 < self.rules.threshold]
            if not lonely:
                return
            for party in lonely:
                del alive[party]

    def _send_keys(self) -> Answers:
        came = len(self._keys)
        self._prune(self._keys)
        if not self._keys:
            return self._fail(
                f"{came} of {self.rules.cohort} parties sent keys, the threshold is {self.rules.threshold}"
            )
        peers = {p: PeerKeys(p, k.cipher_key, k.mask_key, k.signature) for p, k in self._keys.items()}
        lists = {p: tuple([peers[o] for o in self._alive_neighbours(p, self._keys)]) for p in sorted(self._keys)}
        return self._enter([(p, self.rules.message(KeyList, p, shown)) for p, shown in lists.items()])

    def _send_shares(self) -> Answers:
        came = len(self._shared)
        self._prune(self._shared)
        if not self._shared:
            return self._fail(f"{came} parties shared their keys, the threshold is {self.rules.threshold}")
        inboxes: dict[int, list[Bundle]] = {party: [] for party in self._shared}
        for sender in sorted(self._shared):
            for bundle in self._shared[sender].bundles:
                if bundle.party in inboxes:
                    inboxes[bundle.party].append(Bundle(sender, bundle.sealed))
        return self._enter(
            [(p, self.rules.message(ShareList, p, tuple(bundles))) for p, bundles in sorted(inboxes.items())]
        )

    def _holders(self, owner: int, alive: Container[int]) -> list[int]:
        return sorted([*self._alive_neighbours(owner, alive), *([owner] if owner in alive else [])])

    def _needed(self) -> list[int]:
        """Parties whose secret must be opened: survivors, and the dropped who masked towards a survivor."""
        return [p for p in self._shared if p in self._inputs or self._alive_neighbours(p, self._inputs)]

    def _ask_survivors(self) -> Answers:
        lost = self.rules.cohort - len(self._inputs)
        if lost > self.rules.tolerated:
            return self._fail(
                f"{lost} of {self.rules.cohort} parties are lost, with more than {self.rules.tolerated} the sum is not opened "
                "(expected_dropout, rater_margin)"
            )
        for owner in self._needed():
            left = len(self._holders(owner, self._inputs))
            if left < self.rules.threshold:
                return self._fail(
                    f"{len(self._inputs)} of {self.rules.cohort} parties sent their input; {left} hold shares of party "
                    f"{owner}, the threshold is {self.rules.threshold}"
                )
        if not self._inputs:
            return self._fail(f"no party sent its input, the threshold is {self.rules.threshold}")
        if not self.rules.active:
            return self._ask_shares()
        survivors = tuple(sorted(self._inputs))
        return self._enter([(p, self.rules.message(SurvivorList, p, survivors)) for p in survivors])

    def _ask_shares(self) -> Answers:
        survivors = tuple(sorted(self._inputs))
        if self.rules.active:
            if len(self._signatures) < self.rules.threshold:
                return self._fail(
                    f"{len(self._signatures)} parties signed the survivors, the threshold is {self.rules.threshold}"
                )
            proof = tuple(Signed(p, signature) for p, signature in sorted(self._signatures.items()))
            shown = {p: (survivors, proof) for p in sorted(self._signatures)}
        else:
            shown = {p: (tuple(self._holders(p, self._inputs)), ()) for p in survivors}
        self.openable = survivors
        return self._enter([(p, self.rules.message(UnmaskRequest, p, *lists)) for p, lists in shown.items()])

    # ---- taking the masks off ----

    def _finish(self) -> Answers:
        try:
            with self._meter(Phase.UNMASK, Cost.SHAMIR_COMBINE):
                opened = {holder: {a.owner: a for a in message.answers} for holder, message in self._answers.items()}
                secrets = {owner: self._open(owner, opened) for owner in self._needed()}
        except CryptoError as error:
            return self._fail(str(error))
        keys, signs = [], []
        with self._meter(Phase.UNMASK, Cost.DH):
            for owner, secret in secrets.items():
                if owner in self._inputs:
                    keys.append(derive(secret, SELF_MASK, self.rules.context(owner), MASK_KEY_BYTES))
                    signs.append(-1)
                else:
                    dropped = Agreement(secret)
                    contexts = self.rules.pair_contexts(owner, self._alive_neighbours(owner, self._inputs))
                    for other, pair in contexts.items():
                        keys.append(mask_key(dropped, self._keys[other].mask_key, owner < other, pair))
                        # MMF (9) with its sign: the survivor `other` added it if it is the lower one, so it comes off.
                        signs.append(-1 if other < owner else 1)
        with self._meter(Phase.UNMASK, Cost.AGGREGATE):
            total = self._sum_inputs()
        with self._meter(Phase.UNMASK, Cost.PRG):
            add_masks(total, keys, signs, threads=self._threads)
        self._total = total.astype(np.uint64) & np.uint64((1 << self.rules.bits) - 1)
        return self._enter([])

    def _sum_inputs(self) -> NDArray[np.unsignedinteger[Any]]:
        total = PackedSum(self.rules.dimension, self.rules.bits)
        for packed in self._inputs.values():
            total.add(packed)
        return total.total().astype(self.rules.lane)

    def _open(self, owner: int, opened: dict[int, dict[int, Answer]]) -> bytes:
        """b_u of a survivor or s_u^SK of a dropped party, checked against what it committed to."""
        places = share_points(owner, self._alive_neighbours(owner, self._keys))
        shares = {}
        for holder in self._holders(owner, self._answers):
            answer = opened[holder][owner]
            if isinstance(answer, Unopened):
                self.faults.append(Fault(holder, Phase.UNMASK, f"could not open the bundle of party {owner}"))
            else:
                shares[holder] = places[holder], decode_share(answer.share)
        secret, liars = self._opening.open(owner, shares, lambda secret: self._committed(owner, secret))
        what = f"sent a wrong share of party {owner}"
        self.faults += [Fault(holder, Phase.UNMASK, what) for holder in liars]
        return secret

    def _committed(self, owner: int, secret: bytes) -> bool:
        if owner in self._inputs:
            return opens(self._shared[owner].commitment, secret, self.rules.context(owner))
        return public_key(secret) == self._keys[owner].mask_key

    def _wrong(self, message: Message, what: str) -> ProtocolError:
        return ProtocolError(what, party=message.party, phase=message.PHASE)
