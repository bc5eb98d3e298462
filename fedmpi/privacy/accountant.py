"""What the noise proves: epsilon from the rounds that really happened, and the noise that a target epsilon asks for.

One round releases a sum of updates, each of norm at most its sensitivity, under noise of standard deviation
`multiplier` times the sensitivity. Neighbours differ by one party, which was in the cohort with probability q (Poisson
sampling).

Two kinds of composition:

`rdp`: Renyi differential privacy, converted to (epsilon, delta) as dp-accounting does. It holds for integer noise too.
At q = 1 the discrete Gaussian keeps alpha / (2 multiplier**2) at every order alpha, as the continuous one does
(Canonne, Kamath, Steinke 2020). At q < 1 and an *integer* order, the moment of the sampled mechanism is a binomial sum
of the unsampled one's moments of orders up to alpha, so whatever bounds those bounds the sum; and the opposite
direction is never worse, because that takes only a reflection that swaps the two neighbouring distributions (Mironov,
Talwar, Zhang 2019), and for an integer shift v the reflection x -> v - x maps the lattice to itself. At a fractional
order the formula is an integral over the continuous density and says nothing about integers. Hence integer orders
where q < 1, and fractional ones at q = 1 alone.

`pld`: privacy loss distributions. Tighter, but derived for the continuous Gaussian, so `nominal` where noise is
integer.

At q = 1 both are closed forms here, because that is on the start-up path of every rank-0 process and dp-accounting
takes more than a second to import. At q < 1 dp-accounting computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fedmpi.errors import ConfigError

KINDS = ("rdp", "pld")

# At q = 1 any order may be taken: a grid so dense that its best epsilon is within 1e-5 of that of the best real order,
# for epsilon from 1e-3 to 1e3. It costs a fraction of a millisecond.
ORDERS_FULL = 1.0 + np.geomspace(0.011, 2e5, 3000)

# At q < 1 integers only (see above); the cost of an order is linear in it.
ORDERS_SAMPLED = np.array([*range(2, 65), 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 1024], dtype=np.int64)


def _log_conversion(orders: np.ndarray, delta: float) -> np.ndarray:
    """What each order adds to its Renyi divergence to make an epsilon: Canonne, Kamath, Steinke (2020), prop. 12."""
    return np.asarray(np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0))


def rdp_epsilon(orders: np.ndarray, rdp: np.ndarray, delta: float) -> float:
    """The least epsilon that Renyi divergences `rdp` at `orders` (all above 1.01) prove at `delta`."""
    # A divergence so small that the total variation itself stays below delta, sqrt(1 - exp(-KL)) < delta: epsilon is 0.
    if float(np.min(rdp)) < -math.log1p(-delta * delta):
        return 0.0
    return max(0.0, float(np.min(rdp + _log_conversion(orders, delta))))


def _log_tail(x: float) -> float:
    """log of the standard normal's upper tail, P[N > x], also where that is too small for a float."""
    if x < 25.0:
        return math.log(0.5 * math.erfc(x / math.sqrt(2.0)))
    # Mills ratio as a continued fraction, 1/(x + 1/(x + 2/(x + ...))): exact to the last bit from here on.
    ratio = x
    for k in range(20, 0, -1):
        ratio = x + k / ratio
    return -0.5 * x * x - 0.5 * math.log(2.0 * math.pi) - math.log(ratio)


def gaussian_delta(multiplier: float, epsilon: float) -> float:
    """The exact delta of one Gaussian mechanism at epsilon (Balle and Wang 2018, theorem 8)."""
    upper = _log_tail(epsilon * multiplier - 0.5 / multiplier)
    lower = _log_tail(epsilon * multiplier + 0.5 / multiplier) + epsilon
    return math.exp(upper) * -math.expm1(min(0.0, lower - upper))


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """The exact epsilon of one Gaussian mechanism at delta, from above."""
    return _least(lambda epsilon: gaussian_delta(multiplier, epsilon) <= delta, start=1.0)


def _least(holds: Callable[[float], bool], start: float) -> float:
    """The least x >= 0 at which a monotone condition holds, to the last bits, from the side on which it does."""
    if holds(0.0):
        return 0.0
    high = start
    while not holds(high):
        high *= 2.0
        if high > 1e300:
            return math.inf
    low = high / 2.0
    while low > 1e-300 and holds(low):
        low, high = low / 2.0, low
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high or high - low <= 1e-14 * high:
            return high
        low, high = (low, middle) if holds(middle) else (middle, high)


def _closed(rho: float, delta: float, kind: str) -> float:
    """epsilon of unsampled rounds with rho = sum of 1/(2 multiplier**2). Their composition is a single Gaussian."""
    if rho == 0.0:
        return 0.0
    if math.isinf(rho):
        return math.inf
    if kind == "pld":
        return gaussian_epsilon(1.0 / math.sqrt(2.0 * rho), delta)
    return rdp_epsilon(ORDERS_FULL, rho * ORDERS_FULL, delta)


def _rho(multiplier: float) -> float:
    # Divided twice, not squared first: a multiplier of 1e-200 is no noise at all, and not a division by zero.
    return 0.5 / multiplier / multiplier if multiplier > 0.0 else math.inf


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"accountant {kind!r}: must be one of {', '.join(KINDS)}")


def _check_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ConfigError(f"delta {delta}: must be above 0 and below 1")


def _check_round(multiplier: float, q: float) -> None:
    if not multiplier >= 0.0:
        raise ConfigError(f"noise multiplier {multiplier}: must be 0 or more")
    if not 0.0 <= q <= 1.0:
        raise ConfigError(f"sampling probability q {q}: must be between 0 and 1")


def _sampled_event(multiplier: float, q: float) -> Any:
    import dp_accounting

    return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(multiplier))


def _sampled_rdp(multiplier: float, q: float) -> np.ndarray:
    from dp_accounting import rdp

    return np.asarray(rdp.RdpAccountant(ORDERS_SAMPLED).compose(_sampled_event(multiplier, q)).rdp)


def proven(multiplier: float, delta: float, q: float, rounds: int, kind: str = "rdp") -> float:
    """The epsilon that `rounds` rounds of this multiplier prove at delta, without dp-accounting: what a rank holds rank 0's noise
    against. Not for `pld` at q < 1, which has no such form."""
    _check_kind(kind)
    _check_delta(delta)
    _check_round(multiplier, q)
    full = _closed(rounds * _rho(multiplier), delta, kind)
    if q == 1.0 or full == 0.0 or math.isinf(full):
        return full
    if kind == "pld":
        raise ValueError("pld at q < 1 is dp-accounting's")
    return min(full, rdp_epsilon(ORDERS_SAMPLED, rounds * _integer_rdp(multiplier, q), delta))


def _integer_rdp(multiplier: float, q: float) -> np.ndarray:
    """The Renyi divergences at ORDERS_SAMPLED of one sampled round, Mironov, Talwar, Zhang (2019): at order a the a-th moment is the mean
    of exp(k(k-1) / (2 multiplier**2)) over a binomial k. Its excess over 1 is summed, so that small ones are exact."""
    most = int(ORDERS_SAMPLED[-1])
    factorials = np.cumsum(np.log(np.arange(1, most + 1)))
    k = np.arange(2, most + 1)  # 0 and 1 add nothing to the excess
    exponent = k * (k - 1) * _rho(multiplier)
    excess = exponent + np.log(-np.expm1(-exponent))
    found = []
    for order in ORDERS_SAMPLED.tolist():
        own = k[: order - 1]
        left = np.where(own < order, factorials[np.maximum(order - own, 1) - 1], 0.0)
        ways = factorials[order - 1] - factorials[own - 1] - left
        terms = ways + own * math.log(q) + (order - own) * math.log1p(-q) + excess[: order - 1]
        found.append(float(np.logaddexp(0.0, np.logaddexp.reduce(terms))) / (order - 1))
    return np.array(found)


def calibrate(epsilon: float, delta: float, q: float, rounds: int, kind: str = "rdp") -> float:
    """The least noise multiplier with which `rounds` rounds at sampling probability q keep (epsilon, delta): the
    standard deviation of the sum's noise is that many times the sensitivity. An infinite epsilon asks for no noise,
    0."""
    _check_kind(kind)
    _check_delta(delta)
    _check_round(0.0, q)
    if not epsilon > 0.0:
        raise ConfigError(f"epsilon {epsilon}: must be above 0 (inf for no noise)")
    if rounds < 1:
        raise ConfigError(f"rounds {rounds}: must be 1 or more")
    if math.isinf(epsilon) or q == 0.0:
        return 0.0
    full = _calibrate_full(epsilon, delta, rounds, kind)
    return full if q == 1.0 else _calibrate_sampled(epsilon, delta, q, rounds, kind, full)


def _calibrate_full(epsilon: float, delta: float, rounds: int, kind: str) -> float:
    if kind == "pld":
        single = _least(lambda m: m > 0.0 and gaussian_delta(m, epsilon) <= delta, start=1.0)
        sigma = single * math.sqrt(rounds)
    else:
        # alpha rho + conversion(alpha) <= epsilon is solved for rho; the best order is the one that allows the most.
        rho = float(np.max((epsilon - _log_conversion(ORDERS_FULL, delta)) / ORDERS_FULL))
        rho = max(rho, -math.log1p(-delta * delta) / float(ORDERS_FULL[0]))
        sigma = math.sqrt(rounds / (2.0 * rho))
    # Roundings may leave epsilon a bit above its target: step up until the accountant itself agrees.
    while _closed(rounds * _rho(sigma), delta, kind) > epsilon:
        sigma *= 1.0 + 1e-14
    return sigma


def _calibrate_sampled(epsilon: float, delta: float, q: float, rounds: int, kind: str, full: float) -> float:
    import dp_accounting
    from dp_accounting import pld, rdp

    def spent(sigma: float) -> float:
        return float(fresh().compose(_sampled_event(sigma, q), rounds).get_epsilon(delta))

    if kind == "pld":
        # The privacy loss distribution is tighter than RDP: a bracket just below the RDP answer saves most evaluations.
        high = _calibrate_sampled(epsilon, delta, q, rounds, "rdp", _calibrate_full(epsilon, delta, rounds, "rdp"))
        low, fresh, precision = 0.85 * high, pld.PLDAccountant, 1e-6
        while spent(high) > epsilon:
            high *= 1.1  # only where its discretisation, which errs upwards, costs more than it gains
    else:
        high, low, precision = full, q * full, 1e-8

        def fresh() -> Any:
            return rdp.RdpAccountant(ORDERS_SAMPLED)

        if spent(high) > epsilon:
            # So large an epsilon that its best order is below 2: sampling never costs, so the answer at q = 1 stands.
            return full
    while spent(low) <= epsilon:
        low *= 0.75
    found = dp_accounting.calibrate_dp_mechanism(
        fresh,
        lambda sigma: dp_accounting.SelfComposedDpEvent(_sampled_event(sigma, q), rounds),
        epsilon,
        delta,
        dp_accounting.ExplicitBracketInterval(low, high),
        tol=precision * high,
    )
    return float(found)


class Accountant:
    """Composes what the rounds really did, towards whoever sees the released models.

    `spend` takes each round's own multiplier (standard deviation of the noise that survivors really put into the sum,
    over the sensitivity), so a round with dropouts counts for what it was, not for what the configuration hoped.
    """

    def __init__(self, kind: str = "rdp"):
        _check_kind(kind)
        self.kind = kind
        self._rounds: dict[tuple[float, float], int] = {}
        self._rho = 0.0  # all rounds as if unsampled: a bound whatever q is, and the whole truth if q was always 1
        self._rho_full = 0.0  # the rounds with q = 1
        self._rdp = np.zeros(len(ORDERS_SAMPLED))  # the rounds with q < 1
        self._sampled: dict[tuple[float, float], np.ndarray] = {}  # one round's, by what it was
        self._pld: Any = None  # what was composed so far, if it was asked for

    @property
    def rounds(self) -> int:
        """How many rounds were spent."""
        return sum(self._rounds.values())

    def spend(self, multiplier: float, q: float, rounds: int = 1) -> None:
        """Counts `rounds` more rounds with this multiplier and sampling probability. Multiplier 0 ends all privacy."""
        multiplier, q = float(multiplier), float(q)
        _check_round(multiplier, q)
        if rounds < 1:
            raise ConfigError(f"rounds {rounds} to account for: must be 1 or more")
        if q > 0.0 and not math.isinf(multiplier):
            rho = rounds * _rho(multiplier)
            if q == 1.0:
                self._rho_full += rho
            elif math.isfinite(rho):
                self._rdp = self._rdp + rounds * self._one_sampled(multiplier, q)
            self._rho += rho
        else:
            # Nothing was released: it is counted as a round and costs nothing. Infinity has no place in JSON.
            multiplier, q = 0.0, 0.0
        self._rounds[multiplier, q] = self._rounds.get((multiplier, q), 0) + rounds
        self._pld = None

    def _one_sampled(self, multiplier: float, q: float) -> np.ndarray:
        if (multiplier, q) not in self._sampled:
            self._sampled[multiplier, q] = _sampled_rdp(multiplier, q)
        return self._sampled[multiplier, q]

    def epsilon(self, delta: float, *, quick: bool = False) -> float:
        """epsilon at delta of everything spent so far; infinite once a round had no noise.

        Cheap every round, except with `pld` at q < 1, which takes seconds: there `quick` answers with the RDP bound,
        which is somewhat larger, for a progress bar.
        """
        _check_delta(delta)
        if self._rho_full == self._rho:
            return _closed(self._rho, delta, self.kind)
        if math.isinf(self._rho):
            return math.inf
        if self.kind == "pld" and not quick:
            return self._pld_epsilon(delta)
        sampled = rdp_epsilon(ORDERS_SAMPLED, self._rdp + self._rho_full * ORDERS_SAMPLED, delta)
        # Sampling never makes a round worse (divergences are quasi-convex), so the unsampled figure bounds it as well;
        # it is the smaller one where epsilon is so large that the best order lies between 1 and 2.
        return min(sampled, _closed(self._rho, delta, "rdp"))

    def _pld_epsilon(self, delta: float) -> float:
        if self._pld is None:
            from dp_accounting import pld

            composed = pld.PLDAccountant()
            for (multiplier, q), rounds in self._rounds.items():
                if q > 0.0:
                    composed.compose(_sampled_event(multiplier, q), rounds)
            self._pld = composed
        return float(self._pld.get_epsilon(delta))


class CohortView:
    """What somebody who knows the cohorts learns of each party: sampling hides nothing from it, and every party's account is
    the unsampled composition of the rounds that this party really joined. `epsilon` is that of the worst one."""

    def __init__(self, parties: int, kind: str = "rdp"):
        _check_kind(kind)
        self.kind = kind
        self._rho = np.zeros(parties)
        self._joined = np.zeros(parties, dtype=np.int64)

    def join(self, parties: int | np.ndarray, multiplier: float, adjacency: float = 1.0) -> None:
        """A party (or an array of different ones) took part in a round under so much noise over the bound of one update.

        `adjacency` is the factor on the sensitivity. 1: a sum is seen, and a party's update is there or is zero. 2: the
        party's own update is seen, and is replaced by any other; its noise is the party's own share, sigma / sqrt(n_t).
        """
        _check_round(multiplier, 1.0)
        self._rho[parties] += _rho(multiplier / adjacency)
        self._joined[parties] += 1

    def joined(self) -> list[int]:
        """How many rounds each party joined."""
        return [int(rounds) for rounds in self._joined]

    def worst(self) -> tuple[int, int]:
        """The party with the largest epsilon (the first of equals), and how many rounds it joined."""
        party = int(np.argmax(self._rho)) if self._rho.size else 0
        return party, int(self._joined[party]) if self._joined.size else 0

    def epsilon(self, delta: float) -> float:
        """The worst party's epsilon at delta: the composition is monotone in rho, so one conversion is enough."""
        _check_delta(delta)
        return _closed(float(np.max(self._rho, initial=0.0)), delta, self.kind)
