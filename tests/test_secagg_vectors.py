"""One whole instance, byte by byte: tests/vectors/secagg_instance.json, made by the second implementation below.

`Paper` follows fedmpi/secagg/README.md and nothing else: its primitives are those of `cryptography` and `hashlib`, its
encodings are written out, and it shares no line with fedmpi.secagg. Both must say the same bytes.

    python tests/test_secagg_vectors.py     writes the file anew
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

FILE = Path(__file__).parent / "vectors" / "secagg_instance.json"
PRIMES = {"b": (2**128 + 51, 16), "s": (2**256 + 297, 32)}  # of what is shared, and how many bytes it has

# Party 7 is lost before its input; what party 9 sealed for party 2 is damaged on its way, so that party 9 leaves.
SETTINGS = {
    "session": hashlib.sha256(b"a session").hexdigest(),
    "agreed": hashlib.sha256(b"the settings").hexdigest(),
    "about": hashlib.sha256(b"a model").hexdigest(),
    "round": 7,
    "purpose": 0,
    "cohort": 6,
    "threshold": 4,
    "degree": 5,
    "dimension": 3,
    "bits": 21,
    "most_lost": None,
}
PARTIES = (2, 4, 5, 7, 9, 11)
LOST, DAMAGED, COMPLAINS = 7, 9, 2


def sha(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def bind(*parts) -> bytes:
    return b"".join(
        b"i" + part.to_bytes(8, "big") if isinstance(part, int) else b"s" + len(part).to_bytes(4, "big") + part
        for part in parts
    )


def u32(*numbers) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def derive(secret: bytes, label: bytes, context: bytes, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, None, bind(label, context)).derive(secret)


def stream(key: bytes, dimension: int) -> np.ndarray:
    """Lanes of 32 bits, for 17 to 32 bits a value."""
    text = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(4 * dimension))
    return np.frombuffer(text, "<u4").astype(object)


def packed(values, bits: int) -> bytes:
    number = sum(int(value) << bits * place for place, value in enumerate(values))
    return number.to_bytes(-(-bits * len(values) // 8), "little")


class Person:
    """Of the second implementation: a party's secrets, from bytes that only it draws."""

    def __init__(self, party: int):
        self.party = party
        self.identity = Ed25519PrivateKey.from_private_bytes(sha(b"identity %d" % party))
        self.drawn = {
            "s": sha(b"mask key %d" % party),
            "c": sha(b"cipher key %d" % party),
            "b": sha(b"self mask %d" % party)[:16],
            "coefficients": hashlib.shake_256(b"shares %d" % party).digest(48 * (SETTINGS["threshold"] - 1)),
        }
        self.cipher, self.mask = (X25519PrivateKey.from_private_bytes(self.drawn[name]) for name in "cs")
        self.keys = self.cipher.public_key().public_bytes_raw(), self.mask.public_key().public_bytes_raw()
        self.values = [int.from_bytes(sha(b"input %d %d" % (party, i))[:4], "big") % 2**21 for i in range(3)]

    def share(self, secret: str, point: int) -> bytes:
        (prime, size), terms = PRIMES[secret], SETTINGS["threshold"] - 1
        drawn = self.drawn["coefficients"][: 16 * terms] if secret == "b" else self.drawn["coefficients"][16 * terms :]
        total, product = int.from_bytes(self.drawn[secret], "big"), 1
        for j in range(terms):
            product = product * (point - j)
            total += int.from_bytes(drawn[size * j : size * j + size], "big") * product
        return (total % prime).to_bytes(size + 1, "big")


class Paper:
    def __init__(self):
        self.people = {p: Person(p) for p in PARTIES}
        given = {name: bytes.fromhex(SETTINGS[name]) for name in ("session", "agreed", "about")}
        numbers = [SETTINGS[name] for name in ("round", "cohort", "threshold", "degree", "dimension", "bits")]
        self.instance = sha(
            bind(b"fedmpi/secagg/4", given["agreed"], given["session"], 0, *numbers, 1, b"", given["about"])
        )
        rows = [p.to_bytes(8, "big") + b"".join(self.people[p].keys) for p in PARTIES]
        self.transcript = sha(bind(b"fedmpi/transcript/1", self.instance, sha(b"".join(rows))))

    def context(self, *parties: int) -> bytes:
        return bind(self.transcript, *parties)

    def pair(self, one: int, other: int, which: str) -> bytes:
        """The key of a pair's bundles, or of its mask."""
        low, high = sorted((one, other))
        private = getattr(self.people[low], which)
        public = self.people[high].keys[0 if which == "cipher" else 1]
        label, length = (b"fedmpi/share-bundle/1", 32) if which == "cipher" else (b"fedmpi/pair-mask/1", 16)
        return derive(
            private.exchange(X25519PublicKey.from_public_bytes(public)), label, self.context(low, high), length
        )

    def own_mask(self, party: int) -> bytes:
        return derive(self.people[party].drawn["b"], b"fedmpi/self-mask/1", self.context(party), 16)

    def payloads(self) -> dict:
        """Every message's payload by kind and party."""
        people, said = self.people, {}
        signed = {
            p: person.identity.sign(bind(b"fedmpi/signed-keys/3", self.instance, p, *person.keys))
            for p, person in people.items()
        }
        said["AdvertiseKeys"] = {p: b"".join(person.keys) + signed[p] for p, person in people.items()}
        rows = {p: u32(p) + said["AdvertiseKeys"][p] for p in PARTIES}
        said["KeyList"] = {
            p: b"\1" + u32(len(PARTIES) - 1) + b"".join(rows[q] for q in PARTIES if q != p) for p in PARTIES
        }
        point = {p: place for place, p in enumerate(PARTIES, start=1)}
        sealed = {}
        for dealer in PARTIES:
            for holder in PARTIES:
                if holder != dealer:
                    text = people[dealer].share("b", point[holder]) + people[dealer].share("s", point[holder])
                    nonce = bytes(12) if dealer < holder else bytes(11) + b"\1"
                    aead = AESGCM(self.pair(dealer, holder, "cipher"))
                    sealed[dealer, holder] = aead.encrypt(nonce, text, self.context(dealer, holder))
        said["ShareKeys"] = {
            p: sha(bind(b"fedmpi/commitment/1", self.context(p), people[p].drawn["b"]))
            + u32(len(PARTIES) - 1)
            + b"".join(u32(q) + sealed[p, q] for q in PARTIES if q != p)
            for p in PARTIES
        }
        sealed[DAMAGED, COMPLAINS] = bytes(len(sealed[DAMAGED, COMPLAINS]))
        said["ShareList"] = {
            p: u32(len(PARTIES) - 1) + b"".join(u32(q) + sealed[q, p] for q in PARTIES if q != p) for p in PARTIES
        }
        said["MaskedInput"] = {}
        for p in (q for q in PARTIES if q != LOST):
            total = np.array(people[p].values, object) + stream(self.own_mask(p), 3)
            unopened = [DAMAGED] if p == COMPLAINS else []
            for q in (q for q in PARTIES if q != p and q not in unopened):
                total = total + (1 if p < q else -1) * stream(self.pair(p, q, "mask"), 3)
            said["MaskedInput"][p] = u32(len(unopened), *unopened) + packed([v % 2**21 for v in total], 21)
        survivors = [p for p in PARTIES if p not in (LOST, DAMAGED)]
        said["SurvivorList"] = dict.fromkeys(survivors, u32(len(survivors), *survivors))
        text = bind(b"fedmpi/signed-survivors/3", self.transcript, *survivors)
        said["ConsistencyCheck"] = {p: people[p].identity.sign(text) for p in survivors}
        proof = b"".join(u32(p) + said["ConsistencyCheck"][p] for p in survivors)
        said["UnmaskRequest"], said["Unmask"] = {}, {}
        for p in survivors:
            # three of four could open party 9's bundles, one too few: they say what they masked with it
            direct = [] if p == COMPLAINS else [DAMAGED]
            said["UnmaskRequest"][p] = (
                u32(len(survivors), *survivors) + u32(len(direct), *direct) + u32(len(survivors)) + proof
            )
            answers = []
            for q in PARTIES:
                if q in survivors:
                    answers.append(b"\0" + u32(q) + people[q].share("b", point[p]))
                elif q in direct:
                    answers.append(b"\2" + u32(q) + self.pair(p, q, "mask"))
                elif q == LOST:
                    answers.append(b"\1" + u32(q) + people[q].share("s", point[p]))
            said["Unmask"][p] = u32(len(answers)) + b"".join(answers)
        return said

    def total(self) -> list[int]:
        survivors = [p for p in PARTIES if p not in (LOST, DAMAGED)]
        return [sum(self.people[p].values[i] for p in survivors) % 2**21 for i in range(3)]

    def vectors(self) -> dict:
        payloads = {kind: {str(p): text.hex() for p, text in by.items()} for kind, by in self.payloads().items()}
        return {
            "about": "One instance of the protocol of fedmpi/secagg/README.md, adversary active. Payloads by kind and party.",
            "settings": SETTINGS,
            "parties": {
                str(p): {
                    "identity": sha(b"identity %d" % p).hex(),
                    "input": person.values,
                    **{name: text.hex() for name, text in person.drawn.items()},
                }
                for p, person in self.people.items()
            },
            "lost before MaskedInput": LOST,
            "bundle that is replaced by zeros": {"dealer": DAMAGED, "holder": COMPLAINS},
            "instance": self.instance.hex(),
            "transcript": self.transcript.hex(),
            "payloads": payloads,
            "sum": self.total(),
        }


@pytest.fixture(scope="module")
def kept():
    return json.loads(FILE.read_text())


def test_the_second_implementation_gives_the_vectors(kept):
    assert Paper().vectors() == kept


def test_the_protocol_says_every_byte_of_the_vectors(kept):
    from fedmpi.crypto.keys import signing_public
    from fedmpi.secagg.party import Identity, SecAggParty
    from fedmpi.secagg.rules import Rules
    from fedmpi.secagg.server import SecAggServer
    from fedmpi.wire.frame import FRAMING
    from fedmpi.wire.message import MESSAGES, decode, encode
    from fedmpi.wire.phases import Purpose

    given = dict(kept["settings"])
    given |= {name: bytes.fromhex(given[name]) for name in ("session", "agreed", "about")}
    rules = Rules(**given | {"purpose": Purpose(given["purpose"])}, active=True)
    assert rules.instance.hex() == kept["instance"]
    private = {int(p): bytes.fromhex(secrets["identity"]) for p, secrets in kept["parties"].items()}
    public = {p: signing_public(key) for p, key in private.items()}

    def draws(secrets):
        texts = iter([bytes.fromhex(secrets[name]) for name in ("s", "c", "b", "coefficients")])
        return lambda size: next(texts)

    parties = {
        int(p): SecAggParty(
            rules,
            int(p),
            np.array(secrets["input"], np.uint64),
            identity=Identity(private[int(p)], public),
            random_bytes=draws(secrets),
        )
        for p, secrets in kept["parties"].items()
    }
    neighbours = {p: tuple(q for q in parties if q != p) for p in parties}
    server, said = SecAggServer(rules, neighbours, identities=public), {}

    def through(message):
        """As it travels, and the bundle that is damaged on its way."""
        kind, lost = type(message).__name__, kept["bundle that is replaced by zeros"]
        payload = bytes(memoryview(encode(message))[FRAMING:])
        if (kind, message.party) == ("ShareList", lost["holder"]):
            row = payload.index(u32(lost["dealer"]), 4) + 4
            payload = payload[:row] + bytes(66) + payload[row + 66 :]
        said.setdefault(kind, {})[str(message.party)] = payload.hex()
        frame = bytes(encode(message))[:FRAMING] + payload
        assert type(decode(frame)) is MESSAGES[message.TYPE]
        return decode(frame)

    queue = [party.start() for party in parties.values()]
    while not server.done:
        message = queue.pop(0)
        if (type(message).__name__, message.party) == ("MaskedInput", kept["lost before MaskedInput"]):
            answers = server.drop(message.party)
        else:
            answers = server.receive(through(message))
        queue += [parties[p].receive(through(answer)) for p, answer in answers]
    assert said == kept["payloads"]
    assert server._made.transcript.digest.hex() == kept["transcript"]
    assert server.result()[0].tolist() == kept["sum"]
    assert [fault.party for fault in server.faults] == [DAMAGED]


if __name__ == "__main__":
    FILE.write_text(json.dumps(Paper().vectors(), indent=1) + "\n")
