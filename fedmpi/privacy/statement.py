"""What a run may say about its epsilon, in one place and always in the same words.

`epsilon_outside` is about the released models, `epsilon_server` about rank 0, `epsilon_party` about another party. Each is
null where nothing holds, and then `epsilon_nominal`, the paper's arithmetic, stands beside the reason. `epsilon_kind` says
of those that are not null:

    holds      proven for the mechanism that ran, under the trust that is listed
    simulated  the figure is right for the mechanism, but its noise can be recomputed from the run's seed
    nominal    arithmetic that the mechanism does not live up to
    none       no noise was added, or nothing holds
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fedmpi.privacy.accountant import proven
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.privacy.releases import Terms

FIGURES = ("epsilon_outside", "epsilon_server", "epsilon_party", "epsilon_nominal")

_NO_NOISE = "no noise was added"
_DATA_SUPPORT = (
    "the support is chosen from private data and shows in what is sent and in the model; noise on the values does not "
    "cover it"
)
_CONTINUOUS = "the PLD figure is that of the continuous Gaussian, while the noise that was added is integer"
_SURVIVORS = (
    "epsilon_outside and epsilon_party are not known: the sum was divided by the number of survivors, and the sensitivity does "
    "not count that this number changes with the party"
)
# What reaches rank 0 beside the updates, without noise.
_SHOWN = {
    "party": "epsilon_server does not hold: each party's losses, norms before clipping and test figures reached rank 0 as they "
    "are; --metrics none keeps them home",
    "securesum": "epsilon_server does not hold: sums of the parties' test figures reached rank 0 without noise; --metrics none "
    "keeps them home",
}
_CHOSEN = (
    "epsilon_server does not hold: which parties share in the clear reached rank 0, without noise, and is their data's choice; "
    "--clear-parties is not"
)
_NOT_AMPLIFIED = "epsilon_outside is without amplification by sampling: parties were lost, and what is left of the noise tells who was drawn"
_RECOMPUTABLE = "the noise can be recomputed from the run's seed, so it protects nobody"
_WOULD_HOLD = "the figure is what the same run with --entropy os would hold"


@dataclass(frozen=True)
class Statement:
    """Everything that a run claims about differential privacy, and what it does not."""

    epsilon_outside: float | None
    epsilon_server: float | None
    epsilon_party: float | None
    epsilon_nominal: float | None
    epsilon_kind: str
    reason: str
    private: bool
    delta: float
    trust: list[str]
    released: list[str]

    def __post_init__(self) -> None:
        # JSON has no NaN and no infinity: where a number would be one, the field is None and the reason says why.
        for name in FIGURES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} is {value}: a statement holds numbers or None")

    def as_dict(self) -> dict[str, Any]:
        """For privacy.json."""
        return asdict(self)


@dataclass(frozen=True)
class Spent:
    """What the accountants say: of the rounds as they were, of the worst party's account towards the server and towards another
    party, and of the configured sigma and q over the rounds that were run. Each is a number from 0 to infinity."""

    outside: float
    server: float
    party: float
    nominal: float
    lost: bool = (
        False  # in some round somebody was missing; `outside` is that of a run in which everybody is always drawn
    )
    figures: str = "none"  # the least protected that left a party: none, securesum, party

    def __post_init__(self) -> None:
        for name in ("outside", "server", "party", "nominal"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}: expected a number from 0 to infinity")


def state(terms: Terms, spent: Spent) -> Statement:
    """The statement of a run that was made under `terms` and has `spent` so much."""
    released = _released(terms, spent.figures)
    if not terms.mechanism.noisy:
        released.insert(0, "the models, without noise")
        return Statement(
            None, None, None, None, "none", _NO_NOISE, False, terms.delta, ["nothing is claimed"], released
        )
    reasons = _faults(terms)
    if reasons:
        kind, outside, server, party = "nominal", None, None, None
    else:
        outside, server, party, reasons = _what_holds(terms, spent)
        nothing = outside is None and server is None and party is None
        kind = "none" if nothing else "holds" if terms.entropy == "os" else "simulated"
    nominal = _finite(spent.nominal)
    if nominal is None:
        reasons.append("epsilon_nominal is unbounded")
    if terms.entropy == "seeded":
        reasons.append(_RECOMPUTABLE)
        if kind == "simulated":
            reasons.append(_WOULD_HOLD)
    return Statement(
        epsilon_outside=outside,
        epsilon_server=server,
        epsilon_party=party,
        epsilon_nominal=nominal,
        epsilon_kind=kind,
        reason="; ".join(reasons),
        private=kind == "holds" and None not in (outside, server, party),
        delta=terms.delta,
        trust=_trust(terms),
        released=released,
    )


def _faults(terms: Terms) -> list[str]:
    """What keeps the arithmetic from being a guarantee, whoever drew the noise."""
    faults = []
    if terms.mechanism.own_coordinates:
        faults.append(_DATA_SUPPORT)
    if terms.accountant == "pld":
        faults.append(_CONTINUOUS)
    return faults


def _what_holds(terms: Terms, spent: Spent) -> tuple[float | None, float | None, float | None, list[str]]:
    """(outside, server, party, the reasons why one of them is not known or not smaller)"""
    outside, server, party = (_finite(value) for value in (spent.outside, spent.server, spent.party))
    reasons = []
    if outside is None:
        reasons.append("epsilon_outside is unbounded: a round was released without noise")
    if server is None:
        reasons.append("epsilon_server is unbounded: in some round rank 0 saw an update without noise that counts")
    elif spent.figures in _SHOWN or terms.clear_by_data:
        reasons.append(_SHOWN.get(spent.figures, _CHOSEN))
        server = None
    if party is None:
        reasons.append("epsilon_party is unbounded: in some round no noise was left but that of the party that looks")
    if terms.denominator == "survivors" and (outside is not None or party is not None):
        reasons.append(_SURVIVORS)
        outside = party = None
    if terms.sampling < 1 and spent.lost and outside is not None:
        reasons.append(_NOT_AMPLIFIED)
    return outside, server, party, reasons


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_SUMMED = (
    "rank 0 follows the protocol and sees sums only; one party's update is there or is zero (sensitivity C), under the "
    "noise of the survivors"
)
_LOCAL = (
    "rank 0 sees the party's own update: the local figure, one update replaced by any other (sensitivity 2C), under "
    "the party's own noise sigma C / sqrt(n_t)"
)


_ACTIVE = (
    "adversary active: a rank 0 that lies, with the colluding parties at most, learns of every round one sum over at least the "
    "threshold of parties, or none; epsilon_server_lying is what that comes to if it has the smallest opened in all rounds, and is null "
    "where nothing holds. It holds for whoever was started with its own settings and identities, which rank 0 does not choose"
)
_ACTIVE_IN_PART = "adversary active, hybrid: as without it for parties in the clear, and no figure is claimed towards a rank 0 that lies"


_SAMPLED = "sampling: whether a party answers must not depend on who else was drawn; that a run lost nobody would otherwise say who was"
_SPARSE = (
    "graph regular: towards rank 0 and its colluders, except with probability 2^-40 a round, which delta does not count"
)


def _trust(terms: Terms) -> list[str]:
    server = {
        "plain": _LOCAL,
        "secure": _SUMMED,
        "hybrid": f"for a party in the clear, {_LOCAL}; for the others, {_SUMMED}",
    }[terms.aggregation]
    lines = [
        "epsilon_outside: against whoever sees the released models and nothing else; "
        f"all updates of one of {terms.parties} parties are there or are zero, while the number of parties, which is public, the cohorts "
        "and the noise of their survivors stay as they were; "
        "rank 0 is honest: it draws the cohorts in secret, sums as stated and releases nothing else",
        f"epsilon_server: {server}; no amplification by sampling, because rank 0 knows the cohorts; "
        "composed over the rounds that the worst party really joined",
        "epsilon_party: against one other party, which sees every released model, knows the cohorts (no amplification by "
        "sampling) and its own share of the noise (not counted), and follows the protocol; composed over the rounds that the "
        "worst party really joined",
        f"colluding parties: {terms.colluding}; their noise is not counted towards rank 0",
        "every party clips, rounds and adds its share of the noise as the protocol says: "
        "a share that is left out cannot be seen",
    ]
    more = (
        (terms.adversary == "active", _ACTIVE if terms.least_noises else _ACTIVE_IN_PART),
        (terms.sampling < 1, _SAMPLED),
        (terms.graph == "regular" and terms.aggregation != "plain", _SPARSE),
    )
    return [*lines, *(line for said, line in more if said)]


def _released(terms: Terms, figures: str) -> list[str]:
    lines = [
        "to rank 0: which parties were in each cohort, which of them dropped out, and when their messages came",
        "to rank 0: the memory and the CPU seconds of each rank by phase",
        "to every rank: the number of parties, and of images the channel means and deviations over all training samples",
    ]
    if figures == "party":
        lines.append(
            "each party's evaluation metrics, and of every round its training losses, the norm of its update before clipping and "
            "whether it was clipped, sent to rank 0 as they are; at the end its CPU seconds by phase of the protocol; a checksum "
            "of the prepared data"
        )
    elif figures == "securesum":
        lines.append("the sums of the parties' evaluation metrics, without noise")
    if terms.support == "own":
        lines.append("each party's support: which coordinates its update has")
    elif terms.support == "union":
        lines.append("each party's support to rank 0, and the union of the supports to every party of the cohort")
    if terms.clear_by_data:
        lines.append("which parties share in the clear, a choice that depends on their data")
    elif terms.aggregation == "hybrid":
        lines.append("which parties share in the clear, as the settings list them")
    return lines


def rounding(mechanism: Mechanism, parties: int, rounds: int, sampling: float, delta: float, accountant: str) -> str:
    """The line about the encoding that is printed before a run starts: bits, what rounding costs, how likely a sum wraps.

    Rounding may lengthen an update, so a part of the noise is spent on hiding that. Its price in epsilon is the difference between
    what all rounds prove with nobody missing, and what noise of the same size would prove for updates that stay within C.
    """
    encoding = mechanism.encoding
    line = f"rounding: {encoding.bits} bits for {encoding.steps} steps in C"
    if not mechanism.noisy:
        return f"{line}; no sum can wrap"
    # Sampled PLD takes seconds; a difference of two RDP figures says the same.
    kind = accountant if sampling == 1.0 else "rdp"
    share = mechanism.share(parties) / encoding.sensitivity
    kept = (
        mechanism.of_sum(share, parties, encoding.dimension) / mechanism.summed
    )  # 1, but on a grid that is coarser than chosen
    held, free = (
        proven(mechanism.multiplier * factor, delta, sampling, rounds, kind)
        for factor in (kept, encoding.sensitivity / encoding.steps)
    )
    wraps = math.log2(max(mechanism.wrap_probability(parties, rounds), 2.0**-1000))
    return (
        f"{line}, which add {100 * mechanism.rounding_cost(parties):.2g} % to sigma: epsilon is accounted as {held:.4g}, and would be "
        f"{free:.4g} for as much noise without rounding; in {rounds} rounds any sum wraps with probability 2^{wraps:.1f} at most"
    )


def warnings(delta: float, parties: int, ratio: float, pays_below: float, measured_with: str) -> list[str]:
    """What must be said before a run starts, a line each; `ratio` is the mechanism's `noise_to_signal`, 0 without noise, and
    `pays_below` the one above which parties did better alone with the method that was `measured_with`."""
    lines = []
    if ratio > 0.0 and delta * parties >= 1.0:
        lines.append(
            f"delta {delta:g} is not below 1/parties = {1.0 / parties:g}: "
            "such a delta allows the data of one party to be released whole"
        )
    if ratio > pays_below:
        lines.append(
            f"the run's noise is {ratio:.3g} times the most that its updates can carry; with {measured_with} parties did better alone "
            f"above {pays_below:g}: more parties, fewer coordinates or a larger epsilon would help"
        )
    return lines
