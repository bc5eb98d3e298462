"""One round of secure aggregation in one process, for `benchmarks.secagg_cost`: both state machines driven with plain
calls, and stand-ins for parties that would take too long."""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter, process_time

import numpy as np

from fedmpi.crypto.keys import Agreement, Channel, commit, public_key
from fedmpi.crypto.shamir import KEYS, SEEDS, create_shares, encode_share, secret_to_int
from fedmpi.randomness.words import SeededWords
from fedmpi.secagg import graph as graphs
from fedmpi.secagg.messages import (
    KEY_SHARE,
    SEALED,
    SEED_SHARE,
    AdvertiseKeys,
    Bundle,
    KeyList,
    MaskedInput,
    PairKeyShare,
    SelfMaskShare,
    ShareKeys,
    ShareList,
    Unmask,
    UnmaskRequest,
)
from fedmpi.secagg.pairs import bundle_channel
from fedmpi.secagg.party import SecAggParty
from fedmpi.secagg.rules import Rules, no_meter, share_points
from fedmpi.secagg.server import SecAggServer
from fedmpi.secagg.transcript import Transcript, digest_of_keys
from fedmpi.wire.bits import packed_size
from fedmpi.wire.messages import encode
from fedmpi.wire.phases import Cost, Phase

BITS = 21  # 20 parties at the usual precision; masks are then uint32
MANY, FEW = 15, 5  # clients that are timed, in cohorts up to 100 and above
CORRUPT, LEAST_DROPOUT = 0.05, 0.05  # what the regular graph withstands; more if more drop out
Rates = tuple[float, float, float]  # seconds a byte of key stream, a byte added, an agreement
PHASES = ("AdvertiseKeys", "ShareKeys", "MaskedInput", "Unmask")


@dataclass(frozen=True)
class Cell:
    kind: str
    n: int
    d: int
    dropout: float

    @cached_property
    def graph(self) -> graphs.Graph:
        if self.kind == "complete":
            return graphs.complete(range(self.n))
        degree, threshold = graphs.regular_parameters(self.n, CORRUPT, max(LEAST_DROPOUT, self.dropout))
        return graphs.regular(range(self.n), degree, threshold, SeededWords(0, "graph", 0, 0))

    @cached_property
    def rules(self) -> Rules:
        return Rules(bytes(16), 1, self.n, self.graph.threshold, self.graph.degree, self.d, BITS)

    @cached_property
    def neighbours(self) -> dict[int, tuple[int, ...]]:
        return {party: self.graph.neighbours(party) for party in range(self.n)}

    @cached_property
    def dropped(self) -> frozenset[int]:
        gone = np.random.default_rng(1).choice(self.n, int(self.dropout * self.n), replace=False)
        return frozenset(gone.tolist())

    @cached_property
    def sampled(self) -> tuple[int, ...]:
        left = [party for party in range(self.n) if party not in self.dropped]
        count = min(MANY if self.n <= 100 else FEW, len(left))
        return tuple(left[i * (len(left) - 1) // (count - 1)] for i in range(count))

    @property
    def vector(self) -> int:
        """Bytes of one mask."""
        return self.d * self.rules.lane.itemsize

    @cached_property
    def server_masks(self) -> int:
        pairs = sum(len(set(self.neighbours[party]) - self.dropped) for party in self.dropped)
        return self.n - len(self.dropped) + pairs

    def client_floor(self, stream: float, add: float, agreement: float) -> float:
        return (self.graph.degree + 1) * self.vector * (stream + add)

    def server_floor(self, stream: float, add: float, agreement: float) -> float:
        return self.vector * (self.server_masks * (stream + add) + (self.n - len(self.dropped)) * add)

    def row(self) -> dict:
        row = {"graph": self.kind, "n": self.n, "degree": self.graph.degree, "threshold": self.graph.threshold}
        return row | {"d": self.d, "dropout": self.dropout}

    def estimates(self, *rates: float) -> tuple[float, float, float]:
        """Rough seconds: the server alone, every party played in full, a few of them."""
        shares = 1e-7 * (self.graph.degree + 1) * self.graph.threshold  # for one secret
        client = 1.3 * self.client_floor(*rates) + 2.5 * self.graph.degree * rates[2] + 2 * shares + 2e-8 * self.d
        server = 2 * self.server_floor(*rates) + 1e-8 * self.n * self.d + 1e-5 * self.n * self.graph.degree
        return server, self.n * client + 2 * server, self.n * (shares + 1e-3) + len(self.sampled) * client + 2 * server


class Clock:
    """CPU seconds by name. Given to the state machines as their meter, it also splits a phase into its parts."""

    def __init__(self):
        self.seconds = Counter()
        self._phase = ""

    @contextmanager
    def phase(self, name: str):
        self._phase, start = name, process_time()
        yield
        self.seconds[name] += process_time() - start

    @contextmanager
    def __call__(self, phase: Phase, part: Cost):
        start = process_time()
        yield
        self.seconds[f"{self._phase}/{part}"] += process_time() - start


class Stand:
    """A party that is not timed: its keys, commitment and shares are real, its vector is random. It deals only the
    secret that will be asked for, and leaves shares for others of its kind on a board: only timed parties get sealed
    ones."""

    def __init__(self, cell: Cell, party: int, board: dict[tuple[int, int], bytes]):
        self._cell, self._party, self._board = cell, party, board
        self._mask_private = os.urandom(32)
        self._cipher = Agreement(os.urandom(32))
        self._channels: dict[int, Channel] = {}  # to the timed parties
        self._held = [party]

    def start(self) -> AdvertiseKeys:
        return AdvertiseKeys(1, self._party, self._cipher.public, public_key(self._mask_private))

    def receive(self, message):
        handlers = {KeyList: self._share, ShareList: self._mask, UnmaskRequest: self._open}
        return handlers[type(message)](message)

    def _share(self, message: KeyList) -> ShareKeys:
        rules, seed = self._cell.rules, os.urandom(SEEDS.secret_bytes)
        secret, field = (self._mask_private, KEYS) if self._party in self._cell.dropped else (seed, SEEDS)
        points = share_points(self._party, [peer.party for peer in message.peers])
        number, places = secret_to_int(secret, field), list(points.values())
        (shares,) = create_shares([number], rules.threshold, places, os.urandom, [field])
        texts = dict(zip(points, (encode_share(share, field) for share in shares), strict=True))
        self._board.update({(self._party, holder): text for holder, text in texts.items()})
        timed = {peer.party: peer.cipher_key for peer in message.peers if peer.party in self._cell.sampled}
        keys = {peer.party: peer for peer in message.peers} | {self._party: self.start()}
        place = Transcript.of(rules, message.digest or digest_of_keys(keys))
        for peer, contexts in place.pair_contexts(self._party, timed).items():
            self._channels[peer] = bundle_channel(self._cipher, timed[peer], self._party < peer, contexts)
        bundles = [
            Bundle(peer.party, self._channels[peer.party].seal(bundle(texts[peer.party])))
            if peer.party in timed
            else Bundle(peer.party, bytes(SEALED))
            for peer in message.peers
        ]
        return ShareKeys(1, self._party, tuple(bundles), commit(seed, place.context(self._party)))

    def _mask(self, message: ShareList) -> MaskedInput:
        for bundle in message.bundles:
            self._held.append(bundle.party)
            if bundle.party in self._channels:
                text = self._channels[bundle.party].open(bundle.sealed)
                self._board[bundle.party, self._party] = text[:SEED_SHARE]  # of b_u: timed parties stay
        size = packed_size(self._cell.d, BITS)
        return MaskedInput(1, self._party, np.random.default_rng(self._party).bytes(size - 1) + b"\0")

    def _open(self, message: UnmaskRequest) -> Unmask:
        answers = []
        for owner in sorted(self._held):
            kind = PairKeyShare if owner in self._cell.dropped else SelfMaskShare
            answers.append(kind(owner, self._board[owner, self._party]))
        return Unmask(1, self._party, tuple(answers))


def bundle(share: bytes) -> bytes:
    """With one share in it, and zeros for the one that nobody will ask for."""
    return share + bytes(KEY_SHARE) if len(share) == SEED_SHARE else bytes(SEED_SHARE) + share


class Round:
    """One cell played once; what goes up is kept, so that servers can be fed the same again."""

    def __init__(self, cell: Cell, in_full: bool, sample: Callable[[], Rates]):
        """`sample` is called next to what is timed."""
        self.cell, self.in_full, self._sample = cell, in_full, sample
        self.uploads: list[list] = []
        self.bytes = Counter()  # of the first timed client
        self.clocks = {party: Clock() for party in cell.sampled}
        self.rates: dict[int, dict[str, Rates]] = {party: {} for party in cell.sampled}
        rng, board = np.random.default_rng(0), {}
        # Few different vectors: a thousand parties would fill the memory with inputs, and costs do not depend on them.
        self._inputs = [rng.integers(0, 1 << BITS, cell.d, dtype=np.uint64) for _ in range(3)]
        self._parties = {
            party: SecAggParty(cell.rules, party, self._inputs[party % 3], meter=self.clocks.get(party, no_meter))
            if in_full or party in self.clocks
            else Stand(cell, party, board)
            for party in range(cell.n)
        }

    def play(self) -> dict[str, float]:
        """The server's seconds."""
        clock = Clock()
        server = SecAggServer(self.cell.rules, self.cell.neighbours, meter=clock)
        messages = [self._reply(PHASES[0], party, machine.start) for party, machine in self._parties.items()]
        for after in (*PHASES[1:], ""):
            self.uploads.append(messages)
            answers = feed(server, messages, clock)
            messages = [
                self._reply(after, party, self._parties[party].receive, answer)
                for party, answer in answers
                if not (isinstance(answer, ShareList) and party in self.cell.dropped)
            ]
        self._check(server)
        return dict(clock.seconds)

    def replay(self, threads: int = 1) -> tuple[dict[str, float], float]:
        """The server's seconds with the same uploads, and the wall seconds of unmasking."""
        clock = Clock()
        server = SecAggServer(self.cell.rules, self.cell.neighbours, meter=clock, threads=threads)
        for messages in self.uploads[:-1]:
            feed(server, messages, clock)
        start = perf_counter()
        feed(server, self.uploads[-1], clock)
        return dict(clock.seconds), perf_counter() - start

    def _reply(self, phase, party, call, *message):
        if party not in self.clocks:
            return call(*message)
        if phase in ("ShareKeys", "MaskedInput"):  # whatever else the machine does falls on the floor too
            self.rates[party][phase] = self._sample()
        with self.clocks[party].phase(phase):
            answer = call(*message)
        if party == self.cell.sampled[0]:
            self.bytes["up"] += len(encode(answer))
            self.bytes["down"] += sum(len(encode(part)) for part in message)
            self.bytes[phase] = len(encode(answer))
        return answer

    def _check(self, server: SecAggServer) -> None:
        total, survivors = server.result()
        if survivors != tuple(party for party in range(self.cell.n) if party not in self.cell.dropped) or server.faults:
            raise SystemExit(f"{self.cell}: {len(survivors)} parties are in the sum; {server.faults[:3]}")
        counts = np.bincount([party % 3 for party in survivors], minlength=3).tolist()
        expected = sum(count * values for count, values in zip(counts, self._inputs, strict=True))
        if self.in_full and not np.array_equal(total, expected & np.uint64((1 << BITS) - 1)):
            raise SystemExit(f"{self.cell}: the unmasked sum is not the plain sum")


def feed(server: SecAggServer, messages: list, clock: Clock) -> list:
    """The last message of a round sets the unmasking off: it is a phase of its own."""
    phase = messages[0].PHASE
    with clock.phase(phase):
        for message in messages[:-1]:
            server.receive(message)
    with clock.phase("finish" if phase == PHASES[-1] else phase):
        answers = server.receive(messages[-1])
        return answers or ([] if server.done else server.expire())
