"""FedMF's item gradients under Paillier encryption, beside secure aggregation of the same vector.

    python -m benchmarks.recsys_he [--all] [--sample 300] [--keys 1024 2048] [--parties 943] [--json FILE]

One user's gradient is 1,682 x 20 coordinates (ml-100k at rank 20), in the fixed-point integers that secure aggregation adds too.
Every coordinate is a ciphertext of its own, as FedMF under homomorphic encryption has it (Chai et al. 2019, all items); the
kinder variant packs as many coordinates into a plaintext as the sum has room for. Times are CPU seconds of one thread.
A coordinate's time does not depend on the others, so a sample is measured and scaled; --all measures every one.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import process_time

import numpy as np

from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.privacy import encoding
from fedmpi.randomness.words import SeededWords
from fedmpi.secagg import graph
from fedmpi.secagg.messages import ShareList
from fedmpi.secagg.party import SecAggParty
from fedmpi.secagg.rules import Rules
from fedmpi.secagg.server import SecAggServer
from fedmpi.wire.messages import encode

ITEMS, FACTORS, RATED = 1682, 20, 106  # a user of ml-100k rated 106 items on average
DIMENSION = ITEMS * FACTORS
CLIP, STEPS = 8.0, 1 << 14  # as in preset demo-recsys
CORRUPT, LOST = 0.05, 0.05  # what the regular graph withstands
USERS = 3  # different gradients; costs do not depend on them


def gradients(count: int) -> list[np.ndarray]:
    """Gradients of users, as float64: rows of the items that they rated, zeros elsewhere."""
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        rows = np.zeros((ITEMS, FACTORS))
        rows[rng.choice(ITEMS, RATED, replace=False)] = np.clip(rng.standard_normal((RATED, FACTORS)), -CLIP, CLIP)
        found.append(rows.reshape(-1))
    return found


def bound(users: int) -> float:
    """How far rounding may carry a sum: half a step a user."""
    return users * CLIP / STEPS / 2 * (1 + 1e-9)


class Paillier:
    """Users encrypt and decrypt with one key pair that the server must not have; the server multiplies ciphertexts."""

    def __init__(self, bits: int, parties: int, packed: bool):
        try:
            from phe import paillier
        except ImportError:
            raise SystemExit("phe is missing; install it: pip install phe gmpy2") from None
        self.bits = bits
        self.public, self.private = paillier.generate_paillier_keypair(n_length=bits)
        self._width = encoding.choose_encoding(
            clip=CLIP, dimension=DIMENSION, parties=parties, multiplier=0, rounds=1, steps=STEPS
        ).bits
        # phe takes integers up to a third of the modulus, which has its top bit set.
        self.packed = (bits - 3) // self._width if packed else 1

    @property
    def ciphertext(self) -> int:
        """Bytes of one: an integer modulo n^2."""
        return 2 * self.bits // 8

    @property
    def number(self) -> int:
        """Ciphertexts of a whole gradient."""
        return -(-DIMENSION // self.packed)

    def plaintexts(self, values: np.ndarray) -> list[int]:
        if self.packed == 1:
            return values.tolist()
        shifted = (values + STEPS).tolist()  # not negative, so that lanes do not borrow from each other
        lanes = [shifted[first : first + self.packed] for first in range(0, len(shifted), self.packed)]
        return [sum(value << self._width * place for place, value in enumerate(lane)) for lane in lanes]

    def encrypt(self, values: np.ndarray) -> list:
        return [self.public.encrypt(plain) for plain in self.plaintexts(values)]

    def add(self, total: list, one: list) -> list:
        return [a + b for a, b in zip(total, one)]

    def decrypt(self, total: list, users: int, length: int) -> np.ndarray:
        plain = [self.private.decrypt(number) for number in total]
        if self.packed == 1:
            return np.array(plain, np.int64)
        lanes, mask = range(self.packed), (1 << self._width) - 1
        values = [value >> self._width * place & mask for value in plain for place in lanes]
        return np.array(values[:length], np.int64) - users * STEPS


def cpu(call: Callable, *values) -> tuple[float, object]:
    start = process_time()
    found = call(*values)
    return process_time() - start, found


def paillier_row(scheme: Paillier, users: list[np.ndarray], sample: int) -> dict:
    """Seconds of a whole gradient, from `sample` ciphertexts of it."""
    measured = min(scheme.number, sample)
    picked = np.random.default_rng(1).permutation(DIMENSION)[: min(DIMENSION, measured * scheme.packed)]
    integers = [np.rint(user[picked] * STEPS / CLIP).astype(np.int64) for user in users]
    seconds, encrypted = zip(*(cpu(scheme.encrypt, values) for values in integers))
    total, additions = encrypted[0], []
    for one in encrypted[1:]:
        spent, total = cpu(scheme.add, total, one)
        additions.append(spent)
    decryption, found = cpu(scheme.decrypt, total, len(users), len(picked))
    error = np.abs(found * CLIP / STEPS - sum(user[picked] for user in users)).max()
    if not np.array_equal(found, sum(integers)) or error > bound(len(users)):
        raise SystemExit(f"Paillier {scheme.bits}: the decrypted sum is not the sum (off by {error:g})")
    scale = scheme.number / measured
    return {
        "key_bits": scheme.bits,
        "packed": scheme.packed,
        "ciphertexts": scheme.number,
        "measured": measured,
        "encrypt": statistics.median(seconds) * scale,
        "add": statistics.median(additions) * scale,
        "decrypt": decryption * scale,
        "bytes_up": scheme.number * scheme.ciphertext,
        "largest_error": float(error),
    }


class Secure:
    """A whole round in one process, every party played in full; the messages are the protocol's own."""

    def __init__(self, kind: str, parties: int, dropped: int, users: list[np.ndarray]):
        self._coding = encoding.choose_encoding(
            clip=CLIP, dimension=DIMENSION, parties=parties, multiplier=0, rounds=1, steps=STEPS
        )
        cohort = range(parties)
        if kind == "regular":
            degree, threshold = graph.regular_parameters(parties, CORRUPT, LOST)
            self.graph = graph.regular(cohort, degree, threshold, SeededWords(0, "graph", 0, 0))
        else:
            self.graph = graph.complete(cohort)
        self.kind, self.parties = kind, parties
        self._gone = set(np.random.default_rng(2).choice(parties, dropped, replace=False).tolist())
        self._integers = [np.rint(user * self._coding.scale).astype(np.int64) for user in users]
        self._users = users
        self.client = {name: np.zeros(parties) for name in ("setup", "input", "unmask")}
        self.server, self.up = 0.0, np.zeros(parties, np.int64)

    def play(self) -> dict:
        rules = Rules(
            session=bytes(16),
            round=1,
            cohort=self.parties,
            threshold=self.graph.threshold,
            degree=self.graph.degree,
            dimension=DIMENSION,
            bits=self._coding.bits,
        )
        values = [self._coding.wrap(integers) for integers in self._integers]
        server = SecAggServer(rules, {party: self.graph.neighbours(party) for party in self.graph.parties})
        parties = [SecAggParty(rules, party, values[party % USERS]) for party in self.graph.parties]
        messages = [self._answer("setup", party, machine.start) for party, machine in enumerate(parties)]
        for part in ("setup", "input", "unmask", None):
            answers = []
            with self._serving():
                for message in messages:
                    answers += server.receive(message)
                if not answers and not server.done:
                    answers = server.expire()
            messages = [
                self._answer(part, party, parties[party].receive, answer)
                for party, answer in answers
                if not (isinstance(answer, ShareList) and party in self._gone)
            ]
        self._check(server)
        return self._row()

    @contextmanager
    def _serving(self) -> Iterator[None]:
        start = process_time()
        yield
        self.server += process_time() - start

    def _answer(self, part: str, party: int, call: Callable, *message):
        spent, answer = cpu(call, *message)
        self.client[part][party] += spent
        self.up[party] += len(encode(answer))
        return answer

    def _check(self, server: SecAggServer) -> None:
        total, survivors = server.result()
        counts = np.bincount([party % USERS for party in survivors], minlength=USERS)
        exact = sum(count * integers for count, integers in zip(counts, self._integers))
        floats = sum(count * user for count, user in zip(counts, self._users))
        self.error = np.abs(self._coding.decode(self._coding.unwrap(total)) - floats).max()
        wrong = not np.array_equal(self._coding.unwrap(total), exact) or self.error > bound(len(survivors))
        if wrong or len(survivors) != self.parties - len(self._gone):
            raise SystemExit(f"{self.kind}, {self.parties} parties: the unmasked sum is not the sum")

    def _row(self) -> dict:
        left = [party for party in range(self.parties) if party not in self._gone]
        return {
            "graph": self.kind,
            "parties": self.parties,
            "degree": self.graph.degree,
            "dropped": len(self._gone),
            "bits": self._coding.bits,
            **{part: float(np.median(spent[left])) for part, spent in self.client.items()},
            "server": self.server / self.parties,
            "bytes_up": int(np.median(self.up[left])),
            "largest_error": float(self.error),
        }


def show_paillier(rows: list[dict]) -> None:
    print("\nPaillier, CPU seconds a user and round: the user encrypts and decrypts, the server adds")
    print(f"{'':<32}{'encrypt':>10}{'decrypt':>10}{'add':>10}{'MB up':>10}   measured")
    for row in rows:
        name = f"{row['key_bits']} bits" + (f", {row['packed']} coordinates each" if row["packed"] > 1 else "")
        print(
            f"{name:<32}{row['encrypt']:>10.2f}{row['decrypt']:>10.2f}{row['add']:>10.4f}{row['bytes_up'] / 1e6:>10.2f}"
            f"   {row['measured']} of {row['ciphertexts']} ciphertexts"
            + (", scaled linearly" if row["measured"] < row["ciphertexts"] else "")
        )


def show_secure(rows: list[dict]) -> None:
    print("\nsecure aggregation, CPU seconds a user and round; every coordinate measured")
    print(f"{'':<32}{'set-up':>10}{'input':>10}{'unmask':>10}{'server':>10}{'MB up':>10}")
    for row in rows:
        name = f"{row['graph']}, {row['parties']} parties"
        print(
            f"{name:<32}{row['setup']:>10.4f}{row['input']:>10.4f}{row['unmask']:>10.4f}{row['server']:>10.4f}"
            f"{row['bytes_up'] / 1e6:>10.3f}   {row['degree']} neighbours, {row['dropped']} parties lost"
        )


def compare(paillier: list[dict], secure: list[dict]) -> list[dict]:
    """Paillier's cost over ours."""
    found = []
    print("\nPaillier / secure aggregation")
    print(f"{'':<54}{'client':>9}{'server':>9}{'bytes up':>9}")
    for one in paillier:
        for other in secure:
            ratios = {
                "client": (one["encrypt"] + one["decrypt"]) / (other["setup"] + other["input"] + other["unmask"]),
                "server": one["add"] / other["server"],
                "bytes_up": one["bytes_up"] / other["bytes_up"],
            }
            kind = ", packed" if one["packed"] > 1 else ""
            name = f"{one['key_bits']} bits{kind} / {other['graph']}, {other['parties']} parties"
            found.append({"pair": name, **ratios})
            print(f"{name:<54}" + "".join(f"{ratio:>9.3g}" for ratio in ratios.values()))
    return found


def main() -> None:
    parser = arguments("recsys_he", __doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 2048], help="bits of the modulus")
    parser.add_argument("--sample", type=int, default=300, help="ciphertexts that are measured; the rest is scaled")
    parser.add_argument("--all", action="store_true", help="measure every ciphertext: about half an hour")
    parser.add_argument("--parties", type=int, default=943, help="of the regular graph")
    parser.add_argument("--complete", type=int, default=100, help="parties of the complete graph")
    parser.add_argument("--dropout", type=float, default=0.02, help="share that is lost before its masked input")
    options = parser.parse_args()
    first = [Paillier(bits, options.parties, packed) for packed in (False, True) for bits in options.keys]
    facts = machine("numpy", "cryptography", "pycryptodome", "phe") | {"big integers": big_integers()}
    show_machine(facts)
    users = gradients(USERS)
    sample = DIMENSION if options.all else options.sample
    paillier = [paillier_row(scheme, users, sample) for scheme in first]
    show_paillier(paillier)
    secure = [
        Secure(kind, parties, int(options.dropout * parties), users).play()
        for kind, parties in (("regular", options.parties), ("complete", options.complete))
    ]
    show_secure(secure)
    ratios = compare(paillier, secure)
    print("both sums were checked: exact in fixed point, and within half a step a user of the float sum")
    save(options.json, facts, coordinates=DIMENSION, paillier=paillier, secure=secure, ratios=ratios)


def big_integers() -> str:
    from phe import util

    return "gmpy2" if util.HAVE_GMP else "plain Python (slow: pip install gmpy2)"


if __name__ == "__main__":
    main()
