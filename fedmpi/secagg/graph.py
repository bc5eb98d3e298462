"""The communication graph of one secure-aggregation round: who masks with whom, and who holds shares of whose secrets.

`complete` is Bonawitz 2017: everyone with everyone. `regular` is Bell, Bonawitz, Gascón, Lepoint and Raykova 2020,
"Secure Single-Server Aggregation with (Poly)Logarithmic Overhead": the cohort is put on a circle in random order and
each party is joined to the k/2 nearest on both sides, a Harary graph with shuffled labels. In both, a party u deals its
shares to its closed neighbourhood N[u] (the neighbours and itself), and `threshold` of them reconstruct.

What k and t must hold off, for one round
-----------------------------------------
n parties, of which c = ceil(corrupt n) collude with the server and d = ceil(dropout n) vanish at some time in the
round. Both are bounds, not averages: if parties drop independently with rate p, `dropout` has to be above p by the
margin one wants. Both sets are fixed independently of the graph, which is drawn afterwards and afresh every round
(the server follows the protocol; one that picks the graph to fit the corrupt is another model and another protocol).
Then the k neighbours of a party are a uniform k-subset of the n - 1 others. With HG(N, K, k) the number of marked
objects among k drawn without replacement from N that hold K marked:

1. exposed: some honest party has t or more corrupt holders, who could reconstruct the secret that the survivors did
   not give away. Its own share stays with it, so all of them are neighbours. Union over the honest:

       (n - c) P[HG(n-1, c, k) >= t]

2. disconnected: the honest parties that stay, joined by the edges among them, fall apart; the server would then learn
   the sum of each part. Two of them that follow each other on the circle with fewer than k/2 removed in between are
   joined, so falling apart takes two disjoint runs of k/2 removed parties with somebody left on either side. There are
   n (n-k-1) / 2 such pairs of runs. With b = min(c + d, n) removed, corrupt and dropped counted apart, the worst case:

       n (n-k-1) / 2 * C(b, k) / C(n, k)

   (The coarser n (corrupt + dropout)^(k/2), which asks for one run and not for the second, would cost degree.)

3. lost: some party's secret cannot be reconstructed. A party that stays has its own share and those of the neighbours
   that stay; one that dropped has only those of its neighbours. Union over both kinds, in numbers of dropped
   neighbours:

       (n - d) P[HG(n-1, d, k) >= k + 2 - t]  +  d P[HG(n-1, d-1, k) >= k + 1 - t]

Privacy fails with probability at most 1 + 2, recovery at most 3. All three are for one round; over T rounds they add up
(ask for log2 T bits more). 2 counts on at most d losses: a round that loses more must end without unmasking.

On top of that t > |N[u]| / 2, always: two disjoint groups of holders can then never reconstruct both secrets of a
party. Towards a server that lies to some holders and has others in its pay that is not enough (it would take
2t > |N[u]| + corrupt holders); no more is claimed here than the honest-but-curious server.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmpi.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from fedmpi.randomness.words import WordSource

BITS = 40  # privacy and recovery each fail with probability at most 2^-40 a round, unless asked otherwise


@dataclass(frozen=True)
class Graph:
    """One round's graph. Made by `complete` or `regular`; lists are worked out when asked for, so that a graph of n
    parties takes O(n) memory and not O(nk)."""

    circle: tuple[int, ...] = field(repr=False)  # the cohort by its places; sorted where the graph is complete
    degree: int
    threshold: int  # shares that reconstruct a secret
    parties: tuple[int, ...] = field(init=False, repr=False, compare=False)  # the cohort, sorted
    _place: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_degree(self.degree, len(self.circle))
        check_threshold(self.threshold, self.degree + 1)
        parties = tuple(sorted(self.circle))
        object.__setattr__(self, "parties", parties)
        object.__setattr__(self, "_place", {party: place for place, party in enumerate(self.circle)})

    @property
    def is_complete(self) -> bool:
        return self.degree == len(self.circle) - 1

    def neighbours(self, party: int) -> tuple[int, ...]:
        """Who `party` agrees on masks with, sorted."""
        return tuple(holder for holder in self.holders(party) if holder != party)

    def holders(self, party: int) -> tuple[int, ...]:
        """Who gets a share of the secrets of `party`: its neighbours and itself, sorted."""
        place = self._place_of(party)
        if self.is_complete:
            return self.parties
        reach, n = self.degree // 2, len(self.circle)
        return tuple(sorted(self.circle[i % n] for i in range(place - reach, place + reach + 1)))

    def _place_of(self, party: int) -> int:
        try:
            return self._place[party]
        except KeyError:
            raise ProtocolError(f"not among the {len(self.circle)} parties of this round", party=party) from None


def check_cohort(n: int) -> None:
    if n < 2:
        raise ConfigError(f"a cohort of {n}: a sum hides something from 2 parties on")


def check_degree(degree: int, n: int) -> None:
    """Even, as `regular` builds it, or everybody."""
    if degree != n - 1 and not (degree % 2 == 0 and 2 <= degree < n - 1):
        raise ConfigError(f"degree {degree} for {n} parties: must be even and at least 2, or {n - 1} (complete)")


def check_threshold(threshold: int, holders: int) -> None:
    """More than half of the holders and at most all of them; a party checks this before it deals any share. With t <= n/2 a
    server could have one half open b_u and the other half s_u^SK, and read the input."""
    if not (2 * threshold > holders and threshold <= holders):
        raise ConfigError(
            f"threshold = {threshold}: must be above half of the {holders} holders of a share and at most all of them "
            f"({holders // 2 + 1} to {holders})"
        )


def default_threshold(holders: int) -> int:
    """Two thirds of the holders, rounded up."""
    return -(-2 * holders // 3)


def _sorted_cohort(cohort: Iterable[int]) -> tuple[int, ...]:
    parties = tuple(sorted(int(party) for party in cohort))
    check_cohort(len(parties))
    twice = [one for one, other in pairwise(parties) if one == other]
    if twice:
        raise ConfigError(f"party {twice[0]} is in the cohort twice: each party once")
    return parties


def complete(cohort: Iterable[int], threshold: int | None = None) -> Graph:
    """Everyone with everyone; two thirds reconstruct unless told otherwise."""
    parties = _sorted_cohort(cohort)
    n = len(parties)
    return Graph(parties, n - 1, default_threshold(n) if threshold is None else threshold)


def regular(cohort: Iterable[int], degree: int, threshold: int, source: WordSource) -> Graph:
    """The cohort on a circle in an order drawn from `source`, each joined to the degree/2 nearest on either side.

    The order depends on the set of parties and the source alone, not on the order in which they are listed. Only even
    degrees: an odd one needs an even n and would buy one share more, but nothing in bound 2. A degree that reaches
    everybody gives the complete graph, and nothing is drawn.
    """
    parties = _sorted_cohort(cohort)
    if degree >= len(parties) - 1:
        return complete(parties, threshold)
    return Graph(tuple(parties[i] for i in _permutation(len(parties), source)), degree, threshold)


def _permutation(n: int, source: WordSource) -> list[int]:
    # Sorting by distinct random keys gives every order equally often. Equal keys, once in 2^65 / n^2 draws, would
    # favour the listed order, so that draw is thrown away.
    while True:
        keys = source.words(n)
        order = np.argsort(keys, kind="stable")
        ranked = keys[order]
        if np.all(ranked[1:] != ranked[:-1]):
            return [int(place) for place in order]


@lru_cache(maxsize=4096)
def regular_parameters(
    n: int, corrupt: float, dropout: float, security_bits: float = BITS, failure_bits: float = BITS
) -> tuple[int, int]:
    """The smallest degree k, even or n - 1, for which a threshold t > (k + 1)/2 exists with

        exposed + disconnected <= 2^-security_bits   and   lost <= 2^-failure_bits

    and that t. `exposed` falls and `lost` grows with t, so those that do are a range; the middle one is taken, which
    leaves both sides the same number of shares to spare. Degrees are tried in increasing order, because t is an integer
    and a larger degree is now and then worse than the one before it. k = n - 1 is the complete graph, where nothing is
    left to chance: it serves whenever some t > n/2 has c < t <= n - d, and small cohorts get it under large rates.
    """
    c, d = _worst_counts(n, corrupt, dropout)
    if not (security_bits > 0 and failure_bits > 0):
        raise ConfigError(f"security bits {security_bits} and failure bits {failure_bits}: must be positive")
    if max(c, n // 2) >= n - d:
        raise ConfigError(
            f"corrupt {corrupt:g} and dropout {dropout:g} of {n} parties ({c} and {d}): even the complete graph has no "
            f"threshold above {max(c, n // 2)} (the corrupt, half of the holders) that the {n - d} left can reach; "
            "corrupt + dropout must stay below 1 and dropout below 1/2"
        )
    security, failure = security_bits * math.log(2), failure_bits * math.log(2)
    degrees = chain(range(2, n - 1, 2), [n - 1])
    return next((k, t) for k in degrees if (t := _middle_threshold(n, k, c, d, security, failure)) is not None)


def _middle_threshold(n: int, degree: int, c: int, d: int, security: float, failure: float) -> int | None:
    """The threshold for this degree, if there is one. Bounds in nats."""
    disconnected = _log_disconnected(n, degree, c + d)
    if disconnected > -security:  # cheap, and settles most small degrees
        return None
    exposed, _, lost = _log_bounds(n, degree, c, d)
    t = np.arange(degree + 2)
    private = np.logaddexp(exposed, disconnected) <= -security
    fits = np.flatnonzero(private & (lost <= -failure) & (2 * t > degree + 1))
    return int(fits[(len(fits) - 1) // 2]) if len(fits) else None


def _worst_counts(n: int, corrupt: float, dropout: float) -> tuple[int, int]:
    check_cohort(n)
    for name, rate in (("corrupt", corrupt), ("dropout", dropout)):
        if not 0 <= rate < 1:
            raise ConfigError(f"{name} rate {rate}: must be at least 0 and below 1")
    c, d = (min(n - 1, share_of(n, rate)) for rate in (corrupt, dropout))
    return c, d


def share_of(n: int, rate: float) -> int:
    """Rounded up, so that a rate above zero is never nobody; less float dust, so that 0.07 of 100 is 7 and not 8."""
    return math.ceil(rate * n - 1e-9)


def _log_bounds(n: int, degree: int, c: int, d: int) -> tuple[NDArray[np.float64], float, NDArray[np.float64]]:
    """ln of bounds 1, 2 and 3 of the module's text; 1 and 3 at every threshold 0 .. degree + 1."""
    k = degree
    exposed = math.log(n - c) + _log_upper_tails(n - 1, c, k)
    # Tails are indexed by a number of dropped neighbours: k + 2 - t for t = 1 .. k + 1, and t = 0 is never lost.
    lost = np.full(k + 2, -np.inf)
    lost[1:] = math.log(n - d) + _log_upper_tails(n - 1, d, k)[:0:-1]
    if d > 0:
        lost[1:] = np.logaddexp(lost[1:], math.log(d) + _log_upper_tails(n - 1, d - 1, k)[k::-1])
    return exposed, _log_disconnected(n, k, c + d), lost


def _log_disconnected(n: int, degree: int, removed: int) -> float:
    pairs_of_runs = n * (n - degree - 1) // 2
    if pairs_of_runs == 0 or removed < degree:
        return -math.inf
    i = np.arange(degree)
    return math.log(pairs_of_runs) + float(np.sum(np.log((min(removed, n) - i) / (n - i))))


def _log_upper_tails(population: int, marked: int, draws: int) -> NDArray[np.float64]:
    """ln P[X >= x] for x = 0 .. draws + 1, X the number of marked objects among the drawn ones.

    From the ratios of neighbouring probabilities, summed from the far end of the tail and divided by the whole: no
    difference of large numbers is taken, so it is as accurate for a billion parties, and where P would underflow.
    """
    low, high = max(0, draws - (population - marked)), min(draws, marked)
    x = np.arange(low, high, dtype=np.float64)
    ratios = (marked - x) * (draws - x) / ((x + 1) * (population - marked - draws + x + 1))
    weights = np.concatenate([[0.0], np.cumsum(np.log(ratios))])
    tails = np.logaddexp.accumulate(weights[::-1])[::-1]
    out = np.full(draws + 2, -np.inf)
    out[:low] = 0.0
    out[low : high + 1] = tails - tails[0]
    return out
