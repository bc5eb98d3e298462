"""A server that lies at random, against real parties: what can it compute from what it received?

    python -m benchmarks.lying_server [--keys round|batch] [--transcripts 10000] [--seed 0] [--json FILE]

A transcript is two or three instances of the protocol, adversary active, among 3 to 12 parties, up to two of which are in the server's
pay: it has their identity keys and whatever is sealed for them. At every step it picks a party and what to show it: the right
thing, or with something left out, repeated, in another order, from another instance, altered, made up; other models for
other parties; survivors that did not survive, or two lists of them. Parties are `SecAggParty` as it is, each taking part in a
round once.

Then it is worked out what the server can know. Secrets of which it has enough shares (those that it was answered, and its
colluders') give it masks; masked inputs minus these are linear equations in the inputs and in masks that it does not
know, which are independent and uniform. The combinations in which all unknown masks cancel are all that it learns. With the true
inputs at hand every such combination is checked to be one sum over at least `threshold - colluders` honest parties of one
instance, no two sharing an input; and that the sum, computed from the received bytes alone, is the true one, so that what
the check takes for knowledge is. `--keys batch`: the same where keys are made for several rounds (`benchmarks.lying_batches`).
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.crypto import keys as crypto
from fedmpi.crypto.keys import SELF_MASK, derive
from fedmpi.crypto.masks import MASK_KEY_BYTES, add_masks
from fedmpi.errors import ProtocolError
from fedmpi.secagg import messages as m
from fedmpi.secagg import party as states
from fedmpi.secagg.party import Identity, SecAggParty
from fedmpi.secagg.rules import Rules
from fedmpi.secagg.transcript import Transcript
from fedmpi.wire.bits import unpack
from fedmpi.wire.messages import decode, encode

BITS, DIMENSION = 16, 2
MODELS = (b"the model", b"another model")
FIELD = 2**31 - 1  # equations are solved modulo this prime: a rank that is lower there would be a coincidence of 2^-31


@lru_cache(maxsize=64)
def identity(party: int) -> tuple[bytes, bytes]:
    private = bytes([party + 1]) * 32
    return private, crypto.signing_public(private)


@dataclass
class Observation:
    """A masked input that the server received, and what only its sender knows of it."""

    round: int
    party: int
    transcript: bytes
    masked: np.ndarray
    true: np.ndarray
    masks: dict[bytes, int]  # key -> sign


@dataclass
class Knowledge:
    """What the sender's own records say that the server could know; secrets by their value."""

    inputs: list[Observation] = field(default_factory=list)
    shares: dict[tuple[bytes, str], set[int]] = field(
        default_factory=dict
    )  # (secret, kind) -> holders that it has shares of
    masks_of: dict[bytes, set[bytes]] = field(default_factory=dict)  # secret -> keys of masks that it gives
    told: set[bytes] = field(default_factory=set)  # keys of masks that it was told

    def known(self, threshold: int) -> set[bytes]:
        keys = set(self.told)
        for (secret, _), holders in self.shares.items():
            if len(holders) >= threshold:
                keys |= self.masks_of.get(secret, set())
        return keys


class Liar:
    """One transcript: parties, and a server that makes up its mind at every step."""

    SHARES: type = m.ShareKeys  # what parties deal with

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.n = rng.choice((3, 4, 5, 6, 7, 8, 9, 10, 11, 12))
        self.colluders = set(range(min(rng.choice((0, 0, 1, 2)), (self.n - 1) // 3)))
        least = (self.n + len(self.colluders)) // 2 + 1
        self.threshold = least if rng.random() < 0.5 else rng.randint(least, self.n)
        public = {p: identity(p)[1] for p in range(self.n)}
        self.identities = {p: Identity(identity(p)[0], public) for p in range(self.n)}
        self.honest = [p for p in range(self.n) if p not in self.colluders]
        self.machines: dict[tuple[int, int], SecAggParty] = {}  # (round, party)
        self.values: dict[tuple[int, int], np.ndarray] = {}
        self.dead: set[tuple[int, int]] = set()
        self.pool: list = []  # everything that was ever received
        self.shown: dict[tuple[int, int], list] = {}  # what a machine was shown, to repeat it
        self.secrets: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # (b, s) of a machine that has dealt
        self.dealers: dict[tuple[bytes, int], tuple[int, int]] = {}  # (transcript, party) -> machine
        self.places: dict[int, dict[bytes, Transcript]] = {}  # by round
        self.owner_of: dict[bytes, tuple[int, int]] = {}  # public mask key -> its machine
        self.knowledge = Knowledge()
        self.refused = Counter()
        self.honesty = rng.choice((0.5, 0.8, 0.95, 0.99))  # how often it does the right thing

    # ---- the parties ----

    def rules(self, round: int, model: bytes) -> Rules:
        return Rules(
            b"one session", round, self.n, self.threshold, self.n - 1, DIMENSION, BITS, active=True, about=model
        )

    def start(self, round: int) -> None:
        wrong = self.rng.random() > self.honesty
        for p in range(self.n):
            model = self.rng.choice(MODELS) if wrong else MODELS[0]
            values = np.array([self.rng.randrange(1 << BITS) for _ in range(DIMENSION)], np.uint64)
            made = SecAggParty(
                self.rules(round, model), p, values, identity=self.identities[p], random_bytes=self.rng.randbytes
            )
            self.machines[round, p], self.values[round, p] = made, values
            message = made.start()
            self.owner_of[message.mask_key] = round, p
            self.pool.append(message)

    def show(self, round: int, party: int, message) -> None:
        """What a party makes of a message; from the first that it refuses on it says nothing more in this instance."""
        made = self.machines[round, party]
        before = made.state
        self.shown.setdefault((round, party), []).append(message)
        try:
            answer = made.receive(decode(encode(message)))
        except ProtocolError as error:
            self.refused[error.fault.what.split(",")[0]] += 1
            if party in self.honest and self.rng.random() < 0.5:
                self.dead.add((round, party))
            return
        self.pool.append(answer)
        self.note(round, party, before, made.state, answer)

    def note(self, round: int, party: int, before, after, answer) -> None:
        """For the judgement afterwards; the server sees nothing of this but `answer`."""
        known = self.knowledge
        if isinstance(after, states.Shared):
            dealing = after.dealing
            s, b = before.mask_private, dealing.self_mask
            self.secrets[round, party] = b, s
            self.dealers[dealing.transcript.digest, party] = round, party
            self.places.setdefault(round, {})[dealing.transcript.digest] = dealing.transcript
            mask = derive(b, SELF_MASK, dealing.transcript.context(party), MASK_KEY_BYTES)
            known.masks_of.setdefault(b, set()).add(mask)
            for secret, kind in ((b, "b"), (s, "s")):  # who is the server's own among the holders hands over both
                own = {peer for peer, keys in dealing.peers.items() if self.is_its_own(peer, keys.mask_key)}
                known.shares.setdefault((secret, kind), set()).update(own)
        elif isinstance(after, states.Masked):
            b, s = self.secrets[round, party]
            masks = {next(iter(known.masks_of[b])): 1}
            for peer, key in after.masks.items():
                masks[key] = 1 if party < peer else -1
                known.masks_of.setdefault(s, set()).add(key)
                public = before.dealing.peers[peer].mask_key
                if self.is_its_own(peer, public):
                    known.told.add(key)
                elif self.owner_of[public] in self.secrets:
                    known.masks_of.setdefault(self.secrets[self.owner_of[public]][1], set()).add(key)
            if party in self.honest:
                masked = unpack(answer.values, DIMENSION, BITS)
                place = after.transcript.digest
                known.inputs.append(Observation(round, party, place, masked, self.values[round, party], masks))
        elif isinstance(after, states.Done):
            held = before.masked
            for given in answer.answers:
                if isinstance(given, m.PairMask):
                    known.told.add(held.masks[given.owner])
                    continue
                kind = "b" if isinstance(given, m.SelfMaskShare) else "s"
                # whose instance a bundle was of is settled by its opening: the dealer's machine of this transcript
                dealer = self.dealers.get((held.transcript.digest, given.owner))
                if dealer is not None:
                    secret = self.secrets[dealer][0 if kind == "b" else 1]
                    known.shares.setdefault((secret, kind), set()).add(party)

    def is_its_own(self, party: int, mask_key: bytes) -> bool:
        """Whether the server has the secret: of a colluder, and of a key that no party made."""
        return party in self.colluders or mask_key not in self.owner_of

    # ---- the server ----

    def of(self, kind, round: int | None = None, party: int | None = None) -> list:
        return [
            x
            for x in self.pool
            if isinstance(x, kind) and round in (None, x.round) and (party is None or x.party == party)
        ]

    def dealt(self, round: int | None, party: int | None = None) -> list:
        return self.of(self.SHARES, round, party)

    def lies(self) -> bool:
        return self.rng.random() > self.honesty

    def some(self, items: list) -> list:
        """Left out, repeated, in another order; or all of them."""
        items = list(items)
        while items and self.lies():
            choice = self.rng.randrange(3)
            if choice == 0:
                items.pop(self.rng.randrange(len(items)))
            elif choice == 1:
                items.append(self.rng.choice(items))
            else:
                self.rng.shuffle(items)
        return items

    def key_list(self, round: int, party: int) -> m.KeyList:
        peers = []
        for other in range(self.n):
            offered = self.of(m.AdvertiseKeys, None if self.lies() else round, other)
            if other != party and offered:
                keys = self.rng.choice(offered)
                peer = m.PeerKeys(other, keys.cipher_key, keys.mask_key, keys.signature)
                if self.lies():  # altered, or made up with a key that it has
                    peer = m.PeerKeys(other, keys.cipher_key, self.rng.randbytes(32), keys.signature)
                peers.append(peer)
        peers = self.some(peers)
        return m.KeyList(round, party, tuple(peers))

    def share_list(self, round: int, party: int) -> m.ShareList:
        bundles = []
        for other in range(self.n):
            offered = self.dealt(None if self.lies() else round, other)
            if other != party and offered:
                message = self.rng.choice(offered)
                sealed = {bundle.party: bundle.sealed for bundle in message.bundles}
                whose = party if not self.lies() else self.rng.choice(list(sealed))
                if whose in sealed:
                    text = sealed[whose]
                    bundles.append(m.Bundle(other, text if not self.lies() else bytes([text[0] ^ 1]) + text[1:]))
        return m.ShareList(round, party, tuple(self.some(bundles)))

    def survivors(self, round: int) -> tuple[int, ...]:
        arrived = sorted({x.party for x in self.of(m.MaskedInput, round)})
        if self.lies():
            return tuple(sorted(self.rng.sample(range(self.n), self.rng.randint(1, self.n))))
        if self.lies() and len(arrived) > self.threshold:
            arrived.pop(self.rng.randrange(len(arrived)))
        return tuple(arrived)

    def unmask_request(self, round: int, party: int, asked: tuple[int, ...]) -> m.UnmaskRequest:
        signed = self.of(m.ConsistencyCheck, None if self.lies() else round)
        proof = {x.party: m.Signed(x.party, x.signature) for x in self.some(signed)}
        direct = tuple(p for p in range(self.n) if p not in asked) if self.rng.random() < 0.2 else ()
        if self.lies():
            direct = tuple(self.rng.sample(range(self.n), self.rng.randint(0, self.n)))
        return m.UnmaskRequest(round, party, asked, tuple(proof.values()), direct)

    def colluders_sign(self, round: int, survivors: tuple[int, ...]) -> None:
        """A colluder signs whatever it is asked to, under any transcript that is there."""
        for place in self.places.get(round, {}).values():
            for colluder in self.colluders:
                signature = self.identities[colluder].sign(place.survivors_text(survivors))
                self.pool.append(m.ConsistencyCheck(round, colluder, signature))

    def play(self) -> None:
        self.rng.choice((self.at_random, self.at_random, self.with_puppets, self.again, self.many_lists))()

    def with_puppets(self) -> None:
        """A few victims see each other and, under the names of all others, parties that the server plays itself."""
        self.start(1)
        victims = self.rng.sample(self.honest, self.rng.randint(1, min(len(self.honest), self.threshold)))
        puppets = {}
        for p in set(range(self.n)) - set(victims):
            private = self.rng.randbytes(32)
            if p in self.colluders:
                private = identity(p)[0]
            own = Identity(private, {q: identity(q)[1] for q in range(self.n)})
            values = np.zeros(DIMENSION, np.uint64)
            rules = self.rules(1, MODELS[0])
            puppets[p] = SecAggParty(rules, p, values, identity=own, random_bytes=self.rng.randbytes)
        keys = {p: self.of(m.AdvertiseKeys, 1, p)[0] for p in victims} | {p: x.start() for p, x in puppets.items()}
        self.route(1, victims, keys, puppets)

    def again(self) -> None:
        """A round as it should be, but that some are said to have dropped, whose keys it can then work out; and another with these
        old keys, bundles and signatures in place of what those parties would say now, and few others in every list."""
        self.start(1)
        everyone = list(range(self.n))
        gone = self.rng.sample(self.honest, self.rng.randint(0, min(len(self.honest), self.n - self.threshold)))
        live = [p for p in everyone if p not in gone]
        keys = {p: self.of(m.AdvertiseKeys, 1, p)[0] for p in everyone}
        self.route(1, everyone, keys, {}, lambda p: tuple(everyone if p in gone else live))
        self.start(2)
        keys |= {p: self.of(m.AdvertiseKeys, 2, p)[0] for p in live}
        few = self.rng.sample(live, self.rng.randint(1, min(self.threshold, len(live))))
        self.route(2, live, keys, {}, lambda p: self.few_and(p, few, gone), gone)

    def few_and(self, party: int, few: list[int], others: list[int]) -> tuple[int, ...]:
        """Survivors as one party is told: few that all are told of, itself, and others until they are enough."""
        shown = {*few, party}
        for other in (*others, *(p % self.n for p in range(party + 1, party + self.n))):
            if len(shown) < self.threshold:
                shown.add(other)
        return tuple(sorted(shown))

    def many_lists(self) -> None:
        """Every party is told of enough survivors, but each of others: few are in all lists, and of the rest each is missing from
        so many that its masks come off."""
        self.start(1)
        everyone = list(range(self.n))
        few = self.rng.sample(self.honest, self.rng.randint(1, min(self.threshold, len(self.honest))))

        keys = {p: self.of(m.AdvertiseKeys, 1, p)[0] for p in everyone}
        self.route(1, everyone, keys, {}, lambda p: self.few_and(p, few, []))

    def route(self, round: int, real: list[int], keys: dict, puppets: dict, survivors=None, stale=()) -> None:
        """An instance among real parties and puppets, in good order. `survivors`: as each is told of them."""

        def tell(party: int, message) -> None:
            if party not in puppets:
                return self.show(round, party, message)
            try:
                self.pool.append(puppets[party].receive(message))
            except ProtocolError:
                pass

        members = sorted([*real, *puppets])
        for p in members:
            peers = (m.PeerKeys(q, k.cipher_key, k.mask_key, k.signature) for q, k in sorted(keys.items()) if q != p)
            tell(p, m.KeyList(round, p, tuple(peers)))
        dealt = {x.party: x for x in self.dealt(1) if x.party in stale}
        dealt |= {x.party: x for x in self.dealt(round)}
        for p in members:
            mine = ((q, b.sealed) for q, x in sorted(dealt.items()) for b in x.bundles if b.party == p)
            tell(p, m.ShareList(round, p, tuple(m.Bundle(q, sealed) for q, sealed in mine)))
        arrived = {x.party for x in self.of(m.MaskedInput, round)} | set(stale)
        told = survivors or (lambda p: tuple(sorted(arrived)))
        for p in members:
            tell(p, m.SurvivorList(round, p, told(p)))
        for shown in {told(p) for p in members}:
            self.colluders_sign(round, shown)
        signed = self.of(m.ConsistencyCheck, None if stale else round)
        proof = tuple(m.Signed(x.party, x.signature) for x in signed)
        for p in members:
            tell(p, m.UnmaskRequest(round, p, told(p), proof))

    def at_random(self) -> None:
        rounds = list(range(1, self.rng.choice((2, 3)) + 1))
        lists: dict[int, tuple[int, ...]] = {}
        for round in rounds:
            self.start(round)
        steps = [(step, round) for round in rounds for step in range(4)]
        if self.lies():
            self.rng.shuffle(steps)  # instances mixed
        for step, round in steps:
            order = list(range(self.n))
            self.rng.shuffle(order)
            shown = lists.get(round)
            for p in self.some(order):
                if (round, p) in self.dead or (p in self.honest and self.rng.random() > (self.honesty + 1) / 2):
                    continue
                if step == 2 and (shown is None or self.lies()):
                    shown = lists[round] = self.survivors(round)
                    self.colluders_sign(round, shown)
                asked = lists.get(round) or self.survivors(round)
                earlier = self.shown.get((round, p))
                again = earlier and self.lies()
                self.show(round, p, self.rng.choice(earlier) if again else self.made(step, round, p, asked))

    def made(self, step: int, round: int, party: int, asked: tuple[int, ...]):
        if step == 0:
            return self.key_list(round, party)
        if step == 1:
            return self.share_list(round, party)
        return m.SurvivorList(round, party, asked) if step == 2 else self.unmask_request(round, party, asked)

    # ---- the judgement ----

    def judge(self) -> tuple[int, str]:
        """(sums that it could compute, what is wrong with one of them, if anything is)"""
        observed, known = self.knowledge.inputs, self.knowledge.known(self.threshold)
        found = [
            combination for rows in together(observed, known) for combination in combinations(observed, rows, known)
        ]
        used: set[int] = set()
        for combination in found:
            rows = np.flatnonzero(combination).tolist()
            inside = [observed[row] for row in rows]
            if len(rows) < self.threshold - len(self.colluders):
                return len(found), f"a combination of {len(rows)} honest inputs, the threshold is {self.threshold}"
            if len({one.transcript for one in inside}) > 1 or len({one.party for one in inside}) < len(rows):
                return len(found), "a combination over several instances, or with one party twice"
            if used & set(rows):
                return len(found), "two sums that share an input"
            used |= set(rows)
            if not self.is_sum(inside, known):
                return len(found), "what was taken for a sum is none"
        return len(found), ""

    def is_sum(self, inside: list[Observation], known: set[bytes]) -> bool:
        """From the bytes and the masks that it has: the others cancel, so they are left out."""
        total = np.zeros(DIMENSION, np.uint16)
        left: Counter = Counter()
        for one in inside:
            total += one.masked.astype(np.uint16)
            for key, sign in one.masks.items():
                left[key] += sign
        for key, sign in left.items():
            for _ in range(abs(sign)):
                if key not in known:
                    return False
                add_masks(total, [key], [-1 if sign > 0 else 1])
        return bool(np.array_equal(total, sum(one.true for one in inside).astype(np.uint16)))


def together(observed: list[Observation], known: set[bytes]) -> list[list[int]]:
    """The inputs, by number, in groups that have no unknown mask in common: each is solved by itself."""
    groups: list[tuple[set[bytes], list[int]]] = []
    for row, one in enumerate(observed):
        masks, rows = {key for key in one.masks if key not in known}, [row]
        apart = []
        for others in groups:
            if others[0] & masks:
                masks |= others[0]
                rows = others[1] + rows
            else:
                apart.append(others)
        groups = [*apart, (masks, rows)]
    return [sorted(rows) for _, rows in groups]


def combinations(observed: list[Observation], rows: list[int], known: set[bytes]) -> list[np.ndarray]:
    """Of these inputs, in which all unknown masks cancel."""
    unknown = sorted({key for row in rows for key in observed[row].masks if key not in known})
    place = {key: column for column, key in enumerate(unknown)}
    matrix = np.zeros((len(rows), len(unknown)), np.int64)
    for at, row in enumerate(rows):
        for key, sign in observed[row].masks.items():
            if key in place:
                matrix[at, place[key]] += sign
    found = []
    for some in left_kernel(matrix):
        combination = np.zeros(len(observed), np.int64)
        combination[rows] = some
        found.append(combination)
    return found


def left_kernel(matrix: np.ndarray) -> list[np.ndarray]:
    """A basis, in echelon form, of the combinations of rows that give zero, modulo a prime."""
    rows, columns = matrix.shape
    work = [[int(x) % FIELD for x in row] + [int(i == j) for j in range(rows)] for i, row in enumerate(matrix)]
    top = 0
    for column in range(columns):
        pivot = next((i for i in range(top, rows) if work[i][column]), None)
        if pivot is None:
            continue
        work[top], work[pivot] = work[pivot], work[top]
        inverse = pow(work[top][column], -1, FIELD)
        for i in range(top + 1, rows):
            factor = work[i][column] * inverse % FIELD
            if factor:
                work[i] = [(a - factor * b) % FIELD for a, b in zip(work[i], work[top])]
        top += 1
    basis = [row[columns:] for row in work[top:]]
    return [np.array(row) for row in _reduced(basis)]


def _reduced(basis: list[list[int]]) -> list[list[int]]:
    top = 0
    for column in range(len(basis[0]) if basis else 0):
        pivot = next((i for i in range(top, len(basis)) if basis[i][column]), None)
        if pivot is None:
            continue
        basis[top], basis[pivot] = basis[pivot], basis[top]
        inverse = pow(basis[top][column], -1, FIELD)
        basis[top] = [x * inverse % FIELD for x in basis[top]]
        for i in range(len(basis)):
            factor = basis[i][column]
            if i != top and factor:
                basis[i] = [(a - factor * b) % FIELD for a, b in zip(basis[i], basis[top])]
        top += 1
    return basis


def run(transcripts: int, seed: int, play=None, kind=None) -> tuple[dict, list[str]]:
    """(counts, what went wrong, a line each). `kind`: of liar; `play`: one of its plans, or any."""
    verify, states.verify = states.verify, lru_cache(maxsize=1 << 16)(crypto.verify)  # each is checked by many parties
    try:
        return _run(transcripts, seed, play, kind or Liar)
    finally:
        states.verify = verify


def _run(transcripts: int, seed: int, play, kind) -> tuple[dict, list[str]]:
    counts, wrong = Counter(), []
    for number in range(transcripts):
        liar = kind(random.Random(f"{seed}/{number}"))
        (play or kind.play)(liar)
        sums, what = liar.judge()
        counts["transcripts"] += 1
        counts["with a sum"] += sums > 0
        counts["sums"] += sums
        counts["masked inputs"] += len(liar.knowledge.inputs)
        counts["messages refused"] += sum(liar.refused.values())
        if what:
            wrong.append(f"transcript {number}: n = {liar.n}, {len(liar.colluders)} colluders: {what}")
    return dict(counts), wrong


def main() -> None:
    parser = arguments("lying_server", __doc__)
    parser.add_argument("--keys", choices=("round", "batch"), default="round")
    parser.add_argument("--transcripts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    facts = machine("numpy", "cryptography")
    show_machine(facts)
    if options.keys == "batch":
        from benchmarks.lying_batches import run_batches

        counts, wrong = run_batches(options.transcripts, options.seed)
    else:
        counts, wrong = run(options.transcripts, options.seed)
    for name, count in counts.items():
        print(f"{name:<20}{count:>10}")
    print("\n".join(wrong) or "no input, and no sum below the threshold, could be computed")
    save(options.json, facts, counts=counts, wrong=wrong)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
