"""Who takes part when."""

import numpy as np

from fedmpi.config import Config
from fedmpi.crypto.prg import KeyStream
from fedmpi.privacy.words import SeededWords, bernoulli


def cohort(config: Config, round: int) -> tuple[int, ...]:
    """Omega_t: each party independently with probability q (Poisson).

    Amplification by sampling needs a secret sample: under `entropy: os` it comes from the operating system.
    """
    everyone = range(config.run.parties)
    if config.privacy.sampling >= 1:
        return tuple(everyone)
    if config.privacy.entropy == "os":
        source = KeyStream.from_os(b"sampling")
    else:
        source = SeededWords(config.run.seed, "sampling", 0, round)
    joins = bernoulli(source, np.full(config.run.parties, config.privacy.sampling))
    return tuple(party for party in everyone if joins[party])


def expected_cohort(config: Config) -> float:
    """qN, the fixed denominator that the sensitivity assumes."""
    return config.privacy.sampling * config.run.parties


def evaluation_due(config: Config, round: int) -> bool:
    every = config.evaluation.eval_every
    return round == config.run.rounds or (every > 0 and round % every == 0)


def checkpoint_due(config: Config, round: int) -> bool:
    every = config.run.checkpoint_every
    return every > 0 and round % every == 0 and round < config.run.rounds
