"""A shared secret from the shares of those who hold them, although some of them may lie.

Wrong shares are found by Reed-Solomon decoding as far as that goes, half of the shares to spare. Beyond it the owner's commitment
helps: whoever is left out, the right secret is known when it is found. So one lying holder, and all parties of one lying rank, can
be left out as long as enough others are there. Where that was tried and nothing fits, it was the dealer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations

from fedmpi.crypto.shamir import Field, decode, int_to_secret, lagrange_weights, reconstruct
from fedmpi.errors import CryptoError
from fedmpi.secagg.disputes import Group, alone

TRIES = 2000  # subsets of holders that are left out, over all secrets of a round
Shares = Mapping[int, tuple[int, int]]  # holder -> (place, share)


@dataclass(frozen=True)
class Dealt:
    """A secret of somebody, as far as its shares came back."""

    owner: int
    shares: Shares
    fits: Callable[[bytes], bool]  # whether a secret is the one that the owner committed to
    field: Field

    def value(self, number: int) -> bytes | None:
        """The secret, if it is that."""
        try:
            secret = int_to_secret(number, self.field)
        except CryptoError:
            return None
        return secret if self.fits(secret) else None

    def without(self, left_out: frozenset[int], count: int) -> list[tuple[int, int]]:
        """The first so many shares of others."""
        return [share for holder, share in self.shares.items() if holder not in left_out][:count]


class Unfit(CryptoError):
    """Shares that fit no commitment. `dealt`: no one rank's lies explain it, so that they were dealt like that."""

    def __init__(self, owner: int, dealt: bool):
        self.dealt = dealt
        why = "it dealt them so" if dealt else "there are too few to tell who lied"
        super().__init__(f"the shares of party {owner} do not fit its commitment, and {why}")


class Opening:
    """For all secrets of a round: owners with the same places left share their Lagrange weights."""

    def __init__(self, threshold: int, group: Group = alone):
        self._threshold, self._group = threshold, group
        self._weights: dict[tuple[Field, tuple[int, ...]], list[int]] = {}
        self._liars: list[frozenset[int]] = []  # who was found out over another secret
        self._tries = TRIES

    def open(self, dealt: Dealt) -> tuple[bytes, list[int]]:
        """(the secret, the holders whose shares were wrong); CryptoError if it cannot be found."""
        t, found = self._threshold, len(dealt.shares)
        if found < t:
            raise CryptoError(f"{found} shares of party {dealt.owner} came back, the threshold is {t}")
        secret = self._without(frozenset(), dealt)
        if secret is not None:
            return secret, []
        return self._decoded(dealt) or self._searched(dealt)

    def _without(self, left_out: frozenset[int], dealt: Dealt) -> bytes | None:
        """The secret by the first t others, if it is that."""
        points, values = map(list, zip(*dealt.without(left_out, self._threshold)))
        return dealt.value(reconstruct(self._weights_at(tuple(points), dealt.field), values, dealt.field))

    def _decoded(self, dealt: Dealt) -> tuple[bytes, list[int]] | None:
        points, values = map(list, zip(*dealt.shares.values()))
        try:
            value, wrong = decode(points, values, self._threshold, dealt.field)
        except CryptoError:
            return None
        secret, holders = dealt.value(value), list(dealt.shares)
        return None if secret is None else (secret, [holders[position] for position in wrong])

    def _searched(self, dealt: Dealt) -> tuple[bytes, list[int]]:
        shares = dealt.shares
        for left_out in self._suspects(shares):
            if self._tries == 0:
                break
            self._tries -= 1
            secret = self._without(left_out, dealt)
            if secret is not None:
                self._liars.append(left_out)
                return secret, self._wrong(left_out, dealt)
        # One lying holder, or rank, was left out at some time, if it can be.
        ranks, spare = self._ranks(shares), len(shares) - self._threshold
        tried = TRIES - self._tries >= len(shares) + len(ranks)
        raise Unfit(dealt.owner, dealt=tried and all(len(members) <= spare for members in ranks))

    def _suspects(self, shares: Shares) -> Iterator[frozenset[int]]:
        """Whom to leave out: who lied before, each one, each rank, any two, any three and so on, as far as enough others are left."""
        spare = len(shares) - self._threshold
        several = (combinations(shares, number) for number in range(2, spare + 1))
        sets = chain(self._liars, ([holder] for holder in shares), self._ranks(shares), chain.from_iterable(several))
        for suspects in map(frozenset, sets):
            if len(suspects & shares.keys()) <= spare:
                yield suspects

    def _ranks(self, shares: Shares) -> list[frozenset[int]]:
        ranks: dict[int, set[int]] = {}
        for holder in shares:
            ranks.setdefault(self._group(holder), set()).add(holder)
        return list(map(frozenset, ranks.values()))

    def _wrong(self, left_out: frozenset[int], dealt: Dealt) -> list[int]:
        """Whose shares are not on the polynomial of the others."""
        good = dealt.without(left_out, self._threshold)
        shares = dealt.shares.items()
        return [holder for holder, (point, value) in shares if _at(point, good, dealt.field.prime) != value]

    def _weights_at(self, points: tuple[int, ...], field: Field) -> list[int]:
        if (field, points) not in self._weights:
            self._weights[field, points] = lagrange_weights(points, field)
        return self._weights[field, points]


def _at(x: int, shares: list[tuple[int, int]], prime: int) -> int:
    """The polynomial through these, at another place."""
    total = 0
    for j, (point, value) in enumerate(shares):
        above = below = 1
        for m, (other, _) in enumerate(shares):
            if m != j:
                above, below = above * (x - other) % prime, below * (point - other) % prime
        total += value * above * pow(below, -1, prime)
    return total % prime
