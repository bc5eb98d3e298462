"""A rank 0 that lies in the protocol itself, to read an update or a sum of too few. Under a passive adversary it can: that is
what identities are for."""

import collections
import dataclasses
import secrets
from collections.abc import Iterable

import numpy as np

from fedmpi.aggregation.protocol import Session, digest
from fedmpi.config import Config
from fedmpi.crypto.keys import SELF_MASK, Agreement, derive, signing_public
from fedmpi.crypto.masks import MASK_KEY_BYTES, add_masks
from fedmpi.crypto.shamir import KEYS, SEEDS, decode_share, int_to_secret, lagrange_weights, reconstruct
from fedmpi.errors import CryptoError, ProtocolError, TransportError
from fedmpi.liars.base import (
    ServerAttack,
    Verdict,
    changed,
    first_values,
    only_secure,
    parties_in_words,
    unchecked,
    watched,
)
from fedmpi.liars.stage import Forged, Quiet, report_in
from fedmpi.privacy.encoding import Encoding
from fedmpi.runtime import build
from fedmpi.runtime.gather import Outcome
from fedmpi.runtime.mailbox import Mailbox
from fedmpi.runtime.server import Server
from fedmpi.runtime.start import Start
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.secagg.messages import (
    AdvertiseKeys,
    MaskedInput,
    PairKeyShare,
    SelfMaskShare,
    SurvivorList,
    Unmask,
    UnmaskRequest,
)
from fedmpi.secagg.pairs import mask_key
from fedmpi.secagg.party import Identity, SecAggParty
from fedmpi.secagg.rules import Rules, share_points
from fedmpi.secagg.transcript import Transcript, digest_of_keys
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.bits import unpack
from fedmpi.wire.message import Message
from fedmpi.wire.messages import Nonces, Setup, Train, TrainReport

ROUND = 1  # the one that is attacked
UNSEEN = "not compared, because parties are other processes here"


def fits_protocol(config: Config) -> str:
    if config.aggregation.support == "union":
        return "support = union: this attack is on support shared or dense"
    return only_secure(config)


class Puppets(ServerAttack):
    name = "puppets"
    tries = "shows one victim keys that rank 0 made under all other names, and runs the protocol with it alone: wants its update"

    server: "Puppeteer | None" = None

    def fits(self, config: Config) -> str:
        return fits_protocol(config)

    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None:
        with unchecked(), watched() as self.true:
            self.server = Puppeteer.made(endpoint, start)
            self.server.round(ROUND)

    def judge(self) -> Verdict:
        found = self.server.found if self.server is not None else None
        if self.server is None or found is None:
            return Verdict("nothing: the victim did not speak to puppets")
        encoding, true = self.server.mechanism.encoding, self.true.get((ROUND, self.server.victim))
        proof = UNSEEN
        if true is not None:
            if not np.array_equal(encoding.unwrap(true), found):
                return Verdict("nothing: what it took for the update is not what its victim put in")
            proof = f"all {len(found)} numbers are those that its machine put in"
        got = f"got party {self.server.victim}'s exact update: {first_values(encoding.decode(found))}; {proof}"
        return Verdict(got, broken=self.active, known=not self.active)


class Puppeteer(Server):
    """The real server, among puppets of its own: one party of the cohort is real, and the sum is its input."""

    found: np.ndarray | None = None
    victim = 0

    @classmethod
    def made(cls, endpoint: Endpoint, start: Start) -> "Puppeteer":
        """As fedmpi.runtime.server.run_server does, up to the first round."""
        orders, placement, record = start
        mailbox = Mailbox(endpoint, placement, orders.config.run.round_deadline, warn=record.terminal.warn)
        text = orders.to_text()
        mailbox.to_hosts(range(orders.config.run.parties), lambda hosted: Setup(config=text, parties=hosted))
        algorithm = build.algorithm(orders.config, device="cpu")
        server = cls(orders, algorithm, build.mechanism(orders, algorithm), mailbox, record, Stopwatch())
        server.handshake()
        return server

    def aggregate(self, round: int, cohort: tuple[int, ...]) -> Outcome:
        self.victim = cohort[0]
        about = Session(round, most_lost=self.algorithm.most_lost(self.theta), about=digest(self.theta))
        session = self.end.training(about, cohort, self.clear)
        rules = self.end.rules.of(about, len(cohort), self.mechanism.encoding)
        puppets = self.puppets(rules, cohort[1:])
        endpoint, rank = self.mailbox.endpoint, self.mailbox.placement.rank_of(self.victim)
        said = collections.deque(session.start())
        for puppet in puppets.values():
            said.extend(session.receive(puppet.start()))
        while not session.done:
            if said:
                party, message = said.popleft()
                if party in puppets:
                    said.extend(session.receive(puppets[party].receive(message)))
                else:
                    endpoint.send(rank, message)
                continue
            arrived = endpoint.poll(self.mailbox.patience)
            if arrived is None or (arrived[0] == rank and report_in(arrived[1]) is not None):
                raise TransportError("the victim is gone")
            asked = arrived[1].party == self.victim and rules.covers(arrived[1])
            if asked and not isinstance(arrived[1], TrainReport):
                said.extend(session.receive(arrived[1]))
        if not session.failed:
            self.found = session.result().total
        return Outcome(failed="this round was played with puppets")

    def puppets(self, rules: Rules, names: tuple[int, ...]) -> dict[int, SecAggParty]:
        """Parties of its own making, which add nothing to the sum; signed by keys that it made as well."""
        private = {party: secrets.token_bytes(32) for party in names}
        public = {party: signing_public(key) for party, key in private.items()}
        public |= {self.victim: (build.public_identities(self.config) or {}).get(self.victim, b"")}
        zeros = np.zeros(rules.dimension, np.uint64)
        return {p: SecAggParty(rules, p, zeros, identity=Identity(private[p], public)) for p in names}


# ---- many lists ----


class Survivors(ServerAttack):
    name = "survivors"
    tries = "tells every party of other survivors, at the smallest threshold above half: wants a sum of fewer than the threshold"

    def fits(self, config: Config) -> str:
        if config.aggregation.graph != "complete":
            return f"graph = {config.aggregation.graph}: this attack is on the complete graph"
        if config.privacy.sampling < 1:
            return "sampling < 1: this attack is on a cohort of everybody"
        n = config.run.parties
        if not many_lists(n, smallest_threshold(config))[0]:
            return f"parties = {n}: no lists of survivors give away a sum of so few"
        return fits_protocol(config)

    def own(self, config: Config) -> Config:
        return changed(config, "aggregation", threshold=smallest_threshold(config))

    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None:
        config = start.orders.config
        self.orders, self.threshold = start.orders, config.aggregation.threshold
        self.few, self.lists = many_lists(config.run.parties, self.threshold)
        self.rules: Rules | None = None
        algorithm = build.algorithm(config, device="cpu")
        self.encoding: Encoding = build.mechanism(start.orders, algorithm).encoding
        self.most_lost, self.theta = algorithm.most_lost, algorithm.initial()
        self.protocol = build.protocol_rules(start.orders)
        self.met = False
        with watched() as self.true:
            super().play(endpoint, start, terminal, act)

    def says(self, endpoint: Forged, rank: int, message: Message) -> Iterable[Message]:
        if isinstance(message, Nonces) and not self.met:
            self.protocol.meet(message.nonces)
            self.met = True
        if isinstance(message, Train) and self.rules is None:
            about = Session(ROUND, most_lost=self.most_lost(self.theta), about=message.model)
            self.rules = self.protocol.of(about, self.orders.config.run.parties, self.encoding)
        if isinstance(message, UnmaskRequest):
            message = dataclasses.replace(message, survivors=self.lists[message.party], direct=())
        elif isinstance(message, SurvivorList):
            message = dataclasses.replace(message, survivors=self.lists[message.party])
        return [message]

    def judge(self) -> Verdict:
        total = self.solve()
        if total is None:
            return Verdict("nothing: the answers open no sum")
        true = [self.true[ROUND, party] for party in self.few if (ROUND, party) in self.true]
        proof = UNSEEN
        if len(true) == len(self.few):
            mask = np.uint64((1 << self.encoding.bits) - 1)
            added = np.sum(np.array(true, np.uint64), axis=0, dtype=np.uint64) & mask
            if not np.array_equal(added, total):
                return Verdict("nothing: what it took for the sum is none")
            proof = "exactly what their machines put in"
        values = self.encoding.decode(self.encoding.unwrap(total))
        got = (
            f"got the sum of {parties_in_words(self.few)} alone, {len(self.few)} where the threshold is {self.threshold}: "
            f"{first_values(values)}; {proof}"
        )
        return Verdict(got, broken=self.active, known=not self.active)

    def solve(self) -> np.ndarray | None:
        """The sum of the few from what was received: their own masks and those with everybody else come off."""
        rules = self.rules

        def by_party(kind: type[Message]) -> dict:
            return {
                m.party: m for m in self.heard_of(kind) if m.round == ROUND and rules is not None and rules.covers(m)
            }

        keys, inputs, opened = by_party(AdvertiseKeys), by_party(MaskedInput), by_party(Unmask)
        if rules is None or not set(self.few) <= inputs.keys():
            return None
        transcript, everyone = Transcript.of(rules, digest_of_keys(keys)), sorted(keys)
        total = np.zeros(rules.dimension, rules.lane)
        try:
            for party in self.few:
                total += unpack(inputs[party].values, rules.dimension, rules.bits).astype(rules.lane)
                own = secret_of(party, SelfMaskShare, everyone, opened, rules)
                mask = derive(own, SELF_MASK, transcript.context(party), MASK_KEY_BYTES)
                add_masks(total, [mask], [-1])
            for other in set(everyone) - set(self.few):
                agreement = Agreement(secret_of(other, PairKeyShare, everyone, opened, rules))
                for party, pair in transcript.pair_contexts(other, self.few).items():
                    mask = mask_key(agreement, keys[party].mask_key, other < party, pair)
                    add_masks(total, [mask], [-1 if party < other else 1])
        except (CryptoError, ProtocolError):
            return None
        return total.astype(np.uint64) & np.uint64((1 << rules.bits) - 1)


def secret_of(owner: int, kind: type, everyone: list[int], opened: dict[int, Unmask], rules: Rules) -> bytes:
    """A secret of which enough shares were given; CryptoError if they were not."""
    places = share_points(owner, [party for party in everyone if party != owner])
    field = SEEDS if kind is SelfMaskShare else KEYS
    shares = {
        places[holder]: decode_share(answer.share, field)
        for holder, message in opened.items()
        for answer in message.answers
        if answer.owner == owner and isinstance(answer, kind)
    }
    if len(shares) < rules.threshold:
        raise CryptoError(f"{len(shares)} shares of party {owner}")
    points = sorted(shares)[: rules.threshold]
    found = reconstruct(lagrange_weights(points, field), [shares[point] for point in points], field)
    return int_to_secret(found, field)


def smallest_threshold(config: Config) -> int:
    return (config.run.parties + config.aggregation.colluding) // 2 + 1


def many_lists(parties: int, threshold: int) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """(the fewest parties that can be in all lists, the list of each party): every list has `threshold` names, and everybody else is
    missing from so many that its masks come off. Nobody and nothing where there are no such lists."""
    for size in range(1, threshold):
        few, rest = range(size), range(size, parties)
        shown: collections.Counter[int] = collections.Counter(dict.fromkeys(rest, 0))
        lists = {}
        for party in range(parties):
            others = sorted((other for other in rest if other != party), key=lambda other: shown[other])
            room = threshold - len({*few, party})
            shown.update(others[:room])
            lists[party] = tuple(sorted({*few, party, *others[:room]}))
        if all(parties - 1 - shown[other] >= threshold for other in rest):
            return tuple(few), lists
    return (), {}
