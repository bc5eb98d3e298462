"""The server of `benchmarks.lying_server` where keys are made for a batch of rounds (`--keys batch:2` to `batch:4`).

A transcript is one or two batches. Parties are `PartyEnd` and `SecAggParty` as they are, a rank each, and refuse a round that is not newer than their
last one, as `Client` does. The server lies when keys are made and in every round: another model for some, other
survivors, keys that it says are of another round or has made once more, bundles, lists of survivors and signatures of another round or batch,
requests for rounds that are over (to whom a party still has the state of one it answers: more than `Client` would let through).

What it can know is not read off the parties' records but computed, as a server would: with t shares of one polynomial it has the seed, which
it tries as b_u^r in every round and as a_u^r on every list of its dealer. A list that opens gives the pair keys in it, and these the masks
in every round and under every model.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from benchmarks.lying_server import BITS, DIMENSION, MODELS, Liar, Observation, run
from fedmpi.aggregation import party_end
from fedmpi.aggregation.party_end import PartyEnd
from fedmpi.aggregation.protocol import ProtocolRules, Session
from fedmpi.aggregation.secure import SecureParty
from fedmpi.config import Config
from fedmpi.crypto.keys import SELF_MASK, derive
from fedmpi.crypto.masks import MASK_KEY_BYTES
from fedmpi.crypto.shamir import SEEDS, encode_share, int_to_secret
from fedmpi.errors import CryptoError, ProtocolError, WireError
from fedmpi.privacy.encoding import Encoding
from fedmpi.runtime.schedule import check_keys
from fedmpi.secagg import batch as keys_of_batches
from fedmpi.secagg import messages as m
from fedmpi.secagg import party as states
from fedmpi.secagg.batch import cut, list_channel, round_mask
from fedmpi.secagg.party import Identity, SecAggParty
from fedmpi.secagg.rules import share_points
from fedmpi.secagg.transcript import Transcript
from fedmpi.wire.bits import unpack

ENCODING = Encoding(1.0, 4, BITS, DIMENSION)


@lru_cache(maxsize=256)
def settings(parties: int, threshold: int, colluding: int, size: int) -> tuple[Config, ProtocolRules]:
    base = Config()
    config = replace(
        base,
        run=replace(base.run, parties=parties, rounds=2 * size),
        aggregation=replace(
            base.aggregation,
            aggregation="secure",
            graph="complete",
            adversary="active",
            threshold=threshold,
            colluding=colluding,
            keys=f"batch:{size}",
        ),
    )
    return config, ProtocolRules(config, b"one session")


# ---- what is seen of the parties, and by whom ----


@dataclass
class Tap:
    """What the parties' own code was seen to do: secrets that it dealt, keys of masks that it put on."""

    draws: random.Random = field(default_factory=random.Random)
    dealt: list[tuple[bytes, dict[bytes, int]]] = field(
        default_factory=list
    )  # of the last dealer: (secret, share -> point) for each
    masks: dict[bytes, int] = field(default_factory=dict)  # of the last input: key -> sign


TAP = Tap()


@contextmanager
def tapped() -> Iterator[None]:
    split, put_on, made = keys_of_batches.create_shares, states.add_masks, party_end.SecAggParty

    def seen_split(secrets, threshold, xs, random_bytes, fields):
        shares = split(secrets, threshold, xs, random_bytes, fields)
        TAP.dealt = [
            (int_to_secret(secret, SEEDS), {encode_share(share, SEEDS): x for share, x in zip(row, xs)})
            for secret, row in zip(secrets, shares)
        ]
        return shares

    def seen_put_on(total, keys, signs, **more):
        TAP.masks = dict(zip(keys, signs, strict=True))
        put_on(total, keys, signs, **more)

    keys_of_batches.create_shares, states.add_masks = seen_split, seen_put_on
    party_end.SecAggParty = partial(SecAggParty, random_bytes=lambda size: TAP.draws.randbytes(size))
    try:
        yield
    finally:
        keys_of_batches.create_shares, states.add_masks, party_end.SecAggParty = split, put_on, made


@dataclass
class Dealing:
    """What a party dealt for a batch, and what the server has of it."""

    party: int
    transcript: Transcript
    first: int
    peers: list[int]
    lists: tuple[bytes, ...]
    secrets: list[bytes]  # a polynomial each
    held: list[set[int]]  # of each, the points at which the server has its value
    common: list[tuple[int, bytes]]  # (peer, pair key) of peers that are the server's own

    def known(self, threshold: int, places: list[Transcript]) -> set[bytes]:
        """The keys of masks that the server can work out from this dealing's shares."""
        keys = {round_mask(key, place, self.party, peer) for peer, key in self.common for place in places}
        for secret, held in zip(self.secrets, self.held):
            if len(held) < threshold:
                continue
            keys |= {derive(secret, SELF_MASK, place.context(self.party), MASK_KEY_BYTES) for place in places}
            for at, sealed in enumerate(self.lists):
                try:
                    text = list_channel(secret, self.transcript, self.party, self.first + at, False).open(sealed)
                except CryptoError:
                    continue
                for row, peer in enumerate(self.peers):
                    key = cut(text, MASK_KEY_BYTES, row)
                    keys |= {round_mask(key, place, self.party, peer) for place in places}
        return keys


class Learnt:
    """What the server received, in place of `Knowledge`."""

    def __init__(self) -> None:
        self.inputs: list[Observation] = []
        self.told: set[bytes] = set()  # keys of masks
        self.dealings: list[Dealing] = []
        self.places: dict[bytes, dict[bytes, Transcript]] = {}  # of rounds, by the batch's transcript
        self._of: dict[
            bytes, tuple[set[int], int]
        ] = {}  # share -> (points of its polynomial that the server has, its own)

    def dealt(self, dealing: Dealing, shares: list[dict[bytes, int]]) -> None:
        self.dealings.append(dealing)
        for held, row in zip(dealing.held, shares):
            self._of |= {share: (held, point) for share, point in row.items()}

    def given(self, share: bytes) -> None:
        if share in self._of:
            held, point = self._of[share]
            held.add(point)

    def known(self, threshold: int) -> set[bytes]:
        keys = set(self.told)
        for dealing in self.dealings:
            keys |= dealing.known(threshold, list(self.places.get(dealing.transcript.digest, {}).values()))
        return keys


# ---- the server ----


class BatchLiar(Liar):
    SHARES = m.ShareBatch

    def __init__(self, rng: random.Random):
        super().__init__(rng)
        TAP.draws = rng
        self.knowledge = Learnt()
        self.last = dict.fromkeys(range(self.n), 0)  # the newest round that each was asked for
        self.models: dict[tuple[int, int], bytes] = {}
        self.played: dict[int, SecAggParty] = {}  # by the server itself
        self.honesty = rng.choice((0.8, 0.95, 0.99, 0.998))
        self.silent = 0
        self.hire(rng.choice((2, 3, 4)))

    def hire(self, size: int) -> None:
        """Parties, for batches of so many rounds."""
        self.size = size
        self.config, self.protocol = settings(self.n, self.threshold, len(self.colluders), size)
        self.ends = {
            p: PartyEnd(self.config, self.protocol, DIMENSION, (), {p: self.identities[p]}) for p in range(self.n)
        }

    # ---- the parties ----

    def ask(self, round: int, party: int, keys: int, model: bytes = MODELS[0], again: bool = False) -> None:
        """Train. `again`: nobody counts rounds, and what is left of a batch has to know by itself."""
        values = np.array([self.rng.randrange(1 << BITS) for _ in range(DIMENSION)], np.uint64)
        try:
            check_keys(self.config, round, keys, self.n)
            if round <= self.last[party] and not again:
                raise ProtocolError("was asked for a round that is over", party=party)
            self.last[party] = max(round, self.last[party])
            session = Session(round, about=model, keys=keys)
            spoken = self.ends[party].update(session, party, self.n, ENCODING, values)
            if not isinstance(spoken, SecureParty):
                self.silent += 1
                return
            message = spoken._machine.start()
        except (ProtocolError, CryptoError) as error:
            return self.refuses(error)
        self.machines[round, party], self.values[round, party] = spoken._machine, values
        self.models[round, party] = model
        self.pool.append(message)
        if isinstance(message, m.AdvertiseKeys):
            self.owner_of[message.mask_key] = round, party
        self.note(round, party, None, spoken._machine.state, message)

    def refuses(self, error: Exception) -> None:
        what = error.fault.what if isinstance(error, ProtocolError) else str(error)
        self.refused[what.split(",")[0]] += 1

    def show(self, round: int, party: int, message) -> None:
        try:
            if party in self.played:
                self.pool.append(self.played[party].receive(message))
            elif (round, party) in self.machines:
                super().show(round, party, message)
        except (ProtocolError, WireError) as error:  # of a puppet; and bundles of two batches are not of one size
            self.refuses(error)

    def note(self, round: int, party: int, before, after, answer) -> None:
        known = self.knowledge
        if isinstance(answer, m.ShareBatch):
            self.note_dealt(party, after.dealing, answer.lists)
        elif isinstance(answer, m.MaskedInput):
            batch, place = self.machines[round, party].ring._transcript.digest, after.transcript
            known.places.setdefault(batch, {})[place.digest] = place
            self.places.setdefault(round, {})[place.digest] = place
            if party in self.honest:
                masked, label = unpack(answer.values, DIMENSION, BITS), (round, self.models[round, party], batch)
                true = self.values[round, party]
                known.inputs.append(Observation(round, party, repr(label).encode(), masked, true, TAP.masks))
        elif isinstance(answer, m.Unmask):
            for given in answer.answers:
                if isinstance(given, m.PairMask):
                    known.told.add(given.share)
                else:
                    known.given(given.share)

    def note_dealt(self, party: int, dealing, lists: tuple[bytes, ...]) -> None:
        """Who is the server's own among the holders hands over all shares, and the keys that they have in common."""
        own = [peer for peer, keys in dealing.peers.items() if self.is_its_own(peer, keys.mask_key)]
        points = share_points(party, dealing.peers)
        held = [{points[peer] for peer in own} for _ in TAP.dealt]
        secrets, shares = map(list, zip(*TAP.dealt))
        common = [(peer, cut(dealing.pairs[peer], MASK_KEY_BYTES, at)) for peer in own for at in range(len(lists))]
        met = sorted(dealing.peers)
        made = Dealing(party, dealing.transcript, dealing.first, met, lists, secrets, held, common)
        self.knowledge.dealt(made, shares)

    # ---- at random ----

    def play(self) -> None:
        self.rng.choice((self.at_random, self.at_random, *(partial(plan, self) for plan in PLANS)))()

    def at_random(self) -> None:
        first = 0
        for round in range(1, self.rng.randint(2, min(5, 2 * self.size)) + 1):
            if not first or round == self.size + 1 or self.lies():
                first = round
            self.ask_all(round, first)
            for step in range(4) if first == round or self.lies() else (2, 3):
                if self.rng.random() < 0.98:  # or a round is left where it is
                    self.step(step, round)
            if self.lies():
                self.step(self.rng.choice((2, 3)), self.rng.randint(1, round))  # one that may be over

    def ask_all(self, round: int, keys: int) -> None:
        """Some are told of other keys, or another model, or nothing."""
        wrong = self.lies()
        for p in self.some(list(range(self.n))):
            if p in self.honest and self.rng.random() > (self.honesty + 1) / 2:
                continue
            told = self.rng.choice((round, self.rng.randint(0, round))) if self.lies() else keys
            self.ask(round, p, told, self.rng.choice(MODELS) if wrong else MODELS[0])

    def step(self, step: int, round: int) -> None:
        order = list(range(self.n))
        self.rng.shuffle(order)
        asked = self.survivors(round)
        self.colluders_sign(round, asked)
        for p in self.some(order):
            if (round, p) in self.dead or (p in self.honest and self.rng.random() > (self.honesty + 1) / 2):
                continue
            if self.lies():
                asked = self.survivors(round)
                self.colluders_sign(round, asked)
            earlier = self.shown.get((self.rng.randint(1, round), p))
            if earlier and self.lies():
                self.show(round, p, replace(self.rng.choice(earlier), round=round))
            else:
                signed = getattr(self.machines.get((round, p)), "state", None)
                if step == 3 and isinstance(signed, states.Signed) and not self.lies():
                    asked = signed.survivors
                self.show(round, p, self.made(step, round, p, asked))

    # ---- with a plan ----

    def everyone(self) -> list[int]:
        return list(range(self.n))

    def whole(self, round: int, keys: int, told=None, models=None, proof=None, again: bool = False) -> None:
        """A round in good order, but for the survivors as each party is told of them, the model that it is shown, and whose signatures
        (by round) are shown as proof."""
        for p in self.everyone():
            self.ask(round, p, keys, (models or {}).get(p, MODELS[0]), again)
        if round == keys:
            self.make_keys(round, self.of(m.AdvertiseKeys, round))
        self.settle(round, told, proof)

    def make_keys(self, round: int, advertised: list, dealt_before: tuple = ()) -> None:
        for p in self.everyone():
            rows = [m.PeerKeys(k.party, k.cipher_key, k.mask_key, k.signature) for k in advertised if k.party != p]
            self.show(round, p, m.KeyList(round, p, tuple(sorted(rows, key=lambda row: row.party))))
        bundles = {x.party: x for x in (*dealt_before, *self.dealt(round))}
        for p in self.everyone():
            mine = ((q, b.sealed) for q, x in sorted(bundles.items()) for b in x.bundles if b.party == p)
            self.show(round, p, m.ShareList(round, p, tuple(m.Bundle(q, sealed) for q, sealed in mine)))

    def settle(self, round: int, told=None, proof=None) -> None:
        arrived = tuple(sorted({x.party for x in self.of(m.MaskedInput, round)}))
        lists = {p: told(p) if told else arrived for p in self.everyone()}
        for p, shown in lists.items():
            self.show(round, p, m.SurvivorList(round, p, shown))
        for shown in set(lists.values()):
            self.colluders_sign(round, shown)
        signed = [
            x for x in self.of(m.ConsistencyCheck) if proof is None and x.round == round or proof and x.round in proof
        ]
        signatures = tuple(m.Signed(x.party, x.signature) for x in signed)
        for p, shown in lists.items():
            direct = tuple(q for q in self.everyone() if q not in shown) if self.rng.random() < 0.1 else ()
            self.show(round, p, m.UnmaskRequest(round, p, shown, signatures, direct))

    def but_for(self, most: int) -> list[int]:
        """Everybody but for some honest ones."""
        gone = self.rng.sample(self.honest, min(most, len(self.honest), self.n - self.threshold))
        return [p for p in self.everyone() if p not in gone]

    def come_and_go(self) -> None:
        """In every round others are said to have dropped out; and everybody is back in the next."""
        for round in range(1, self.size + 1):
            shown = tuple(self.but_for(self.rng.randint(0, 3)))
            self.whole(round, 1, lambda p, shown=shown: shown)

    def lists_of_their_own(self) -> None:
        """`many_lists`, in a later round."""
        self.whole(1, 1)
        few = self.rng.sample(self.honest, self.rng.randint(1, min(self.threshold, len(self.honest))))
        self.whole(2, 1, lambda p: self.few_and(p, few, []))

    def old_signatures(self) -> None:
        """Three lists are signed in three rounds, few parties are in all of them. In the fourth a third of all is shown each of them, with
        the signatures of then: everybody but the few is missing from two thirds of what parties were shown."""
        self.hire(4)
        rest = list(self.honest) + sorted(self.colluders)
        count = next(f for f in range(1, self.n + 1) if f + (self.n - f) // 3 >= self.threshold)
        few, rest = rest[:count], rest[count:]
        lists = [tuple(sorted([*few, *rest[which::3]])) for which in range(3)]
        for round, signed in enumerate(lists, start=1):
            self.whole(round, 1, lambda p, signed=signed: signed)
        shown = {p: lists[place % 3] for place, p in enumerate(few)}
        shown |= {p: lists[which] for which in range(3) for p in rest[which::3]}
        self.whole(4, 1, shown.get, proof=(1, 2, 3, 4))

    def other_models(self) -> None:
        """Two groups that see two models, both of which are told of all, or of their own."""
        first = self.rng.randint(1, 2)
        if first == 2:
            self.whole(1, 1)
        second = {p: MODELS[1] for p in self.rng.sample(self.everyone(), self.rng.randint(1, self.n - 1))}
        groups = tuple(second), tuple(p for p in self.everyone() if p not in second)
        own = self.rng.random() < 0.5
        told = (lambda p: tuple(sorted(groups[p not in second]))) if own else (lambda p: tuple(self.everyone()))
        self.whole(first, 1, told, second)

    def answered_twice(self) -> None:
        """A round's survivors, and once more without one of them; at once, or after the next round."""
        self.whole(1, 1)
        self.whole(2, 1)
        if self.size > 2 and self.rng.random() < 0.5:
            self.whole(3, 1)
        shown = tuple(self.but_for(1))
        self.settle(2, lambda p: shown)

    def taken_twice(self) -> None:
        """A round of the batch is asked for once more."""
        self.whole(1, 1)
        self.whole(2, 1)
        self.whole(2, 1, again=True)

    def made_twice(self) -> None:
        """In mid-batch some are told to make new keys, and the others to go on with the old ones; then everybody to go on with either."""
        self.whole(1, 1)
        some = self.rng.sample(self.everyone(), self.rng.randint(1, self.n))
        for p in self.everyone():
            self.ask(2, p, 2 if p in some else 1)
        self.make_keys(2, self.of(m.AdvertiseKeys, 2) + [k for k in self.of(m.AdvertiseKeys, 1) if k.party not in some])
        groups = tuple(sorted(some)), tuple(p for p in self.everyone() if p not in some)
        self.settle(2, lambda p: groups[p not in some])
        if self.size > 2:
            self.whole(3, self.rng.choice((1, 2)), proof=(1, 2, 3))

    def stale(self) -> None:
        """The keys and bundles of some, of the batch before, in place of what they would say now."""
        live = self.but_for(2)
        self.whole(1, 1, lambda p: tuple(live))
        round = self.size + 1
        for p in live:
            self.ask(round, p, round)
        gone = [p for p in self.everyone() if p not in live]
        old = [k for k in self.of(m.AdvertiseKeys, 1) if k.party in gone]
        bundles = tuple(x for x in self.dealt(1) if x.party in gone)
        self.make_keys(round, self.of(m.AdvertiseKeys, round) + old, bundles)
        few = self.rng.sample(live, self.rng.randint(1, min(self.threshold, len(live))))
        self.settle(round, lambda p: self.few_and(p, few, gone), proof=(1, round))

    def puppets(self) -> None:
        """A few victims make keys with parties that the server plays, under the names of all others."""
        victims = self.rng.sample(self.honest, self.rng.randint(1, min(len(self.honest), self.threshold)))
        for p in set(self.everyone()) - set(victims):
            own = (
                self.identities[p]
                if p in self.colluders
                else Identity(self.rng.randbytes(32), self.identities[p].public)
            )
            rules = self.protocol.of(Session(1, about=MODELS[0], keys=1), self.n, ENCODING)
            zeros = np.zeros(DIMENSION, np.uint64)
            self.played[p] = SecAggParty(rules, p, zeros, identity=own, random_bytes=self.rng.randbytes)
        for p in victims:
            self.ask(1, p, 1)
        keys = self.of(m.AdvertiseKeys, 1) + [puppet.start() for puppet in self.played.values()]
        self.make_keys(1, keys)
        self.settle(1)


PLANS = (
    BatchLiar.come_and_go,
    BatchLiar.lists_of_their_own,
    BatchLiar.old_signatures,
    BatchLiar.other_models,
    BatchLiar.answered_twice,
    BatchLiar.taken_twice,
    BatchLiar.made_twice,
    BatchLiar.stale,
    BatchLiar.puppets,
)


def run_batches(transcripts: int, seed: int, play=None) -> tuple[dict, list[str]]:
    """`run`, of batches. `play`: one plan."""
    with tapped():
        return run(transcripts, seed, play, BatchLiar)
