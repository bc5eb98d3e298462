"""Methods of a user's own without training, for tests of the engine: --method toy:Steady --dataset none."""

import numpy as np

from fedmpi.algorithm import LocalUpdate, PartyAlgorithm, References, Score

COORDINATES = 16


class Steady(PartyAlgorithm):
    """Every party moves in a direction of its own."""

    task = "none"
    supports = ("shared", "dense")
    data_fingerprint = 0
    dimension = COORDINATES

    def __init__(self, config, store, device="cpu"):
        pass

    def initial(self):
        return np.zeros(COORDINATES, np.float32)

    def public_support(self, theta):
        return None

    def support_size(self):
        return COORDINATES

    def local_work(self, party, theta, round):
        return LocalUpdate(np.eye(COORDINATES)[party % COORDINATES], None, dict.fromkeys(self.report_columns, 0.0))

    def evaluate(self, party, theta, round):
        return Score(1, 1, 0.0)

    def references(self, party, theta):
        return References(1, 1, 1)


class Chooses(Steady):
    """Parties 0 and 1 choose to share in the clear."""

    chooses_clear = True

    def host(self, parties):
        self.hosted = parties

    def clear_parties(self):
        return tuple(party for party in self.hosted if party < 2)


class Picks(Steady):
    """Sends coordinates that depend on the party, which a public support does not allow."""

    def local_work(self, party, theta, round):
        return LocalUpdate(np.ones(COORDINATES), np.arange(COORDINATES), dict.fromkeys(self.report_columns, 0.0))


class Longer(Steady):
    """Sends more coordinates than it declared."""

    def local_work(self, party, theta, round):
        return LocalUpdate(np.ones(COORDINATES + 1), None, dict.fromkeys(self.report_columns, 0.0))
