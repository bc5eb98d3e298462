"""Keys for a batch of rounds: AdvertiseKeys and ShareKeys once, then each round is MaskedInput and Unmask.

Each party deals, for every round r of the batch, two fresh seeds: b_u^r, behind its own mask, and a_u^r, which seals the list of the keys
that it shares with its peers in that round. Both are in the batch's one set of bundles, the lists lie with the server. So a party that
vanishes from a round has its list of that round opened, by shares of a_u^r, and no other; s_u^SK is never dealt, and is gone once
the lists are made. fedmpi/secagg/README.md has the protocol and why it is safe.

A party keeps what is left of a batch in buffers that are wiped round by round, as far as Python lets one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fedmpi.crypto.keys import PAIR_MASK, SELF_MASK, Channel, commit, derive
from fedmpi.crypto.masks import MASK_KEY_BYTES
from fedmpi.crypto.shamir import SEEDS, create_shares, encode_share, is_share, secret_to_int
from fedmpi.errors import CryptoError
from fedmpi.secagg.dealing import Dealing, Keyed, Meeting, Ring, seal, unseal
from fedmpi.secagg.messages import SEED_SHARE, ListKeyShare, PeerKeys, ShareBatch
from fedmpi.secagg.rules import Meter, Rules
from fedmpi.secagg.transcript import Transcript
from fedmpi.wire.phases import Cost, Phase

PAIR_ROUNDS = b"fedmpi/pair-rounds/1"
ROUND_LIST = b"fedmpi/round-list/1"
SEED = SEEDS.secret_bytes
OF_A_ROUND = 2 * SEED_SHARE  # in a bundle


def cut(text: bytes | bytearray, size: int, place: int) -> bytes:
    """Number `place` of pieces of this size."""
    return bytes(text[place * size : (place + 1) * size])


def list_channel(seed: bytes, transcript: Transcript, owner: int, round: int, sealing: bool) -> Channel:
    """What a list is sealed with, and opened. A seed seals one list."""
    place = transcript.context(owner, round)
    return Channel(derive(seed, ROUND_LIST, place), sealing, place, place)


def round_mask(pair_key: bytes, transcript: Transcript, party: int, peer: int) -> bytes:
    """The key of the mask that two parties add and subtract in a round, from the key that both have for it: with another model, or
    other coordinates, it is another one. `transcript`: the round's."""
    return derive(pair_key, PAIR_MASK, transcript.context(min(party, peer), max(party, peer)), MASK_KEY_BYTES)


@dataclass(frozen=True, repr=False, eq=False)
class BatchDealing(Dealing):
    party: int
    first: int
    peers: Mapping[int, PeerKeys]
    transcript: Transcript  # of the batch
    instance: bytes  # the batch's name, in which all is that its rounds have in common
    seeds: bytes  # b of every round
    own: bytes  # its own shares, as a bundle has them
    pairs: dict[int, bytes]  # by peer: the keys of every round
    channels: dict[int, Channel]

    @classmethod
    def deal(cls, meeting: Meeting) -> tuple["BatchDealing", ShareBatch]:
        rules, party, transcript, points = meeting.rules, meeting.party, meeting.transcript, meeting.points()
        assert rules.batch is not None, "of a batch"
        first, last = rules.batch
        rounds = range(first, last + 1)
        seeds, sealing = (meeting.random(SEED * len(rounds)) for _ in range(2))
        with meeting.meter(Phase.SHARE_KEYS, Cost.SHAMIR_SPLIT):
            secrets = [secret_to_int(cut(of, SEED, at), SEEDS) for at in range(len(rounds)) for of in (seeds, sealing)]
            shares = create_shares(
                secrets, rules.threshold, list(points.values()), meeting.random, [SEEDS] * len(secrets)
            )
            texts = dict(zip(points, (b"".join([encode_share(s, SEEDS) for s in row]) for row in zip(*shares))))
        contexts = meeting.contexts()
        channels = meeting.channels(contexts)
        with meeting.meter(Phase.SHARE_KEYS, Cost.DH):
            pairs = {peer: cls._pair(meeting, peer, contexts[peer], len(rounds)) for peer in sorted(meeting.peers)}
        with meeting.meter(Phase.SHARE_KEYS, Cost.AEAD):
            lists = [
                list_channel(cut(sealing, SEED, at), transcript, party, round, True).seal(
                    b"".join([cut(keys, MASK_KEY_BYTES, at) for keys in pairs.values()])
                )
                for at, round in enumerate(rounds)
            ]
        bundles = seal(channels, texts, meeting.meter)
        commitments = [
            commit(cut(seeds, SEED, at), transcript.context(party, round)) for at, round in enumerate(rounds)
        ]
        after = cls(party, first, meeting.peers, transcript, rules.instance, seeds, texts[party], pairs, channels)
        return after, rules.message(ShareBatch, party, bundles, tuple(commitments), tuple(lists))

    @staticmethod
    def _pair(meeting: Meeting, peer: int, contexts: tuple[bytes, bytes], rounds: int) -> bytes:
        """The keys of all rounds in one derivation: pieces of one output are as independent as outputs."""
        try:
            agreed = meeting.mask.shared(meeting.peers[peer].mask_key)
        except CryptoError:
            raise meeting.disagrees(peer) from None
        return derive(agreed, PAIR_ROUNDS, contexts[0 if meeting.party < peer else 1], MASK_KEY_BYTES * rounds)

    def open(self, sealed: Mapping[int, bytes]) -> "BatchRing":
        read = {sender: unseal(self.channels[sender], text) for sender, text in sealed.items()}
        opened = {sender: text for sender, text in read.items() if text is not None and _are_shares(text, self.own)}
        return BatchRing(self, opened, tuple(sorted(sealed.keys() - opened.keys())))


def _are_shares(text: bytes, own: bytes) -> bool:
    places = range(len(text) // SEED_SHARE)
    return len(text) == len(own) and all(is_share(cut(text, SEED_SHARE, at), SEEDS) for at in places)


class BatchRing(Ring):
    """What a party has left of a batch."""

    def __init__(self, dealt: BatchDealing, opened: Mapping[int, bytes], unopened: tuple[int, ...]):
        self.party, self.first, self.unopened = dealt.party, dealt.first, unopened
        self._transcript, self._instance = dealt.transcript, dealt.instance
        self._seeds = bytearray(dealt.seeds)
        self._held = {owner: bytearray(text) for owner, text in (*opened.items(), (dealt.party, dealt.own))}
        self._pairs = {peer: bytearray(dealt.pairs[peer]) for peer in opened}
        self._next = 0  # rounds before are gone

    def __repr__(self) -> str:
        return "BatchRing(secret)"

    @property
    def holds(self) -> int:
        return len(self._held)

    def has(self, round: int) -> bool:
        """Whether the keys of this round are still there."""
        return self._next <= round - self.first < len(self._seeds) // SEED

    def is_for(self, rules: Rules) -> bool:
        """Whether a round has the cohort, the threshold, the settings that these keys were made for: none of them is in its transcript
        but by the batch's."""
        return rules.instance == self._instance

    def take(self, rules: Rules, meter: Meter) -> Keyed:
        if not self.has(rules.round):
            raise CryptoError(f"the keys of round {rules.round} are gone")
        place, party, round = rules.round - self.first, self.party, self._transcript.of_round(rules)
        own_mask = derive(cut(self._seeds, SEED, place), SELF_MASK, round.context(party), MASK_KEY_BYTES)
        with meter(Phase.MASKED_INPUT, Cost.DH):
            masks = {
                peer: round_mask(cut(keys, MASK_KEY_BYTES, place), round, party, peer)
                for peer, keys in self._pairs.items()
            }
        held = {
            owner: (cut(text, SEED_SHARE, 2 * place), cut(text, SEED_SHARE, 2 * place + 1))
            for owner, text in self._held.items()
        }
        self.forget(place + 1)
        return Keyed(round, own_mask, masks, held, ListKeyShare)

    def forget(self, rounds: int) -> None:
        """The keys of so many rounds from the first: none of them is taken any more."""
        kinds = ([self._seeds], SEED), (self._pairs.values(), MASK_KEY_BYTES), (self._held.values(), OF_A_ROUND)
        for texts, size in kinds:
            for text in texts:
                text[self._next * size : rounds * size] = bytes((rounds - self._next) * size)
        self._next = rounds
