"""What a run may say about its epsilon, in one place and always in the same words.

`epsilon_outside` is about the released models, `epsilon_server` about rank 0, `epsilon_party` about another party. Each is
null where nothing holds, and then `epsilon_nominal`, the paper's arithmetic, stands beside the reason. `epsilon_kind` says
of those that are not null:

    holds      proven for the mechanism that ran, under the trust that is listed
    simulated  the figure is right for the mechanism, but its noise can be recomputed from the run's seed
    nominal    arithmetic that the mechanism does not live up to
    none       no noise was added
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fedmpi.errors import ConfigError

SUPPORTS = ("own", "union", "shared", "dense")
AGGREGATIONS = ("plain", "secure", "hybrid")
ENTROPIES = ("seeded", "os")
ACCOUNTANTS = ("rdp", "pld")
METRICS = ("none", "securesum", "party")
DENOMINATORS = ("fixed", "survivors")
ADVERSARIES = ("passive", "active")
FIGURES = ("epsilon_outside", "epsilon_server", "epsilon_party", "epsilon_nominal")

_NO_NOISE = "no noise was added"
_DATA_SUPPORT = (
    "the support is chosen from private data and shows in what is sent and in the model; noise on the values does not "
    "cover it"
)
_CONTINUOUS = "the PLD figure is that of the continuous Gaussian, while the noise that was added is integer"
_FLOAT_NOISE = "the noise that was added is not the integer mechanism of the proof"
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


def state(
    *,
    support: str,
    aggregation: str,
    entropy: str,
    accountant: str,
    sigma: float,
    epsilon_outside: float,
    epsilon_server: float,
    epsilon_party: float,
    epsilon_nominal: float,
    delta: float,
    parties: int,
    metrics: str = "none",
    colluding: int = 0,
    integer_noise: bool = True,
    denominator: str = "fixed",
    adversary: str = "passive",
    sampled: bool = False,
    lost: bool = False,
    sparse: bool = False,
) -> Statement:
    """The statement of a run.

    The four numbers are what the accountants say: of the rounds as they were, of the worst party's ledger towards the
    server and towards another party, and of the configured sigma and q over the rounds that were run. `integer_noise` says
    that rounding and noise were the integer mechanism, with its sensitivity and sum divergence accounted for. `lost`: in some
    round somebody of the cohort was missing, and `epsilon_outside` is that of a run in which everybody is always drawn.
    """
    _check("support", support, SUPPORTS)
    _check("aggregation", aggregation, AGGREGATIONS)
    _check("entropy", entropy, ENTROPIES)
    _check("accountant", accountant, ACCOUNTANTS)
    _check("metrics", metrics, METRICS)
    _check("denominator", denominator, DENOMINATORS)
    _check("adversary", adversary, ADVERSARIES)
    figures = epsilon_outside, epsilon_server, epsilon_party, epsilon_nominal
    for name, value in zip(FIGURES, figures):
        if not value >= 0.0:
            raise ValueError(f"{name} is {value}: expected a number from 0 to infinity")
    released = _released(support, aggregation, metrics)

    if sigma == 0.0:
        released.insert(0, "the models, without noise")
        return Statement(None, None, None, None, "none", _NO_NOISE, False, delta, ["nothing is claimed"], released)

    # What keeps the arithmetic from being a guarantee, whoever drew the noise.
    faults = []
    if support in ("own", "union"):
        faults.append(_DATA_SUPPORT)
    if accountant == "pld":
        faults.append(_CONTINUOUS)
    if not integer_noise:
        faults.append(_FLOAT_NOISE)

    outside, server, party, nominal = (value if math.isfinite(value) else None for value in figures)
    reasons = list(faults)
    if faults:
        kind, outside, server, party = "nominal", None, None, None
    else:
        if outside is None:
            reasons.append("epsilon_outside is unbounded: a round was released without noise")
        if server is None:
            reasons.append("epsilon_server is unbounded: in some round rank 0 saw an update without noise that counts")
        elif metrics in _SHOWN:
            reasons.append(_SHOWN[metrics])
            server = None
        if party is None:
            reasons.append(
                "epsilon_party is unbounded: in some round no noise was left but that of the party that looks"
            )
        if denominator == "survivors" and (outside is not None or party is not None):
            reasons.append(_SURVIVORS)
            outside = party = None
        if sampled and lost and outside is not None:
            reasons.append(_NOT_AMPLIFIED)
        nothing = outside is None and server is None and party is None
        kind = "none" if nothing else "holds" if entropy == "os" else "simulated"
    if nominal is None:
        reasons.append("epsilon_nominal is unbounded")
    if entropy == "seeded":
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
        delta=delta,
        trust=_trust(aggregation, parties, colluding, adversary, sampled, sparse),
        released=released,
    )


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r}: must be one of {', '.join(allowed)}")


_SUMMED = (
    "rank 0 follows the protocol and sees sums only; one party's update is there or is zero (sensitivity C), under the "
    "noise of the survivors"
)
_LOCAL = (
    "rank 0 sees the party's own update: the local figure, one update replaced by any other (sensitivity 2C), under "
    "the party's own noise sigma C / sqrt(n_t)"
)


_ACTIVE = (
    "adversary active: keys and survivors are signed, but a rank 0 that replays an earlier round's messages or tells a party "
    "weaker settings is not stopped yet; towards such a server no figure is claimed"
)


_SAMPLED = "sampling: whether a party answers must not depend on who else was drawn; that a run lost nobody would otherwise say who was"
_SPARSE = (
    "graph regular: towards rank 0 and its colluders, except with probability 2^-40 a round, which delta does not count"
)


def _trust(aggregation: str, parties: int, colluding: int, adversary: str, sampled: bool, sparse: bool) -> list[str]:
    server = {
        "plain": _LOCAL,
        "secure": _SUMMED,
        "hybrid": f"for a party in the clear, {_LOCAL}; for the others, {_SUMMED}",
    }[aggregation]
    lines = [
        "epsilon_outside: against whoever sees the released models and nothing else; "
        f"all updates of one of {parties} parties are there or are zero, while the number of parties, which is public, the cohorts "
        "and the noise of their survivors stay as they were; "
        "rank 0 is honest: it draws the cohorts in secret, sums as stated and releases nothing else",
        f"epsilon_server: {server}; no amplification by sampling, because rank 0 knows the cohorts; "
        "composed over the rounds that the worst party really joined",
        "epsilon_party: against one other party, which sees every released model, knows the cohorts (no amplification by "
        "sampling) and its own share of the noise (not counted), and follows the protocol; composed over the rounds that the "
        "worst party really joined",
        f"colluding parties: {colluding}; their noise is not counted towards rank 0",
        "every party clips, rounds and adds its share of the noise as the protocol says: "
        "a share that is left out cannot be seen",
    ]
    more = ((adversary == "active", _ACTIVE), (sampled, _SAMPLED), (sparse and aggregation != "plain", _SPARSE))
    return [*lines, *(line for said, line in more if said)]


def _released(support: str, aggregation: str, metrics: str) -> list[str]:
    lines = [
        "to rank 0: which parties were in each cohort, which of them dropped out, and when their messages came",
        "to rank 0: the memory and the CPU seconds of each rank by phase",
        "to every rank: the number of parties, and of images the channel means and deviations over all training samples",
    ]
    if metrics == "party":
        lines.append(
            "each party's evaluation metrics, and of every round its training losses, the norm of its update before clipping and "
            "whether it was clipped, sent to rank 0 as they are; at the end its CPU seconds by phase of the protocol; a checksum "
            "of the prepared data"
        )
    elif metrics == "securesum":
        lines.append("the sums of the parties' evaluation metrics, without noise")
    if support == "own":
        lines.append("each party's support: which coordinates its update has")
    elif support == "union":
        lines.append("each party's support to rank 0, and the union of the supports to every party of the cohort")
    if aggregation == "hybrid":
        lines.append("which parties share in the clear, a choice that depends on their data")
    return lines


def noise_to_signal(sigma: float, q: float, parties: int, coordinates: int, rounds: int) -> float:
    """R: the norm that noise adds up to over a run, sigma C/(qN) sqrt(rounds coordinates), over the furthest that clipped mean
    updates can go, rounds C. It knows nothing of the data. Noise has no direction and updates may have one, so something can
    be learnt above 1, though not far above."""
    return sigma * math.sqrt(coordinates) / (q * parties * math.sqrt(rounds))


def describe(sigma: float, q: float, parties: int, coordinates: int, bound: float, rounds: int) -> str:
    """The line that is printed before a run starts."""
    if sigma == 0.0:
        return f"noise: none; a mean update has norm {bound:g} at most"
    ratio = noise_to_signal(sigma, q, parties, coordinates, rounds)
    return (
        f"noise: sigma {sigma:.4g}; over {rounds} rounds it adds up to norm {ratio * bound * rounds:.3g} in {coordinates} "
        f"coordinates, mean updates to {bound * rounds:g} at most: R = {ratio:.3g}"
    )


def warnings(delta: float, parties: int, ratio: float, pays_below: float, measured_with: str) -> list[str]:
    """What must be said before a run starts, a line each; `ratio` is that of `noise_to_signal`, 0 without noise, and
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
