"""Every message of the secure-aggregation protocol, by protocol round (MMF figure 2, Bonawitz 2017, Bell 2020).

All of them go through rank 0. Numbers are little-endian, lists carry their length, sizes follow `wire_size`.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from fedmpi.crypto.keys import AEAD_OVERHEAD
from fedmpi.crypto.keys import COMMITMENT_BYTES as COMMITMENT
from fedmpi.crypto.keys import KEY_BYTES as KEY
from fedmpi.crypto.keys import SIGNATURE_BYTES as SIGNATURE
from fedmpi.crypto.masks import MASK_KEY_BYTES as MASK_KEY
from fedmpi.crypto.shamir import KEYS, SEEDS
from fedmpi.errors import WireError
from fedmpi.wire.bits import packed_size
from fedmpi.wire.frame import COUNT, Buffer, Reader
from fedmpi.wire.message import Message, pack_parties, read_parties, register
from fedmpi.wire.phases import Phase

SEED_SHARE, KEY_SHARE = SEEDS.share_bytes, KEYS.share_bytes  # of b_u, and of s_u^SK
DIGEST = 32  # of everybody's keys
SEALED = SEED_SHARE + KEY_SHARE + AEAD_OVERHEAD  # one bundle


def batch_sealed(rounds: int) -> int:
    """A bundle of a batch of so many rounds: a share of b_u and one of a_u for each."""
    return 2 * SEED_SHARE * rounds + AEAD_OVERHEAD


def rounds_in(sealed: int) -> int:
    """Of the batch that a bundle of so many bytes is of."""
    return max(1, (sealed - AEAD_OVERHEAD) // (2 * SEED_SHARE))


def list_size(peers: int) -> int:
    """The keys of one round's masks with so many peers, sealed."""
    return MASK_KEY * peers + AEAD_OVERHEAD


def _pack_rows(rows: Iterable[tuple[int, bytes]]) -> bytes:
    """A list of (party, so many bytes)."""
    packed = [COUNT.pack(party) + text for party, text in rows]
    return COUNT.pack(len(packed)) + b"".join(packed)


def _read_rows(reader: Reader, size: int) -> list[tuple[int, bytes]]:
    count, size = reader.count(), COUNT.size + size
    return _split_rows(bytes(reader.take(count * size)), size)


def _split_rows(rows: bytes, size: int) -> list[tuple[int, bytes]]:
    starts = range(0, len(rows), size)
    return [(COUNT.unpack_from(rows, at)[0], rows[at + COUNT.size : at + size]) for at in starts]


# ---- Round 0: AdvertiseKeys --------------------------------------------------------------------------------------------
# Each party makes two fresh X25519 pairs, one to seal share bundles with (c_u), one to agree on masks with (s_u), and sends the
# public halves. The server passes each party the keys of its neighbours that answered. Under an active adversary both
# halves are signed with the party's identity key, for this instance and no other.


@dataclass(frozen=True)
class AdvertiseKeys(Message):
    TYPE = 20
    PHASE = Phase.ADVERTISE_KEYS
    cipher_key: bytes = b""
    mask_key: bytes = b""
    signature: bytes = b""  # empty unless the adversary is active

    def buffers(self) -> list[Buffer]:
        return [self.cipher_key, self.mask_key, self.signature]

    @staticmethod
    def wire_size(signed: bool) -> int:
        return 2 * KEY + (SIGNATURE if signed else 0)

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        cipher, mask, signature = bytes(reader.take(KEY)), bytes(reader.take(KEY)), bytes(reader.rest())
        if len(signature) not in (0, SIGNATURE):
            raise WireError(f"AdvertiseKeys: a signature of {len(signature)} bytes, expected {SIGNATURE} or none")
        return cipher, mask, signature


@dataclass(frozen=True)
class PeerKeys:
    party: int
    cipher_key: bytes
    mask_key: bytes
    signature: bytes = b""


@dataclass(frozen=True)
class KeyList(Message):
    """The advertised keys of a party's neighbours that answered, in party order. `digest` is that of everybody's keys, for who is
    shown some of them only; who is shown all works it out."""

    TYPE = 21
    PHASE = Phase.ADVERTISE_KEYS
    SIGNED: ClassVar[int] = 1  # bits of the first byte
    DIGEST: ClassVar[int] = 2
    peers: tuple[PeerKeys, ...] = ()
    digest: bytes = b""

    def buffers(self) -> list[Buffer]:
        signed = bool(self.peers and self.peers[0].signature)
        flags = bytes([self.SIGNED * signed + self.DIGEST * bool(self.digest)])
        return [flags, self.digest, _pack_rows((p.party, p.cipher_key + p.mask_key + p.signature) for p in self.peers)]

    @staticmethod
    def wire_size(peers: int, signed: bool, sparse: bool = False) -> int:
        row = COUNT.size + 2 * KEY + (SIGNATURE if signed else 0)
        return 1 + (DIGEST if sparse else 0) + COUNT.size + peers * row

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        flags = reader.take(1)[0]
        if flags > cls.SIGNED + cls.DIGEST:
            raise WireError(f"KeyList: flags {flags}, expected 0 to {cls.SIGNED + cls.DIGEST}")
        digest = bytes(reader.take(DIGEST)) if flags & cls.DIGEST else b""
        rows = _read_rows(reader, 2 * KEY + (SIGNATURE if flags & cls.SIGNED else 0))
        return tuple([PeerKeys(party, row[:KEY], row[KEY : 2 * KEY], row[2 * KEY :]) for party, row in rows]), digest


# ---- Round 1: ShareKeys ------------------------------------------------------------------------------------------------
# Each party draws b_u, splits b_u and s_u^SK among its neighbours and itself, and seals for each neighbour one bundle with a
# share of each. The server sees a commitment to b_u and ciphertexts, and passes each party the bundles made for it. b_u has 16
# bytes: it becomes the key of an AES-128 stream and nothing else.


@dataclass(frozen=True)
class Bundle:
    party: int  # the receiver on the way up, the sender on the way down
    sealed: bytes


def _pack_bundles(bundles: tuple[Bundle, ...]) -> bytes:
    return _pack_rows((bundle.party, bundle.sealed) for bundle in bundles)


def _read_bundles(reader: Reader, sizes: Callable[[int], bool]) -> tuple[Bundle, ...]:
    """To the end of the message, all of one size, which `sizes` has to allow."""
    count, rest = reader.count(), bytes(reader.rest())
    size, over = divmod(len(rest), count) if count else (0, len(rest))
    if over or (count and not sizes(size - COUNT.size)):
        raise WireError(f"{count} bundles in {len(rest)} bytes, which is not what bundles take")
    return tuple([Bundle(party, sealed) for party, sealed in _split_rows(rest, size)]) if count else ()


@dataclass(frozen=True)
class ShareKeys(Message):
    TYPE = 22
    PHASE = Phase.SHARE_KEYS
    bundles: tuple[Bundle, ...] = ()
    commitment: bytes = b""  # to b_u, so that a reconstructed b_u can be checked

    def buffers(self) -> list[Buffer]:
        return [self.commitment, _pack_bundles(self.bundles)]

    @staticmethod
    def wire_size(bundles: int) -> int:
        return COMMITMENT + COUNT.size + bundles * (COUNT.size + SEALED)

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        commitment = bytes(reader.take(COMMITMENT))
        return _read_bundles(reader, SEALED.__eq__), commitment


@dataclass(frozen=True)
class ShareBatch(Message):
    """In place of ShareKeys, for the keys of several rounds (`secagg.batch`). Of each round u draws b_u and a_u, and every bundle has a
    share of both for all rounds. What a_u opens is a list that stays with the server: the keys of that round's masks with all
    peers, in their order, sealed."""

    TYPE = 34
    PHASE = Phase.SHARE_KEYS
    bundles: tuple[Bundle, ...] = ()
    commitments: tuple[bytes, ...] = ()  # to b_u, a round each
    lists: tuple[bytes, ...] = ()  # sealed under a_u, a round each

    def buffers(self) -> list[Buffer]:
        counts = COUNT.pack(len(self.commitments)) + COUNT.pack(len(self.bundles))
        rows = b"".join([COUNT.pack(bundle.party) + bundle.sealed for bundle in self.bundles])
        return [counts, *self.commitments, *self.lists, rows]

    @staticmethod
    def wire_size(bundles: int, rounds: int) -> int:
        of_a_round = COMMITMENT + list_size(bundles)
        return 2 * COUNT.size + rounds * of_a_round + bundles * (COUNT.size + batch_sealed(rounds))

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        rounds, peers = reader.count(), reader.count()
        commitments = tuple([bytes(reader.take(COMMITMENT)) for _ in range(rounds)])
        lists = tuple([bytes(reader.take(list_size(peers))) for _ in range(rounds)])
        row = COUNT.size + batch_sealed(rounds)
        bundles = [Bundle(*entry) for entry in _split_rows(bytes(reader.take(peers * row)), row)]
        return tuple(bundles), commitments, lists


@dataclass(frozen=True)
class ShareList(Message):
    """The bundles made for one party. Masks are agreed with those of their senders whose bundle opens, and with nobody else."""

    TYPE = 23
    PHASE = Phase.SHARE_KEYS
    bundles: tuple[Bundle, ...] = ()

    def buffers(self) -> list[Buffer]:
        return [_pack_bundles(self.bundles)]

    @staticmethod
    def wire_size(bundles: int, rounds: int = 0) -> int:
        """`rounds` of a batch, 0: keys of one round as the paper has them."""
        return COUNT.size + bundles * (COUNT.size + (batch_sealed(rounds) if rounds else SEALED))

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return (_read_bundles(reader, lambda size: size == SEALED or size == batch_sealed(rounds_in(size))),)


# ---- Round 2: MaskedInput ----------------------------------------------------------------------------------------------
# y_u = x_u + PRG(b_u) + sum over v of +-PRG(s_uv), MMF (8) with key streams in place of scalars, in Z_{2^b}. The sum is over the
# peers whose bundle opened; those whose bundle did not are named in front of it, and leave the round or have the one who named
# them leave it. A party that can open too few to be opened itself says so and withdraws.


@dataclass(frozen=True)
class MaskedInput(Message):
    TYPE = 24
    PHASE = Phase.MASKED_INPUT
    values: bytes = b""  # packed by wire.bits
    unopened: tuple[int, ...] = ()  # peers that it did not mask with: their bundle did not open

    def buffers(self) -> list[Buffer]:
        return [pack_parties(self.unopened), self.values]

    @staticmethod
    def wire_size(dimension: int, bits: int, unopened: int = 0) -> int:
        return COUNT.size * (1 + unopened) + packed_size(dimension, bits)

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        unopened = read_parties(reader)
        return bytes(reader.rest()), unopened


@dataclass(frozen=True)
class Withdrawal(Message):
    """In place of its input: too few bundles opened."""

    TYPE = 29
    PHASE = Phase.MASKED_INPUT
    unopened: tuple[int, ...] = ()

    def buffers(self) -> list[Buffer]:
        return [pack_parties(self.unopened)]

    @staticmethod
    def wire_size(unopened: int) -> int:
        return COUNT.size * (1 + unopened)

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return (read_parties(reader),)


# ---- Round 3: ConsistencyCheck (active adversary only) -------------------------------------------------------------------
# The server names the survivors; each of them signs that list. Nobody opens a share before it has seen enough signatures under
# the very list it was shown, so a server cannot show different lists to different parties.


@dataclass(frozen=True)
class SurvivorList(Message):
    TYPE = 25
    PHASE = Phase.CONSISTENCY_CHECK
    survivors: tuple[int, ...] = ()

    def buffers(self) -> list[Buffer]:
        return [pack_parties(self.survivors)]

    @staticmethod
    def wire_size(survivors: int) -> int:
        return COUNT.size * (1 + survivors)

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return (read_parties(reader),)


@dataclass(frozen=True)
class ConsistencyCheck(Message):
    TYPE = 26
    PHASE = Phase.CONSISTENCY_CHECK
    signature: bytes = b""

    def buffers(self) -> list[Buffer]:
        return [self.signature]

    @staticmethod
    def wire_size() -> int:
        return SIGNATURE

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        return (bytes(reader.take(SIGNATURE)),)


# ---- Round 4: Unmask ---------------------------------------------------------------------------------------------------
# The server names, to each party, the neighbours whose input is in the sum (and, under an active adversary, the signatures on the
# whole list). The party opens one secret of each neighbour that it masked with: b_v if v's input is in the sum, s_v^SK if it is
# not. An answer is one or the other by its type, so leaking both cannot be written down. Of a dealer whose shares too few could
# open, s_v^SK cannot be found any more: `direct` names those, and a party then gives the key of the one mask that it agreed on
# with v, which s_v^SK would have given away as well.


@dataclass(frozen=True)
class Signed:
    """A party's signature on the survivors."""

    party: int
    signature: bytes


@dataclass(frozen=True)
class UnmaskRequest(Message):
    TYPE = 27
    PHASE = Phase.UNMASK
    survivors: tuple[int, ...] = ()
    signatures: tuple[Signed, ...] = ()  # empty unless the adversary is active
    direct: tuple[int, ...] = ()  # dropped parties whose secret too few hold

    def buffers(self) -> list[Buffer]:
        lists = pack_parties(self.survivors), pack_parties(self.direct)
        return [*lists, _pack_rows((s.party, s.signature) for s in self.signatures)]

    @staticmethod
    def wire_size(survivors: int, signatures: int, direct: int = 0) -> int:
        return COUNT.size * (3 + survivors + direct) + signatures * (COUNT.size + SIGNATURE)

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        survivors, direct = read_parties(reader), read_parties(reader)
        signatures = tuple([Signed(party, signature) for party, signature in _read_rows(reader, SIGNATURE)])
        return survivors, signatures, direct


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
class ListKeyShare:
    """A share of a_v, in a batch: v dropped out of this round, its list of the round is opened, and the masks come off."""

    owner: int
    share: bytes


@dataclass(frozen=True)
class PairMask:
    """The key of the mask that the answering party agreed on with v, which dropped out and dealt too few shares that open."""

    owner: int
    share: bytes


Answer = SelfMaskShare | PairKeyShare | PairMask | ListKeyShare
KINDS: tuple[tuple[Callable[..., Answer], int], ...] = (  # and the size of what is given
    (SelfMaskShare, SEED_SHARE),
    (PairKeyShare, KEY_SHARE),
    (PairMask, MASK_KEY),
    (ListKeyShare, SEED_SHARE),
)
NUMBERS = {kind: number for number, (kind, _) in enumerate(KINDS)}
ROW = struct.Struct("<BI")


@dataclass(frozen=True)
class Unmask(Message):
    TYPE = 28
    PHASE = Phase.UNMASK
    answers: tuple[Answer, ...] = ()

    def buffers(self) -> list[Buffer]:
        rows = (ROW.pack(NUMBERS[type(answer)], answer.owner) + answer.share for answer in self.answers)
        return [COUNT.pack(len(self.answers)) + b"".join(rows)]

    @staticmethod
    def wire_size(survivors: int, dropped: int = 0, direct: int = 0) -> int:
        """By whose secrets it opens: survivors' b_v (or, in a batch, dropped parties' a_v), dropped parties' s_v^SK, or the mask with
        one."""
        shares = survivors * SEED_SHARE + dropped * KEY_SHARE + direct * MASK_KEY
        return COUNT.size + (survivors + dropped + direct) * ROW.size + shares

    @classmethod
    def parse(cls, reader: Reader) -> tuple[Any, ...]:
        answers: list[Answer] = []
        for _ in range(reader.count()):
            number, owner = reader.fields(ROW)
            if number >= len(KINDS):
                raise WireError(f"Unmask: an answer of kind {number}, expected below {len(KINDS)}")
            kind, size = KINDS[number]
            answers.append(kind(owner, bytes(reader.take(size))))
        return (tuple(answers),)


register(
    AdvertiseKeys,
    KeyList,
    ShareKeys,
    ShareBatch,
    ShareList,
    MaskedInput,
    Withdrawal,
    SurvivorList,
    ConsistencyCheck,
    UnmaskRequest,
    Unmask,
)
