"""What keys for a batch of rounds cost a party, beside keys for every round, and beside the other construction that would do.

    python -m benchmarks.key_batches [--neighbours 19 34 99] [--rounds 16] [--repeats 7] [--json FILE]

    round     the paper's: two X25519 pairs a round, s^SK and b dealt in every one (--keys round)
    lists     one agreement a pair and batch, round keys derived from it, and for each round a sealed list of them (--keys batch:16)
    pairs     the other way: an X25519 pair for every round of the batch, all advertised together, each s^SK dealt. Not in fedmpi: played here
              from the same primitives, as far as it costs a party

CPU milliseconds of a party and round for making keys (agreements, derivations, shares, sealing and opening bundles), without masks and
packing, which are the same for all; medians of repeats that take turns. Real machines for the first two, among so many neighbours,
complete graph. Bytes of what makes the keys, up and down, by the messages' size laws; those of `pairs` are worked out from its fields.
"""

import os
import statistics
from collections import defaultdict
from contextlib import contextmanager
from time import process_time

import numpy as np

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.crypto.keys import (
    AEAD_OVERHEAD,
    COMMITMENT_BYTES,
    KEY_BYTES,
    PAIR_MASK,
    SHARE_BUNDLE,
    Agreement,
    Channel,
    derive,
)
from fedmpi.crypto.masks import MASK_KEY_BYTES
from fedmpi.crypto.shamir import KEYS, SEEDS, create_shares, encode_share
from fedmpi.secagg import graph
from fedmpi.secagg.messages import AdvertiseKeys, KeyList, ShareBatch, ShareKeys, ShareList
from fedmpi.secagg.party import SecAggParty
from fedmpi.secagg.rules import Rules
from fedmpi.secagg.server import SecAggServer
from fedmpi.wire.frame import COUNT, FRAMING
from fedmpi.wire.phases import Cost

MADE_OF = (Cost.DH, Cost.SHAMIR_SPLIT, Cost.AEAD)
BITS, DIMENSION = 16, 8


class Clock:
    """CPU seconds by what they went into."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase, cost):
        start = process_time()
        yield
        self.seconds[cost] += process_time() - start

    @property
    def keys(self) -> float:
        return sum(self.seconds[cost] for cost in MADE_OF)


def threshold_of(neighbours: int) -> int:
    return graph.default_threshold(neighbours + 1)


def played(neighbours: int, rounds: int, batched: bool) -> float:
    """CPU seconds of party 0 over all rounds, in the product's own machines; the sums are checked."""
    everyone, clock = range(neighbours + 1), Clock()
    peers = {p: tuple(q for q in everyone if q != p) for p in everyone}
    values = {p: np.full(DIMENSION, p, np.uint64) for p in everyone}
    rings, batch = {}, None
    for round in range(1, rounds + 1):
        rules = Rules(
            b"benchmark", round, len(everyone), threshold_of(neighbours), neighbours, DIMENSION, BITS,
            batch=(1, rounds) if batched else None,
        )  # fmt: skip
        server = SecAggServer(rules, peers, batch=batch)
        made = {
            p: SecAggParty(rules, p, values[p], ring=rings.get(p), **({"meter": clock} if p == 0 else {}))
            for p in everyone
        }
        said = [made[p].start() for p in everyone]
        while not server.done:
            answers = [answer for message in said for answer in server.receive(message)]
            said = [made[p].receive(answer) for p, answer in answers]
        if not np.array_equal(server.result()[0], np.full(DIMENSION, sum(everyone) % (1 << BITS))):
            raise SystemExit(f"round {round}: the sum is wrong")
        if batched:
            batch, rings = server.batch, {p: party.ring for p, party in made.items()}
    return clock.keys


def pairs_of_every_round(neighbours: int, rounds: int) -> float:
    """CPU seconds of one party: what `pairs` would compute, with real keys, shares and bundles of its peers."""
    channel_keys = [Agreement(os.urandom(32)).public for _ in range(neighbours)]
    mask_keys = [[Agreement(os.urandom(32)).public for _ in range(rounds)] for _ in range(neighbours)]
    place, bundle = b"a place of the usual length, which is that of a digest and two numbers", rounds * 50
    start = process_time()
    cipher = Agreement(os.urandom(32))
    private = [os.urandom(32) for _ in range(rounds)]
    masks = [Agreement(key) for key in private]
    seeds = [os.urandom(16) for _ in range(rounds)]
    secrets = [int.from_bytes(text, "big") for pair in zip(seeds, private) for text in pair]
    fields, points = [SEEDS, KEYS] * rounds, list(range(1, neighbours + 2))
    shares = create_shares(secrets, threshold_of(neighbours), points, os.urandom, fields)
    texts = [b"".join([encode_share(s, f) for s, f in zip(column, fields)]) for column in zip(*shares)]
    assert len(texts[0]) == bundle
    channels = [Channel(derive(cipher.shared(key), SHARE_BUNDLE, place), True, place, place) for key in channel_keys]
    sealed = [channel.seal(text) for channel, text in zip(channels, texts)]
    back = [Channel(channel._key, False, place, place) for channel in channels]  # as its peers seal theirs
    for channel, text in zip(back, sealed):
        channel.open(text)
    for keys in mask_keys:
        for mask, key in zip(masks, keys):
            derive(mask.shared(key), PAIR_MASK, place, MASK_KEY_BYTES)
    return process_time() - start


def bytes_of(neighbours: int, rounds: int) -> dict[str, tuple[float, float]]:
    """(up, down) of a party and round, framing included."""
    once = AdvertiseKeys.wire_size(False), KeyList.wire_size(neighbours, False)
    row, bundle = COUNT.size + KEY_BYTES * (1 + rounds), COUNT.size + AEAD_OVERHEAD + 50 * rounds
    of_pairs = (
        KEY_BYTES * (1 + rounds) + rounds * COMMITMENT_BYTES + COUNT.size + neighbours * bundle,
        1 + 2 * COUNT.size + neighbours * (row + bundle),
    )
    found = {
        "round": (once[0] + ShareKeys.wire_size(neighbours), once[1] + ShareList.wire_size(neighbours)),
        "lists": (
            once[0] + ShareBatch.wire_size(neighbours, rounds),
            once[1] + ShareList.wire_size(neighbours, rounds),
        ),
        "pairs": of_pairs,
    }
    return {
        name: tuple((size + 2 * FRAMING) / (1 if name == "round" else rounds) for size in sizes)
        for name, sizes in found.items()
    }


def main() -> None:
    parser = arguments("key_batches", __doc__)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[19, 34, 99])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    facts = machine("cryptography", "pycryptodome")
    show_machine(facts)
    print(f"\nkeys for {options.rounds} rounds; of a party and round")
    print(f"{'neighbours':>10} {'':<6} {'CPU [ms]':>9} {'/ round':>8} {'up [B]':>8} {'down [B]':>9}")
    rows = []
    for neighbours in options.neighbours:
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(options.repeats):
            times["round"].append(played(neighbours, 1, False))
            times["lists"].append(played(neighbours, options.rounds, True) / options.rounds)
            times["pairs"].append(pairs_of_every_round(neighbours, options.rounds) / options.rounds)
        sizes = bytes_of(neighbours, options.rounds)
        for name, seconds in times.items():
            ratio = statistics.median(mine / first for mine, first in zip(seconds, times["round"]))
            middle = 1000 * statistics.median(seconds)
            print(
                f"{neighbours:>10} {name:<6} {middle:>9.2f} {ratio:>8.2f} {sizes[name][0]:>8.0f} {sizes[name][1]:>9.0f}"
            )
            rows.append({"neighbours": neighbours, "keys": name, "ms": middle, "ratio": ratio, "bytes": sizes[name]})
    save(options.json, facts, rounds=options.rounds, rows=rows)


if __name__ == "__main__":
    main()
