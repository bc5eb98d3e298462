"""Who takes part when."""

from collections.abc import Collection

import numpy as np

from fedmpi.aggregation.protocol import batch_of, chosen_clear
from fedmpi.config import Config
from fedmpi.errors import ProtocolError
from fedmpi.randomness.sources import source
from fedmpi.randomness.words import WordSource, bernoulli
from fedmpi.wire.phases import Phase


def cohort(config: Config, round: int) -> tuple[int, ...]:
    """The parties drawn for a round, DSU's Omega_t: each joins by a coin of its own, with probability --sampling.

    Amplification by sampling needs a secret sample: under `entropy: os` it comes from the operating system.
    """
    everyone = range(config.run.parties)
    if config.privacy.sampling >= 1:
        return tuple(everyone)
    joins = bernoulli(_source(config, "sampling", round), np.full(config.run.parties, config.privacy.sampling))
    return tuple(party for party in everyone if joins[party])


def fillers(config: Config, round: int, drawn: tuple[int, ...], clear: Collection[int]) -> tuple[int, ...]:
    """Who joins a cohort that was drawn too small, with noise alone, so that every round is run.

    A round that is only run when enough were drawn includes a party more often than q, and not by a probability that
    could stand in for q: the sum itself tells how many others there were, and in a cohort of just enough the party was
    there for certain (tests/test_sampling.py has the counterexample). With fillers a party's update is in a round with
    probability q whatever the others do, which is what amplification by sampling assumes. A filler's sum tells nothing
    of it: it has nothing but its share of the noise in it.

    Rank 0 sees the sums of the hidden parties alone, so the missing ones come from these, or, where all share in the
    clear, from anybody.
    """
    least = config.privacy.min_cohort
    if enough(least, drawn, clear):
        return ()
    pool = [party for party in range(config.run.parties) if party not in clear] or range(config.run.parties)
    present = set(drawn) & set(pool)
    others = np.array([party for party in pool if party not in present])
    source = _source(config, "fillers", round)
    order = np.argsort(source.words(others.size), kind="stable")
    return tuple(sorted(others[order[: least - len(present)]].tolist()))


def enough(least: int, cohort: Collection[int], clear: Collection[int]) -> bool:
    """Whether a sum hides its parties: one over too few shows them, and so does one over too few that are not in the clear."""
    hidden = len(set(cohort) - set(clear))
    return len(cohort) >= least and (hidden == 0 or hidden >= least)


def check_cohort(config: Config, cohort: int, hidden: int, chooses: bool = False) -> None:
    """A party's share of the noise is that of one among `cohort`, and the threshold that of `hidden`: it does not take any number
    that it is told. `chooses`: parties' data decide who is hidden, so that nobody knows how many are."""
    parties, least, kind = config.run.parties, config.privacy.min_cohort, config.aggregation.aggregation
    fewest = parties if config.privacy.sampling >= 1 else least
    fits = hidden == 0 or least <= hidden <= cohort
    if kind != "hybrid":
        fits = hidden == (cohort if kind == "secure" else 0)
    elif config.privacy.sampling >= 1 and not chooses:
        fits = hidden == parties - len(chosen_clear(config))
    if not (fewest <= cohort <= parties and fits):
        raise ProtocolError(
            f"rank 0 announced a cohort of {cohort} with {hidden} hidden; {kind} aggregation among {parties} parties has "
            f"{fewest} to {parties}, and no hidden one or {least} at least",
            phase=Phase.MODEL,
        )


def check_keys(config: Config, round: int, keys: int, hidden: int) -> None:
    """The round in which the keys of this one were made, or are, can be: where they are made for several rounds, one of the same batch."""
    fits = keys == 0
    if config.aggregation.key_rounds and hidden:
        first, last = batch_of(config, round)
        fits = first <= keys <= round <= last
    if not fits:
        raise ProtocolError(
            f"rank 0 spoke of keys of round {keys} in round {round}, with --keys {config.aggregation.keys}",
            phase=Phase.MODEL,
        )


def _source(config: Config, purpose: str, round: int) -> WordSource:
    return source(config.privacy.entropy, config.run.seed, purpose, 0, round)


def expected_cohort(config: Config) -> float:
    """qN, the fixed denominator that the sensitivity assumes."""
    return config.privacy.sampling * config.run.parties


def evaluation_due(config: Config, round: int) -> bool:
    every = config.evaluation.eval_every
    return round == config.run.rounds or (every > 0 and round % every == 0)


def checkpoint_due(config: Config, round: int) -> bool:
    every = config.run.checkpoint_every
    return every > 0 and round % every == 0 and round < config.run.rounds
