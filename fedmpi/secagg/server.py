"""The server's side of one instance of secure aggregation.

It routes keys and bundles that it cannot read, adds masked inputs, and with the survivors' shares takes the masks off:
the sum of the survivors' inputs is all that is left. A phase ends when everybody who is still in it has answered, or was
dropped; `drop` and `expire` are how a silent or a lying party leaves. A refused message changes nothing.
"""

import enum
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.crypto.keys import Agreement, verify
from fedmpi.crypto.shamir import SEEDS, is_share
from fedmpi.errors import CryptoError, Fault, ProtocolError
from fedmpi.secagg.disputes import Group, alone, who_leaves
from fedmpi.secagg.material import BatchMaterial, Material, RoundMaterial
from fedmpi.secagg.messages import (
    AdvertiseKeys,
    Bundle,
    ConsistencyCheck,
    KeyList,
    MaskedInput,
    PairMask,
    PeerKeys,
    SelfMaskShare,
    ShareBatch,
    ShareKeys,
    ShareList,
    Signed,
    SurvivorList,
    Unmask,
    UnmaskRequest,
    Withdrawal,
)
from fedmpi.secagg.rules import Meter, Rules, no_meter, round_name
from fedmpi.secagg.transcript import Transcript, digest_of_keys
from fedmpi.secagg.unmasking import Unmasking
from fedmpi.wire.bits import packed_size
from fedmpi.wire.message import Message
from fedmpi.wire.phases import Phase

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


EXPECTED: dict[State, tuple[type[Message], ...]] = {
    State.KEYS: (AdvertiseKeys,),
    State.SHARES: (ShareKeys, ShareBatch),
    State.INPUTS: (MaskedInput, Withdrawal),
    State.SIGNATURES: (ConsistencyCheck,),
    State.ANSWERS: (Unmask,),
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
        group: Group = alone,
        threads: int = 1,
        meter: Meter = no_meter,
        batch: BatchMaterial | None = None,
    ):
        """`neighbours` of every party of the cohort, symmetric, each as many as the rules' degree. `group`: which parties speak
        through one rank, and may well lie together. `batch`: keys that were made in an earlier round; it begins with the inputs."""
        self.rules = rules
        self.state = State.KEYS if batch is None else State.INPUTS
        self.batch = batch  # once keys of several rounds are made
        self.reason = ""  # why the round failed
        self.faults: list[Fault] = []  # who was caught at what
        # (holder, dealer): what the one has of the other cannot be, and one of them lies
        self.disputes: set[tuple[int, int]] = set()
        self.openable: tuple[int, ...] = ()  # whose sum was asked for: enough answers open it, in time or late
        self._moves = NEXT_ACTIVE if rules.active else NEXT
        self._neighbours = {party: tuple(sorted(others)) for party, others in neighbours.items()}
        self._identities, self._group = identities or {}, group
        self._threads = threads
        self._meter = meter
        self._waiting = set(neighbours if batch is None else batch.dealt)
        self._keys: dict[int, AdvertiseKeys] = {}  # U1
        self._seen: set[bytes] = set()  # every public key of the round
        self._shared: dict[int, ShareKeys | ShareBatch] = {}  # U2
        self._inputs: dict[int, MaskedInput] = {}  # U3
        self._signatures: dict[int, bytes] = {}  # U4
        self._answers: dict[int, Unmask] = {}  # U5
        self._material: Material | None = None if batch is None else batch.of_round(rules)  # once the keys are made
        self._unmasking: Unmasking | None = None  # once it is settled whose inputs are in the sum
        self._total: NDArray[np.uint64] | None = None

    # ---- what the round asks of it ----

    @property
    def phase_name(self) -> str:
        """The phase of the ledger that it waits in, or how the round ended."""
        return EXPECTED[self.state][0].PHASE if self.state in EXPECTED else self.state.name

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
            case ShareKeys() | ShareBatch():
                self._take_shares(message)
            case MaskedInput():
                self._take_input(message)
            case Withdrawal():
                self._take_withdrawal(message)
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
        in_turn = type(message) in EXPECTED.get(self.state, ())
        if in_turn and not self.rules.covers(message):
            name, own = (round_name(of.round, of.purpose) for of in (message, self.rules))
            raise self._wrong(message, f"sent a message of {name} in {own}")
        if in_turn and message.party in self._waiting:
            return
        if isinstance(message, MaskedInput) and self._inputs.get(message.party, message) != message:
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

    def _take_shares(self, message: ShareKeys | ShareBatch) -> None:
        rounds = len(message.commitments) if isinstance(message, ShareBatch) else 0
        if rounds != self.rules.rounds:
            raise self._wrong(message, f"shared keys of {rounds or 1} rounds, expected {self.rules.rounds or 1}")
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
        self._take_unopened(message, message.unopened)
        self._inputs[message.party] = message

    def _take_unopened(self, message: Message, unopened: tuple[int, ...]) -> None:
        """Whose bundles a party says that it could not open."""
        sent = self._alive_neighbours(message.party, self._made.dealt)
        if list(unopened) != sorted(set(unopened)) or not set(unopened) <= set(sent):
            raise self._wrong(message, "complained of bundles that it was not sent, or out of order")
        self.disputes |= {(message.party, dealer) for dealer in unopened}

    def _take_withdrawal(self, message: Withdrawal) -> None:
        left = len(self._alive_neighbours(message.party, self._made.dealt)) - len(message.unopened)
        if left + 1 >= self.rules.threshold:
            raise self._wrong(
                message, f"withdrew with {left} bundles that opened, {self.rules.threshold - 1} are enough"
            )
        self._take_unopened(message, message.unopened)

    def _take_signature(self, message: ConsistencyCheck) -> None:
        text = self._made.transcript.survivors_text(tuple(sorted(self._inputs)))
        if not verify(self._identities[message.party], text, message.signature):
            raise self._wrong(message, "sent a signature that does not fit the survivors")
        self._signatures[message.party] = message.signature

    def _take_answers(self, message: Unmask) -> None:
        owners = [answer.owner for answer in message.answers]
        expected = sorted([*self._settled.masked_with(message.party), message.party])
        if owners != expected:
            raise self._wrong(message, f"answered for {len(owners)} peers, expected {len(expected)}")
        for answer in message.answers:
            dropped = PairMask if answer.owner in self._settled.direct else self._made.of_dropped
            wanted = SelfMaskShare if answer.owner in self._inputs else dropped
            if not isinstance(answer, wanted):
                raise self._wrong(message, f"opened the wrong secret of party {answer.owner}")
            field = SEEDS if isinstance(answer, SelfMaskShare) else self._made.key_field
            if not isinstance(answer, PairMask) and not is_share(answer.share, field):
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
        digest = digest_of_keys(self._keys)
        peers = {p: PeerKeys(p, k.cipher_key, k.mask_key, k.signature) for p, k in self._keys.items()}
        lists = {p: tuple([peers[o] for o in self._alive_neighbours(p, self._keys)]) for p in sorted(self._keys)}
        told = b"" if self.rules.complete else digest
        return self._enter([(p, self.rules.message(KeyList, p, shown, told)) for p, shown in lists.items()])

    def _send_shares(self) -> Answers:
        came = len(self._shared)
        self._prune(self._shared)
        if not self._shared:
            return self._fail(f"{came} parties shared their keys, the threshold is {self.rules.threshold}")
        self._keep_material()
        inboxes: dict[int, list[Bundle]] = {party: [] for party in self._shared}
        for sender in sorted(self._shared):
            for bundle in self._shared[sender].bundles:
                if bundle.party in inboxes:
                    inboxes[bundle.party].append(Bundle(sender, bundle.sealed))
        return self._enter(
            [(p, self.rules.message(ShareList, p, tuple(bundles))) for p, bundles in sorted(inboxes.items())]
        )

    def _keep_material(self) -> None:
        """What is needed of keys and shares from here on; bundles are not."""
        transcript = Transcript.of(self.rules, digest_of_keys(self._keys))
        if self.rules.batch is None:
            once = {p: ((m.commitment,), ()) for p, m in self._shared.items() if isinstance(m, ShareKeys)}
            self._material = RoundMaterial(transcript, self._neighbours, self._keys, once)
        else:
            all_ = {p: (m.commitments, m.lists) for p, m in self._shared.items() if isinstance(m, ShareBatch)}
            self.batch = BatchMaterial(*self.rules.batch, transcript, self._neighbours, self._keys, all_)
            self._material = self.batch.of_round(self.rules)

    @property
    def _made(self) -> Material:
        assert self._material is not None, "after the keys"
        return self._material

    @property
    def _settled(self) -> Unmasking:
        assert self._unmasking is not None, "after the inputs"
        return self._unmasking

    def _settle_disputes(self) -> None:
        """One of the two leaves: masks of a pair that did not open each other's bundles would not cancel."""
        # Shares have not been seen yet, so these are about bundles. Who withdrew, or is gone, is in nobody's way.
        both = {pair for pair in self.disputes if set(pair) <= self._inputs.keys()}
        for party, others in who_leaves(both, self._group, self.rules.round):
            dealt = sum((other, party) in self.disputes for other in others)
            if dealt:
                phase, what = Phase.SHARE_KEYS, f"dealt bundles that {dealt} of its peers could not open"
            else:
                phase, what = Phase.MASKED_INPUT, f"said of {len(others)} bundles that they do not open"
            self.faults.append(Fault(party, phase, what, certain=False))
            self._inputs.pop(party, None)

    def _ask_survivors(self) -> Answers:
        self._settle_disputes()
        lost = self.rules.cohort - len(self._inputs)
        if lost > self.rules.tolerated:
            return self._fail(
                f"{lost} of {self.rules.cohort} parties are lost, with more than {self.rules.tolerated} the sum is not opened "
                "(expected_dropout, rater_margin)"
            )
        if not self._inputs:
            return self._fail(f"no party sent its input, the threshold is {self.rules.threshold}")
        self._unmasking = Unmasking(self.rules, self._made, self._inputs, self._group)
        owner = self._settled.lost
        if owner is not None:
            return self._fail(
                f"{len(self._inputs)} of {self.rules.cohort} parties sent their input; "
                f"{len(self._settled.holders(owner, self._inputs))} hold shares of party {owner}, "
                f"the threshold is {self.rules.threshold}"
            )
        if not self.rules.active:
            return self._ask_shares()
        survivors = tuple(sorted(self._inputs))
        return self._enter([(p, self.rules.message(SurvivorList, p, survivors)) for p in survivors])

    def _ask_shares(self) -> Answers:
        survivors = tuple(sorted(self._inputs))
        shown: dict[int, tuple[tuple[int, ...], tuple[Signed, ...]]]
        if self.rules.active:
            if len(self._signatures) < self.rules.threshold:
                return self._fail(
                    f"{len(self._signatures)} parties signed the survivors, the threshold is {self.rules.threshold}"
                )
            proof = tuple(Signed(p, signature) for p, signature in sorted(self._signatures.items()))
            shown = {p: (survivors, proof) for p in sorted(self._signatures)}
        else:
            shown = {p: (tuple(self._settled.holders(p, self._inputs)), ()) for p in survivors}
        self.openable = survivors
        ask, direct = self.rules.message, self._settled.direct_for
        return self._enter([(p, ask(UnmaskRequest, p, *lists, direct(p))) for p, lists in shown.items()])

    def _finish(self) -> Answers:
        opening = self._settled
        try:
            self._total = opening.sum(self._answers, self._threads, self._meter)
        except CryptoError as error:
            return self._fail(str(error))
        finally:
            self.faults += opening.faults
            self.disputes |= opening.disputes
        return self._enter([])

    def _wrong(self, message: Message, what: str) -> ProtocolError:
        return ProtocolError(what, party=message.party, phase=message.PHASE)
