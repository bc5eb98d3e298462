"""A method without training, for measuring the engine and the protocol alone: `--method benchmarks.toy:Method --dataset none`.

Every party's update is a pseudo-random vector of the length of ml-100k's item factors (1,682 x 20); no torch is imported.
"""

import numpy as np

from fedmpi.algorithm import LocalUpdate, PartyAlgorithm, References, Score
from fedmpi.randomness.words import SeededWords

DIMENSION = 33_640


class Method(PartyAlgorithm):
    task = "none"
    supports = ("dense",)
    data_fingerprint = 0
    dimension = DIMENSION

    def __init__(self, config, store, device="cpu"):
        self.seed = config.run.seed

    def initial(self):
        return np.zeros(self.dimension, np.float32)

    def public_support(self, theta):
        return None

    def support_size(self):
        return self.dimension

    def work(self, party, theta, round):
        rng = SeededWords(self.seed, "toy", party, round).generator()
        return LocalUpdate(
            party,
            rng.standard_normal(self.dimension, np.float32),
            None,
            {"loss": 0.0, "head_loss": 0.0, "penalty": 0.0},
        )

    def evaluate(self, party, theta, round):
        return Score(0, 1, 0.0)

    def references(self, party, theta):
        return References(0, 0, 1)
