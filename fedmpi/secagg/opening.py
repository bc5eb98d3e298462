"""A shared secret from the shares of those who hold them, although some of them may lie.

Wrong shares are found by Reed-Solomon decoding as far as that goes, half of the shares to spare. Beyond it the owner's commitment
helps: whoever is left out, the right secret is known when it is found. So one lying holder, and all parties of one lying rank, can
be left out as long as enough others are there. Where that was tried and nothing fits, it was the dealer.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, combinations

from fedmpi.crypto.shamir import PRIME, decode, int_to_secret, lagrange_weights, reconstruct
from fedmpi.errors import CryptoError
from fedmpi.secagg.disputes import Group, alone

TRIES = 2000  # subsets of holders that are left out, over all secrets of a round
Shares = Mapping[int, tuple[int, int]]  # holder -> (place, share)
Fits = Callable[[bytes], bool]


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
        self._weights: dict[tuple[int, ...], list[int]] = {}
        self._liars: list[frozenset[int]] = []  # who was found out over another secret
        self._tries = TRIES

    def open(self, owner: int, shares: Shares, fits: Fits) -> tuple[bytes, list[int]]:
        """(the secret, the holders whose shares were wrong); `fits` says whether a secret is the one that the owner committed to.
        CryptoError if it cannot be found."""
        t = self._threshold
        if len(shares) < t:
            raise CryptoError(f"{len(shares)} shares of party {owner} came back, the threshold is {t}")
        secret = self._without(frozenset(), shares, fits)
        if secret is not None:
            return secret, []
        return self._decoded(shares, fits) or self._searched(owner, shares, fits)

    def _without(self, left_out: frozenset[int], shares: Shares, fits: Fits) -> bytes | None:
        """The secret by the first t others, if it is that."""
        used = [share for holder, share in shares.items() if holder not in left_out][: self._threshold]
        points, values = map(list, zip(*used))
        return _checked(reconstruct(self._weights_at(tuple(points)), values), fits)

    def _decoded(self, shares: Shares, fits: Fits) -> tuple[bytes, list[int]] | None:
        points, values = map(list, zip(*shares.values()))
        try:
            value, wrong = decode(points, values, self._threshold)
        except CryptoError:
            return None
        secret, holders = _checked(value, fits), list(shares)
        return None if secret is None else (secret, [holders[position] for position in wrong])

    def _searched(self, owner: int, shares: Shares, fits: Fits) -> tuple[bytes, list[int]]:
        for left_out in self._suspects(shares):
            if self._tries == 0:
                break
            self._tries -= 1
            secret = self._without(left_out, shares, fits)
            if secret is not None:
                self._liars.append(left_out)
                return secret, self._wrong(left_out, shares)
        # One lying holder, or rank, was left out at some time, if it can be.
        ranks, spare = self._ranks(shares), len(shares) - self._threshold
        tried = TRIES - self._tries >= len(shares) + len(ranks)
        raise Unfit(owner, dealt=tried and all(len(members) <= spare for members in ranks))

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

    def _wrong(self, left_out: frozenset[int], shares: Shares) -> list[int]:
        """Whose shares are not on the polynomial of the others."""
        good = [share for holder, share in shares.items() if holder not in left_out][: self._threshold]
        return [holder for holder, (point, value) in shares.items() if _at(point, good) != value]

    def _weights_at(self, points: tuple[int, ...]) -> list[int]:
        if points not in self._weights:
            self._weights[points] = lagrange_weights(points)
        return self._weights[points]


def _at(x: int, shares: list[tuple[int, int]]) -> int:
    """The polynomial through these, at another place."""
    total = 0
    for j, (point, value) in enumerate(shares):
        above = below = 1
        for m, (other, _) in enumerate(shares):
            if m != j:
                above, below = above * (x - other) % PRIME, below * (point - other) % PRIME
        total += value * above * pow(below, -1, PRIME)
    return total % PRIME


def _checked(value: int, fits: Fits) -> bytes | None:
    try:
        secret = int_to_secret(value)
    except CryptoError:
        return None
    return secret if fits(secret) else None
