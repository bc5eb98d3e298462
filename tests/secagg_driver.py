"""Drives both state machines with plain calls: every message is encoded and decoded on its way, nothing else happens."""

import hashlib

import numpy as np

from fedmpi.crypto.keys import signing_public
from fedmpi.errors import ProtocolError
from fedmpi.randomness.words import SeededWords
from fedmpi.secagg import graph as graphs
from fedmpi.secagg.party import Identity, SecAggParty
from fedmpi.secagg.rules import Rules
from fedmpi.secagg.server import SecAggServer
from fedmpi.wire.messages import decode, encode
from fedmpi.wire.phases import Purpose


def pinned(*about):
    """Randomness as an argument: a stream of bytes that depends on what it is for."""
    state = {"count": 0}

    def draw(size):
        state["count"] += 1
        seed = repr((*about, state["count"])).encode()
        return hashlib.shake_256(seed).digest(size)

    return draw


def identities(n):
    """Signing keys of the cohort of an n-party round."""
    private = {p: pinned("identity", p)(32) for p in range(0, 3 * n, 3)}
    public = {p: signing_public(key) for p, key in private.items()}
    return {p: Identity(key, public) for p, key in private.items()}


class Round:
    """One round of the protocol, with hooks where a test wants to lie, lose or look."""

    def __init__(
        self,
        n,
        *,
        threshold=None,
        degree=None,
        bits=20,
        dimension=8,
        seed=0,
        identities=None,
        round=3,
        most_lost=None,
        purpose=Purpose.TRAINING,
        keys=None,
    ):
        """`keys`: more of the rules, for a round of a batch."""
        cohort = tuple(range(0, 3 * n, 3))  # parties need not be numbered without gaps
        threshold = threshold or graphs.default_threshold(n)
        self.graph = (
            graphs.complete(cohort, threshold)
            if degree is None
            else graphs.regular(cohort, degree, threshold, SeededWords(seed, "graph", 0, round))
        )
        self.rules = Rules(
            b"session of 16 by",
            round,
            n,
            self.graph.threshold,
            self.graph.degree,
            dimension,
            bits,
            identities is not None,
            most_lost,
            purpose,
            **(keys or {}),
        )
        rng = np.random.default_rng(seed)
        self.inputs = {p: rng.integers(0, 1 << bits, dimension, dtype=np.uint64) for p in cohort}
        public = identities and {p: identity.public[p] for p, identity in identities.items()}
        self.server = SecAggServer(self.rules, {p: self.graph.neighbours(p) for p in cohort}, identities=public)
        self.parties = {
            p: SecAggParty(
                self.rules, p, self.inputs[p], identity=(identities or {}).get(p), random_bytes=pinned(seed, round, p)
            )
            for p in cohort
        }
        self.cohort = cohort
        self.sent = []  # every message, in order

    def run(self, vanish=None, tamper=None):
        """`vanish[party] = phase`: it says nothing from that phase on. `tamper(message)` may replace what goes up."""
        vanish = vanish or {}
        queue = [self.parties[p].start() for p in self.cohort]
        while not self.server.done:
            gone = [p for p in self.server.waiting() if vanish.get(p) == self.server.phase_name]
            if gone:
                queue += self._answers(self.server.drop(gone[0]), vanish)
                continue
            if not queue:  # somebody was caught and everybody else is done
                queue += self._answers(self.server.expire(), vanish)
                continue
            message = queue.pop(0)
            if vanish.get(message.party) == message.PHASE:
                continue
            for part in (tamper(message) if tamper else None) or [message]:
                self.sent.append(part)
                try:
                    answers = self.server.receive(decode(encode(part)))
                except ProtocolError as error:
                    answers = self.server.drop(part.party, error.fault)
                queue += self._answers(answers, vanish)
        return self

    def _answers(self, answers, vanish):
        replies = []
        for party, message in answers:
            self.sent.append(message)
            replies.append(self.parties[party].receive(decode(encode(message))))
        return replies

    def expected(self, survivors):
        total = sum((self.inputs[p] for p in survivors), np.zeros(self.rules.dimension, np.uint64))
        return total & np.uint64((1 << self.rules.bits) - 1)

    def check_sum(self, survivors=None):
        """The exactness law: the sum is exactly the survivors'."""
        total, got = self.server.result()
        assert np.array_equal(total, self.expected(got))
        if survivors is not None:
            assert got == tuple(survivors)


class Batch:
    """Rounds of one batch of keys, made in the first of them."""

    def __init__(self, n, rounds, *, first=3, seed=0, identities=None, **shape):
        self.rounds = range(first, first + rounds)
        self.seed, self.identities, self.shape = seed, identities, shape | {"n": n}
        self.made = None  # the server that has the keys
        self.rings = {}

    def round(self, number, **changes):
        """Ready to run; in the first round from the keys on, later from the inputs on by those who have some. `changes`: to the rules."""
        keys = dict(batch=(self.rounds[0], self.rounds[-1])) | changes
        found = Round(**self.shape, seed=self.seed + 1000 * number, identities=self.identities, round=number, keys=keys)
        if number == self.rounds[0]:
            self.made = found.server
            self.found = found
        else:
            batch = self.made.batch
            found.server = SecAggServer(found.rules, batch.neighbours, identities=found.server._identities, batch=batch)
            self.rings |= {p: party.ring for p, party in self.found.parties.items() if party.ring is not None}
            for p, party in found.parties.items():
                party.ring = self.rings.get(p)
            found.cohort = tuple(p for p in found.cohort if p in self.rings and p in batch.dealt)
        return found
