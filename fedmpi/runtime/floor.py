"""A rank's own floor: what it takes from rank 0, and what it does not.

Every rank was started with a command line, and that is its own word: what it trains, on which data, how much noise it adds, what it shows
to whom, which files it opens. From rank 0 it takes what it cannot know by itself: the session, the round to go on from, sigma, which it
checks, the names of the run and of its folder, and the parties that it hosts. Nothing that rank 0 names is imported, opened or deleted.

Settings that protect may be stronger at rank 0 than here and then hold, because the parties of a run need the same ones; weaker they
are refused. Any other difference is refused as well: rank 0 may not have a rank do another job. Free are the settings in `OWN`, where
ranks may differ: a rank's paths, device and threads, what it keeps for itself, and what rank 0 alone goes by, which are the
deadlines (a client waits for rank 0 as long as it takes) and how often it asks for checkpoints.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from fedmpi.aggregation.protocol import ProtocolRules, Session, chosen_clear
from fedmpi.config import LAYERS, OWN, Config, check, from_dict
from fedmpi.errors import ConfigError, WireError
from fedmpi.privacy.accountant import proven
from fedmpi.privacy.calibrations import calibrated
from fedmpi.privacy.encoding import Encoding
from fedmpi.runtime.build import Orders, calibrations
from fedmpi.runtime.placement import Placement
from fedmpi.wire.messages import Setup

# What two hosts may differ by in the last digits of sigma, through their libraries; epsilon differs by no more.
ROUNDING = 1e-6
LONGEST = 400  # letters of a line
SAME = "start every rank with the same settings"


def _order(*weakest_first: str) -> Callable[[str], int]:
    return weakest_first.index


# Setting -> how much its value protects, where more is stronger.
STRENGTH: dict[str, Callable[[Any], float]] = {
    "adversary": _order("passive", "active"),
    "aggregation": _order("plain", "hybrid", "secure"),
    "epsilon": lambda epsilon: -epsilon,
    "delta": lambda delta: -delta,
    "clip": lambda clip: -clip,
    "entropy": _order("seeded", "os"),
    "on_loss": _order("adopt", "drop", "end"),
    "metrics": _order("party", "securesum", "none"),
    "min_cohort": float,
    "colluding": float,
    "support": lambda support: ("own", "union", "shared", "dense").index(support.replace("dense", "shared")),
    "graph": _order("regular", "complete"),
    "corrupt": float,
    "expected_dropout": lambda dropout: -dropout,
    "noise_margin": float,
    "accountant": _order("pld", "rdp"),
    "denominator": lambda by: 0 if by == "survivors" else 1,
}
# Compared by what they come to, below.
BY_EFFECT = ("threshold", "clear_parties", "clear_rule")


def agree(own: Config, setup: Setup, rank: int, size: int) -> Orders:
    """What this rank, one of so many, runs with, of its own settings and of what rank 0 sent; ConfigError if they do not go
    together."""
    try:
        return _agreed(own, setup, Placement(own.run.parties, size).parties_of(rank))
    except OverflowError:
        raise ConfigError("a number that rank 0 sent is too large to be a setting") from None
    except ConfigError as error:  # in rank 0's words, in part
        line = "".join(letter if letter.isprintable() else "?" for letter in str(error))
        raise ConfigError(line if len(line) <= LONGEST else f"{line[:LONGEST]} ...") from None


def _agreed(own: Config, setup: Setup, hosted: tuple[int, ...]) -> Orders:
    told, facts = _read(setup.config, own)
    _check_settings(own, told)
    _check_parties(setup.parties, hosted)
    if facts["resume_round"] and not own.run.resume:
        raise ConfigError(
            f"resume_round = {facts['resume_round']}: rank 0 goes on with a run, and this rank was started without --resume"
        )
    if own.run.resume and not told.run.resume:
        raise ConfigError(
            f"resume = {own.run.resume}: rank 0 starts a new run; start every rank with --resume, or none"
        )
    config = _with_own(told, own)
    if config.aggregation.adversary == "active" and config.aggregation.pki is None:
        raise ConfigError("adversary = active: this rank was started without --pki, and does not take it from rank 0")
    check(config)
    _check_noise(config, facts["multiplier"])
    return Orders(config, **facts)


def _read(text: str, own: Config) -> tuple[Config, dict[str, Any]]:
    """Rank 0's settings, and the rest of its orders. Names are compared before anything is made of them: to read the settings of
    another method would be to import it."""
    try:
        fields = json.loads(text)
        settings = fields.pop("config")
        method = settings["run"]["method"]
        unknown = [
            f"{layer}.{name}"
            for layer, values in settings.items()
            for name in values
            if layer not in LAYERS or name not in getattr(own, layer).__dataclass_fields__
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"Setup: not the orders of a run ({type(error).__name__})") from None
    if method != own.run.method:
        raise _another_job("method", method, own.run.method)
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: so says rank 0, and there is no such setting; is the same fedmpi installed on rank 0?"
        )
    if not (set(fields) == {"multiplier", "session", "resume_round", "run", "absent"} and _fit(**fields)):
        raise WireError(
            "Setup: sigma, session and resume_round must be a number >= 0, 16 bytes and a round, run 16 bytes, absent parties"
        )
    fields["absent"] = tuple(fields["absent"])
    return from_dict(settings, own, "Setup"), fields


def _fit(multiplier: Any, session: Any, resume_round: Any, run: Any, absent: Any) -> bool:
    return (
        type(multiplier) is float
        and 0 <= multiplier < math.inf
        and all(isinstance(name, str) and re.fullmatch("[0-9a-f]{32}", name) for name in (session, run))
        and type(resume_round) is int
        and resume_round >= 0
        and isinstance(absent, list)
        and all(type(party) is int for party in absent)
    )


def _check_settings(own: Config, told: Config) -> None:
    for layer, ours in own.as_dict().items():
        theirs = told.as_dict()[layer]
        for name, value in ours.items():
            if name in STRENGTH:
                here, there = (own.privacy.shown, told.privacy.shown) if name == "metrics" else (value, theirs[name])
                if not STRENGTH[name](there) >= STRENGTH[name](here):  # so that no number is not enough either
                    raise _weaker(name, there, here)
            elif name not in (*OWN.get(layer, ()), *BY_EFFECT) and theirs[name] != value:
                raise _another_job(name, theirs[name], value)
    _check_clear(own, told)
    _check_threshold(own, told)


def _check_clear(own: Config, told: Config) -> None:
    """Nobody shares in the clear who would not by this rank's word."""
    here, there = own.aggregation, told.aggregation
    if not chosen_clear(told) <= chosen_clear(own):
        raise _weaker("clear_parties", there.clear_parties, here.clear_parties)
    if there.clear_rule not in ("", here.clear_rule) and here.aggregation != "plain":
        raise _weaker("clear_rule", there.clear_rule, here.clear_rule)


def _check_threshold(own: Config, told: Config) -> None:
    """As many shares open a secret as this rank would have it, in every sum of hidden parties that there may be. A regular graph finds
    its threshold from `corrupt` and `expected_dropout`; any threshold of a complete one is above half of all parties, which is more
    than a regular graph may have corrupt."""
    if own.aggregation.threshold == told.aggregation.threshold or "regular" in (
        own.aggregation.graph,
        told.aggregation.graph,
    ):
        return
    if told.aggregation.aggregation == "plain":
        return
    sizes = {told.run.parties - len(chosen_clear(told))}
    if told.aggregation.clear_rule:
        sizes.add(told.privacy.min_cohort)  # parties decide; and by both ends it holds for what is between
    if told.privacy.shown == "securesum":
        sizes.add(told.run.parties)
    for hidden in sizes - {0}:
        here, there = (
            ProtocolRules(config).of(Session(0), hidden, Encoding(1.0, 1, 8, 1)).threshold for config in (own, told)
        )
        if there < here:
            raise _weaker("threshold", there, f"{here} of {hidden}")


def _check_parties(parties: tuple[int, ...], hosted: tuple[int, ...]) -> None:
    """Its place among the ranks says whom a rank hosts. A party that two ranks played, each in good faith and with a counter of its
    own, would be in two sums of one round."""
    if parties != hosted:
        shown = ", ".join(map(str, parties[:6])) + (" ..." if len(parties) > 6 else "")
        raise ConfigError(
            f"parties = {shown or 'none'}: so says rank 0, and this rank's place is with {hosted[0]} to {hosted[-1]}"
        )


def _check_noise(config: Config, multiplier: float) -> None:
    """Sigma is at least what the settings ask for, by this rank's own arithmetic."""
    privacy, rounds = config.privacy, config.run.rounds
    if math.isinf(privacy.epsilon):
        return
    if privacy.accountant == "pld" and privacy.sampling < 1:
        target = privacy.epsilon, privacy.delta, privacy.sampling, rounds, privacy.accountant
        least = calibrated(calibrations(config), *target)
        if multiplier < least * (1 - ROUNDING):
            raise ConfigError(
                f"sigma = {multiplier:g}: so says rank 0, and this rank's settings ask for {least:g} at least"
            )
        return
    found = proven(multiplier, privacy.delta, privacy.sampling, rounds, privacy.accountant)
    if not found <= privacy.epsilon * (1 + ROUNDING):
        raise ConfigError(
            f"sigma = {multiplier:g}: so says rank 0, and over {rounds} rounds that proves epsilon {found:.4g} where "
            f"{privacy.epsilon:g} at most is to hold"
        )


def _with_own(told: Config, own: Config) -> Config:
    """Rank 0's settings, with this rank's own where ranks may differ."""
    layers = {}
    for layer, names in OWN.items():
        values = {name: getattr(getattr(own, layer), name) for name in names}
        layers[layer] = dataclasses.replace(getattr(told, layer), **values)
    config = dataclasses.replace(told, **layers)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, out=str(_folder(own, told.run.out or ""))))


def _folder(own: Config, told: str) -> Path:
    """Where this rank keeps the run: as its own command line says, or beside its other runs, under the name that rank 0 found free."""
    if own.run.resume or own.run.out:
        return Path(own.run.resume or own.run.out or "").absolute()
    usual, name = own.out, PurePosixPath(told).name
    if not re.fullmatch(re.escape(usual.name) + r"(-[1-9][0-9]{0,8})?", name, re.ASCII):
        raise ConfigError(
            f"out = {name}: so rank 0 names the run's folder, expected {usual.name} or {usual.name}-2, -3 ...; {SAME}"
        )
    return usual.with_name(name).absolute()


def _weaker(name: str, there: object, here: object) -> ConfigError:
    return ConfigError(f"{name} = {there}: so says rank 0, and it protects less than {here}, this rank's own; {SAME}")


def _another_job(name: str, there: object, here: object) -> ConfigError:
    return ConfigError(f"{name} = {there}: so says rank 0, and this rank was started for {here}; {SAME}")
