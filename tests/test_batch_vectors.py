"""One whole batch of three rounds, byte by byte: tests/vectors/secagg_batch.json, made by the second implementation below.

Like `Paper` of test_secagg_vectors, whose primitives it uses, `PaperBatch` follows fedmpi/secagg/README.md and nothing else and
shares no line with fedmpi.secagg. Both must say the same bytes.

    python tests/test_batch_vectors.py     writes the file anew
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

sys.path.append(str(Path(__file__).parents[1]))  # for who runs this file
from tests.test_secagg_vectors import bind, derive, packed, sha, u32  # noqa: E402

FILE = Path(__file__).parent / "vectors" / "secagg_batch.json"
PRIME = 2**128 + 51

# Party 7 is lost before ShareBatch and sits the batch out. What party 9 sealed for party 2 is damaged on its way: party 9, the
# dealer, leaves the odd rounds. Party 2 is lost before its input of round 8, and back in round 9.
SETTINGS = {
    "session": hashlib.sha256(b"a session").hexdigest(),
    "agreed": hashlib.sha256(b"the settings").hexdigest(),
    "purpose": 0,
    "first": 7,
    "last": 9,
    "cohort": 6,
    "threshold": 4,
    "degree": 5,
}
ROUNDS = {
    7: {"dimension": 3, "bits": 21, "most_lost": None, "about": hashlib.sha256(b"model 7").hexdigest()},
    8: {"dimension": 4, "bits": 16, "most_lost": 2, "about": hashlib.sha256(b"model 8").hexdigest()},
    9: {"dimension": 2, "bits": 37, "most_lost": None, "about": hashlib.sha256(b"model 9").hexdigest()},
}
PARTIES = (2, 4, 5, 7, 9, 11)
SITS_OUT, DEALER, HOLDER, DROPPED = 7, 9, 2, {8: 2}
THERE = tuple(p for p in PARTIES if p != SITS_OUT)
POINT = {p: place for place, p in enumerate(PARTIES, start=1)}


def stream(key: bytes, dimension: int, bits: int) -> np.ndarray:
    """In lanes of the narrowest machine word that holds so many bits."""
    word = next(size for size in (1, 2, 4, 8) if bits <= 8 * size)
    text = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(word * dimension))
    return np.frombuffer(text, f"<u{word}").astype(object)


class Person:
    """Of the second implementation: a party's secrets, from bytes that only it draws."""

    def __init__(self, party: int):
        self.identity = Ed25519PrivateKey.from_private_bytes(sha(b"identity %d" % party))
        self.drawn = {"s": sha(b"mask key %d" % party), "c": sha(b"cipher key %d" % party)}
        terms = SETTINGS["threshold"] - 1
        for r in ROUNDS:
            for name in "ba":
                text = hashlib.shake_256(f"{name} of {party} in {r}".encode()).digest(16 * (1 + terms))
                self.drawn[f"{name} {r}"], self.drawn[f"{name} {r} coefficients"] = text[:16], text[16:]
        self.cipher, self.mask = (X25519PrivateKey.from_private_bytes(self.drawn[name]) for name in "cs")
        self.keys = self.cipher.public_key().public_bytes_raw(), self.mask.public_key().public_bytes_raw()
        self.values = {
            r: [
                int.from_bytes(sha(b"input %d %d %d" % (party, r, i))[:8], "big") % 2 ** own["bits"]
                for i in range(own["dimension"])
            ]
            for r, own in ROUNDS.items()
        }

    def share(self, name: str, r: int, point: int) -> bytes:
        drawn = self.drawn[f"{name} {r} coefficients"]
        total, product = int.from_bytes(self.drawn[f"{name} {r}"], "big"), 1
        for j in range(SETTINGS["threshold"] - 1):
            product *= point - j
            total += int.from_bytes(drawn[16 * j : 16 * j + 16], "big") * product
        return (total % PRIME).to_bytes(17, "big")


class PaperBatch:
    def __init__(self):
        self.people = {p: Person(p) for p in PARTIES}
        given = {name: bytes.fromhex(SETTINGS[name]) for name in ("session", "agreed")}
        numbers = [SETTINGS[name] for name in ("purpose", "first", "last", "cohort", "threshold", "degree")]
        self.batch = sha(bind(b"fedmpi/secagg-batch/1", given["agreed"], given["session"], *numbers, 1))
        rows = [p.to_bytes(8, "big") + b"".join(self.people[p].keys) for p in PARTIES]
        self.transcript = sha(bind(b"fedmpi/transcript/1", self.batch, sha(b"".join(rows))))
        self.of_round = {}
        for r, own in ROUNDS.items():
            most_lost = b"" if own["most_lost"] is None else bind(own["most_lost"])
            self.of_round[r] = sha(
                bind(
                    b"fedmpi/batch-round/1",
                    self.transcript,
                    r,
                    own["dimension"],
                    own["bits"],
                    most_lost,
                    bytes.fromhex(own["about"]),
                )
            )

    def agreed_on(self, one: int, other: int, which: str, label: bytes, length: int) -> bytes:
        low, high = sorted((one, other))
        public = self.people[high].keys[0 if which == "cipher" else 1]
        secret = getattr(self.people[low], which).exchange(X25519PublicKey.from_public_bytes(public))
        return derive(secret, label, bind(self.transcript, low, high), length)

    def pair_key(self, one: int, other: int, r: int) -> bytes:
        """k_uv^r"""
        keys = self.agreed_on(one, other, "mask", b"fedmpi/pair-rounds/1", 16 * len(ROUNDS))
        place = r - SETTINGS["first"]
        return keys[16 * place : 16 * place + 16]

    def pair_mask(self, one: int, other: int, r: int) -> bytes:
        return derive(
            self.pair_key(one, other, r), b"fedmpi/pair-mask/1", bind(self.of_round[r], *sorted((one, other))), 16
        )

    def own_mask(self, party: int, r: int) -> bytes:
        return derive(self.people[party].drawn[f"b {r}"], b"fedmpi/self-mask/1", bind(self.of_round[r], party), 16)

    def sealed_list(self, party: int, r: int) -> bytes:
        """L_u^r"""
        context = bind(self.transcript, party, r)
        key = derive(self.people[party].drawn[f"a {r}"], b"fedmpi/round-list/1", context, 32)
        text = b"".join(self.pair_key(party, q, r) for q in PARTIES if q != party)
        return AESGCM(key).encrypt(bytes(12), text, context)

    def bundle(self, dealer: int, holder: int) -> bytes:
        person, point = self.people[dealer], POINT[holder]
        text = b"".join(person.share("b", r, point) + person.share("a", r, point) for r in ROUNDS)
        key = self.agreed_on(dealer, holder, "cipher", b"fedmpi/share-bundle/1", 32)
        nonce = bytes(12) if dealer < holder else bytes(11) + b"\1"
        return AESGCM(key).encrypt(nonce, text, bind(self.transcript, dealer, holder))

    def setup(self) -> dict:
        """Payloads by kind and party, of the messages that make the keys."""
        people, said = self.people, {}
        said["AdvertiseKeys"] = {
            p: b"".join(person.keys) + person.identity.sign(bind(b"fedmpi/signed-keys/3", self.batch, p, *person.keys))
            for p, person in people.items()
        }
        rows = {p: u32(p) + said["AdvertiseKeys"][p] for p in PARTIES}
        said["KeyList"] = {p: b"\1" + u32(5) + b"".join(rows[q] for q in PARTIES if q != p) for p in PARTIES}
        said["ShareBatch"] = {
            p: u32(len(ROUNDS), 5)
            + b"".join(
                sha(bind(b"fedmpi/commitment/1", bind(self.transcript, p, r), people[p].drawn[f"b {r}"]))
                for r in ROUNDS
            )
            + b"".join(self.sealed_list(p, r) for r in ROUNDS)
            + b"".join(u32(q) + self.bundle(p, q) for q in PARTIES if q != p)
            for p in THERE
        }
        size = 2 * 17 * len(ROUNDS) + 16
        said["ShareList"] = {
            p: u32(len(THERE) - 1)
            + b"".join(
                u32(q) + (bytes(size) if (q, p) == (DEALER, HOLDER) else self.bundle(q, p)) for q in THERE if q != p
            )
            for p in THERE
        }
        return said

    def survivors(self, r: int) -> list[int]:
        if r in DROPPED:
            gone = DROPPED[r]
        else:  # of the two in dispute
            gone = DEALER if r % 2 else HOLDER
        return [p for p in THERE if p != gone]

    def round(self, r: int) -> dict:
        people, said = self.people, {"MaskedInput": {}}
        dimension, bits = ROUNDS[r]["dimension"], ROUNDS[r]["bits"]
        masked_with = {p: [q for q in THERE if q != p and (q, p) != (DEALER, HOLDER)] for p in THERE}
        for p in (q for q in THERE if q != DROPPED.get(r)):
            total = np.array(people[p].values[r], object) + stream(self.own_mask(p, r), dimension, bits)
            for q in masked_with[p]:
                total = total + (1 if p < q else -1) * stream(self.pair_mask(p, q, r), dimension, bits)
            unopened = [DEALER] if p == HOLDER else []
            said["MaskedInput"][p] = u32(len(unopened), *unopened) + packed([v % 2**bits for v in total], bits)
        survivors = self.survivors(r)
        said["SurvivorList"] = dict.fromkeys(survivors, u32(len(survivors), *survivors))
        text = bind(b"fedmpi/signed-survivors/3", self.of_round[r], *survivors)
        said["ConsistencyCheck"] = {p: people[p].identity.sign(text) for p in survivors}
        proof = b"".join(u32(p) + said["ConsistencyCheck"][p] for p in survivors)
        said["UnmaskRequest"], said["Unmask"] = {}, {}
        for p in survivors:
            (gone,) = (q for q in THERE if q not in survivors)
            # three of four could open the dealer's bundles, one too few: they say what they masked with it
            direct = [DEALER] if gone == DEALER and p != HOLDER else []
            said["UnmaskRequest"][p] = (
                u32(len(survivors), *survivors) + u32(len(direct), *direct) + u32(len(survivors)) + proof
            )
            answers = []
            for q in sorted({p, *masked_with[p]}):
                if q in survivors:
                    answers.append(b"\0" + u32(q) + people[q].share("b", r, POINT[p]))
                elif q in direct:
                    answers.append(b"\2" + u32(q) + self.pair_mask(p, q, r))
                else:
                    answers.append(b"\3" + u32(q) + people[q].share("a", r, POINT[p]))
            said["Unmask"][p] = u32(len(answers)) + b"".join(answers)
        return said

    def total(self, r: int) -> list[int]:
        own = ROUNDS[r]
        return [
            sum(self.people[p].values[r][i] for p in self.survivors(r)) % 2 ** own["bits"]
            for i in range(own["dimension"])
        ]

    def vectors(self) -> dict:
        def hexed(said):
            return {kind: {str(p): text.hex() for p, text in by.items()} for kind, by in said.items()}

        return {
            "about": "A batch of fedmpi/secagg/README.md, adversary active: keys for three rounds. Payloads by kind and party.",
            "settings": SETTINGS,
            "rounds": {str(r): own for r, own in ROUNDS.items()},
            "parties": {
                str(p): {
                    "identity": sha(b"identity %d" % p).hex(),
                    "inputs": {str(r): values for r, values in person.values.items()},
                    **{name: text.hex() for name, text in person.drawn.items()},
                }
                for p, person in self.people.items()
            },
            "lost before ShareBatch": SITS_OUT,
            "lost before MaskedInput, by round": {str(r): p for r, p in DROPPED.items()},
            "bundle that is replaced by zeros": {"dealer": DEALER, "holder": HOLDER},
            "batch": self.batch.hex(),
            "transcript": self.transcript.hex(),
            "transcripts of rounds": {str(r): text.hex() for r, text in self.of_round.items()},
            "setup": hexed(self.setup()),
            "payloads": {str(r): hexed(self.round(r)) for r in ROUNDS},
            "sums": {str(r): self.total(r) for r in ROUNDS},
        }


@pytest.fixture(scope="module")
def kept():
    return json.loads(FILE.read_text())


def test_the_second_implementation_gives_the_vectors(kept):
    assert PaperBatch().vectors() == kept


class Played:
    """The product's parties and server, with the draws of the vectors; what is said is kept as it travels."""

    def __init__(self, kept):
        from fedmpi.crypto.keys import signing_public
        from fedmpi.secagg.party import Identity

        self.kept, self.rings = kept, {}
        private = {int(p): bytes.fromhex(secrets["identity"]) for p, secrets in kept["parties"].items()}
        self.public = {p: signing_public(key) for p, key in private.items()}
        self.identities = {p: Identity(key, self.public) for p, key in private.items()}
        self.server = None

    def draws(self, secrets):
        """The order in which the product asks for them, which is nobody's business but its own."""
        drawn = {name: bytes.fromhex(text) for name, text in secrets.items() if isinstance(text, str)}
        rounds = self.kept["rounds"]
        texts = [drawn["s"], drawn["c"]]
        texts += [b"".join(drawn[f"{name} {r}"] for r in rounds) for name in "ba"]
        texts += [b"".join(drawn[f"{name} {r} coefficients"] for r in rounds for name in "ba")]
        rest = iter(texts)
        return lambda size: next(rest)

    def rules(self, r):
        from fedmpi.secagg.rules import Rules
        from fedmpi.wire.phases import Purpose

        given = dict(self.kept["settings"])
        own = dict(self.kept["rounds"][r])
        texts = {name: bytes.fromhex(given.pop(name)) for name in ("session", "agreed")}
        texts["about"] = bytes.fromhex(own.pop("about"))
        batch, purpose = (given.pop("first"), given.pop("last")), Purpose(given.pop("purpose"))
        return Rules(round=int(r), **given, **own, **texts, batch=batch, purpose=purpose, active=True)

    def round(self, r):
        from fedmpi.secagg.party import SecAggParty
        from fedmpi.secagg.server import SecAggServer

        rules, kept, later = self.rules(r), self.kept, self.server is not None
        assert rules.instance.hex() == kept["batch"]
        parties = {
            int(p): SecAggParty(
                rules,
                int(p),
                np.array(secrets["inputs"][r], np.uint64),
                identity=self.identities[int(p)],
                random_bytes=self.draws(secrets),
                ring=self.rings.get(int(p)),
            )
            for p, secrets in kept["parties"].items()
            if not later or int(p) in self.rings
        }
        neighbours = {int(p): tuple(int(q) for q in kept["parties"] if q != p) for p in kept["parties"]}
        batch = self.server.batch if later else None
        self.server = server = SecAggServer(rules, neighbours, identities=self.public, batch=batch)
        lost = {("ShareBatch", kept["lost before ShareBatch"])}
        lost |= {("MaskedInput", p) for at, p in kept["lost before MaskedInput, by round"].items() if at == r}
        said, queue = {}, [party.start() for party in parties.values()]
        while not server.done:
            message = queue.pop(0)
            if (type(message).__name__, message.party) in lost:
                answers = server.drop(message.party)
            else:
                answers = server.receive(self.through(message, said))
            queue += [parties[p].receive(self.through(answer, said)) for p, answer in answers]
        self.rings = {p: party.ring for p, party in parties.items() if party.ring is not None}
        return said

    def through(self, message, said):
        from fedmpi.wire.frame import FRAMING
        from fedmpi.wire.message import MESSAGES, decode, encode

        kind, damaged = type(message).__name__, self.kept["bundle that is replaced by zeros"]
        payload = bytes(memoryview(encode(message))[FRAMING:])
        if (kind, message.party) == ("ShareList", damaged["holder"]):
            bundle = next(b for b in message.bundles if b.party == damaged["dealer"])
            payload = payload.replace(bundle.sealed, bytes(len(bundle.sealed)))
        said.setdefault(kind, {})[str(message.party)] = payload.hex()
        frame = bytes(encode(message))[:FRAMING] + payload
        assert type(decode(frame)) is MESSAGES[message.TYPE]
        return decode(frame)


def test_the_protocol_says_every_byte_of_all_rounds_of_the_vectors(kept):
    played, first = Played(kept), str(kept["settings"]["first"])
    for r in kept["rounds"]:
        said = played.round(r)
        assert said == (kept["setup"] if r == first else {}) | kept["payloads"][r]
        assert played.server.batch.transcript.digest.hex() == kept["transcript"]
        assert played.server._made.transcript.digest.hex() == kept["transcripts of rounds"][r]
        assert played.server.result()[0].tolist() == kept["sums"][r]
    assert set(played.rings) == set(map(int, kept["parties"])) - {kept["lost before ShareBatch"]}


if __name__ == "__main__":
    FILE.write_text(json.dumps(PaperBatch().vectors(), indent=1) + "\n")
