"""Every message of the secure-aggregation protocol, by protocol round (MMF figure 2, Bonawitz 2017, Bell 2020).

All of them go through rank 0. Numbers are little-endian, lists carry their length, sizes follow `wire_size`.
"""

import struct
from dataclasses import dataclass

from fedmpi.crypto.keys import AEAD_OVERHEAD
from fedmpi.crypto.keys import COMMITMENT_BYTES as COMMITMENT
from fedmpi.crypto.keys import KEY_BYTES as KEY
from fedmpi.crypto.keys import SIGNATURE_BYTES as SIGNATURE
from fedmpi.crypto.shamir import SHARE_BYTES as SHARE
from fedmpi.errors import WireError
from fedmpi.wire.bits import packed_size
from fedmpi.wire.messages import COUNT, Message, register

SEALED = 2 * SHARE + AEAD_OVERHEAD  # one bundle: a share of b_u and one of s_u^SK


def _count(reader) -> int:
    return reader.fields(COUNT)[0]


# ---- Round 0: AdvertiseKeys --------------------------------------------------------------------------------------------
# Each party makes two fresh X25519 pairs, one to seal share bundles with (c_u), one to agree on masks with (s_u), and sends the
# public halves. The server passes each party the keys of its neighbours that answered. Under an active adversary both
# halves are signed with the party's identity key.


@dataclass(frozen=True)
class AdvertiseKeys(Message):
    TYPE = 20
    PHASE = "AdvertiseKeys"
    cipher_key: bytes = b""
    mask_key: bytes = b""
    signature: bytes = b""  # empty unless the adversary is active

    def buffers(self):
        return [self.cipher_key, self.mask_key, self.signature]

    @staticmethod
    def wire_size(signed: bool) -> int:
        return 2 * KEY + (SIGNATURE if signed else 0)

    @classmethod
    def parse(cls, header, reader):
        cipher, mask, signature = bytes(reader.take(KEY)), bytes(reader.take(KEY)), bytes(reader.rest())
        if len(signature) not in (0, SIGNATURE):
            raise WireError(f"AdvertiseKeys: a signature of {len(signature)} bytes, expected {SIGNATURE} or none")
        return cls(header.round, header.party, cipher, mask, signature)


@dataclass(frozen=True)
class PeerKeys:
    party: int
    cipher_key: bytes
    mask_key: bytes
    signature: bytes = b""


@dataclass(frozen=True)
class KeyList(Message):
    """The advertised keys of a party's neighbours that answered, in party order."""

    TYPE = 21
    PHASE = "AdvertiseKeys"
    peers: tuple[PeerKeys, ...] = ()

    def buffers(self):
        flag = bytes([bool(self.peers and self.peers[0].signature)])
        rows = b"".join(COUNT.pack(p.party) + p.cipher_key + p.mask_key + p.signature for p in self.peers)
        return [flag + COUNT.pack(len(self.peers)) + rows]

    @staticmethod
    def wire_size(peers: int, signed: bool) -> int:
        return 1 + COUNT.size + peers * (COUNT.size + 2 * KEY + (SIGNATURE if signed else 0))

    @classmethod
    def parse(cls, header, reader):
        flag = reader.take(1)[0]
        if flag > 1:
            raise WireError(f"KeyList: flag {flag}, expected 0 or 1")
        count = _count(reader)
        size = COUNT.size + 2 * KEY + (SIGNATURE if flag else 0)
        rows = bytes(reader.take(count * size))
        peers = []
        for at in range(0, len(rows), size):
            (party,) = COUNT.unpack_from(rows, at)
            row = rows[at + COUNT.size : at + size]
            peers.append(PeerKeys(party, row[:KEY], row[KEY : 2 * KEY], row[2 * KEY :]))
        return cls(header.round, header.party, tuple(peers))


# ---- Round 1: ShareKeys ------------------------------------------------------------------------------------------------
# Each party draws b_u, splits b_u and s_u^SK among its neighbours and itself, and seals for each neighbour one bundle with a
# share of each. The server sees a commitment to b_u and ciphertexts, and passes each party the bundles made for it.


@dataclass(frozen=True)
class Bundle:
    party: int  # the receiver on the way up, the sender on the way down
    sealed: bytes


@dataclass(frozen=True)
class _Bundles(Message):
    bundles: tuple[Bundle, ...] = ()

    def _rows(self) -> bytes:
        return COUNT.pack(len(self.bundles)) + b"".join(COUNT.pack(b.party) + b.sealed for b in self.bundles)

    @staticmethod
    def _read(reader) -> tuple[Bundle, ...]:
        count, size = _count(reader), COUNT.size + SEALED
        rows = bytes(reader.take(count * size))
        return tuple(
            Bundle(COUNT.unpack_from(rows, at)[0], rows[at + COUNT.size : at + size])
            for at in range(0, len(rows), size)
        )


@dataclass(frozen=True)
class ShareKeys(_Bundles):
    TYPE = 22
    PHASE = "ShareKeys"
    commitment: bytes = b""  # to b_u, so that a reconstructed b_u can be checked

    def buffers(self):
        return [self.commitment, self._rows()]

    @staticmethod
    def wire_size(bundles: int) -> int:
        return COMMITMENT + COUNT.size + bundles * (COUNT.size + SEALED)

    @classmethod
    def parse(cls, header, reader):
        commitment = bytes(reader.take(COMMITMENT))
        return cls(header.round, header.party, cls._read(reader), commitment)


@dataclass(frozen=True)
class ShareList(_Bundles):
    """The bundles made for one party. Whoever is in it takes part: masks are agreed with exactly these."""

    TYPE = 23
    PHASE = "ShareKeys"

    def buffers(self):
        return [self._rows()]

    @staticmethod
    def wire_size(bundles: int) -> int:
        return COUNT.size + bundles * (COUNT.size + SEALED)

    @classmethod
    def parse(cls, header, reader):
        return cls(header.round, header.party, cls._read(reader))


# ---- Round 2: MaskedInput ----------------------------------------------------------------------------------------------
# y_u = x_u + PRG(b_u) + sum over v of +-PRG(s_uv), MMF (8) with key streams in place of scalars, in Z_{2^b}.


@dataclass(frozen=True)
class MaskedInput(Message):
    TYPE = 24
    PHASE = "MaskedInput"
    values: bytes = b""  # packed by wire.bits

    def buffers(self):
        return [self.values]

    @staticmethod
    def wire_size(dimension: int, bits: int) -> int:
        return packed_size(dimension, bits)

    @classmethod
    def parse(cls, header, reader):
        return cls(header.round, header.party, bytes(reader.rest()))


# ---- Round 3: ConsistencyCheck (active adversary only) -------------------------------------------------------------------
# The server names the survivors; each of them signs that list. Nobody opens a share before it has seen enough signatures under
# the very list it was shown, so a server cannot show different lists to different parties.


@dataclass(frozen=True)
class _Survivors(Message):
    survivors: tuple[int, ...] = ()

    def _list(self) -> bytes:
        return COUNT.pack(len(self.survivors)) + b"".join(map(COUNT.pack, self.survivors))

    @staticmethod
    def _read(reader) -> tuple[int, ...]:
        return tuple(reader.array(_count(reader), "<u4").tolist())


@dataclass(frozen=True)
class SurvivorList(_Survivors):
    TYPE = 25
    PHASE = "ConsistencyCheck"

    def buffers(self):
        return [self._list()]

    @staticmethod
    def wire_size(survivors: int) -> int:
        return COUNT.size * (1 + survivors)

    @classmethod
    def parse(cls, header, reader):
        return cls(header.round, header.party, cls._read(reader))


@dataclass(frozen=True)
class ConsistencyCheck(Message):
    TYPE = 26
    PHASE = "ConsistencyCheck"
    signature: bytes = b""

    def buffers(self):
        return [self.signature]

    @staticmethod
    def wire_size() -> int:
        return SIGNATURE

    @classmethod
    def parse(cls, header, reader):
        return cls(header.round, header.party, bytes(reader.take(SIGNATURE)))


# ---- Round 4: Unmask ---------------------------------------------------------------------------------------------------
# The server names, to each party, the neighbours whose input arrived (and, under an active adversary, the signatures on the whole
# list). The party opens one secret of each neighbour: b_v if v's input arrived, s_v^SK if it did not. An answer is one or the
# other by its type, so leaking both cannot be written down.


@dataclass(frozen=True)
class UnmaskRequest(_Survivors):
    TYPE = 27
    PHASE = "Unmask"
    signatures: tuple[Bundle, ...] = ()  # (signer, signature); empty unless the adversary is active

    def buffers(self):
        rows = COUNT.pack(len(self.signatures)) + b"".join(COUNT.pack(s.party) + s.sealed for s in self.signatures)
        return [self._list(), rows]

    @staticmethod
    def wire_size(survivors: int, signatures: int) -> int:
        return COUNT.size * (2 + survivors) + signatures * (COUNT.size + SIGNATURE)

    @classmethod
    def parse(cls, header, reader):
        survivors = cls._read(reader)
        count, size = _count(reader), COUNT.size + SIGNATURE
        rows = bytes(reader.take(count * size))
        signatures = tuple(
            Bundle(COUNT.unpack_from(rows, at)[0], rows[at + COUNT.size : at + size])
            for at in range(0, len(rows), size)
        )
        return cls(header.round, header.party, survivors, signatures)


@dataclass(frozen=True)
class SelfMaskShare:
    """A share of b_v: v's input is in the sum, its own mask comes off."""

    owner: int
    share: bytes


@dataclass(frozen=True)
class PairKeyShare:
    """A share of s_v^SK: v dropped out, the masks that others agreed on with it come off."""

    owner: int
    share: bytes


@dataclass(frozen=True)
class Unopened:
    """The bundle of v did not open: its dealer, or the server, or this party is at fault, and nobody can tell which."""

    owner: int


KINDS = (SelfMaskShare, PairKeyShare, Unopened)
ROW = struct.Struct("<BI")


@dataclass(frozen=True)
class Unmask(Message):
    TYPE = 28
    PHASE = "Unmask"
    answers: tuple[SelfMaskShare | PairKeyShare | Unopened, ...] = ()

    def buffers(self):
        rows = (ROW.pack(KINDS.index(type(a)), a.owner) + getattr(a, "share", b"") for a in self.answers)
        return [COUNT.pack(len(self.answers)) + b"".join(rows)]

    @staticmethod
    def wire_size(shares: int, unopened: int = 0) -> int:
        return COUNT.size + shares * (ROW.size + SHARE) + unopened * ROW.size

    @classmethod
    def parse(cls, header, reader):
        answers = []
        for _ in range(_count(reader)):
            kind, owner = reader.fields(ROW)
            if kind >= len(KINDS):
                raise WireError(f"Unmask: an answer of kind {kind}, expected below {len(KINDS)}")
            answers.append(
                Unopened(owner) if KINDS[kind] is Unopened else KINDS[kind](owner, bytes(reader.take(SHARE)))
            )
        return cls(header.round, header.party, tuple(answers))


register(
    AdvertiseKeys, KeyList, ShareKeys, ShareList, MaskedInput, SurvivorList, ConsistencyCheck, UnmaskRequest, Unmask
)
