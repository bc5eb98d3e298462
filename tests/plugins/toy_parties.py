"""Methods of a user's own without training, for tests of the engine: --method toy_parties:Steady --dataset none."""

import os
import time

import numpy as np

from benchmarks import toy
from fedmpi.algorithm import LocalUpdate

COORDINATES = 16


class Steady(toy.Method):
    """Few coordinates; every party moves in a direction of its own."""

    supports = ("shared", "dense")
    dimension = COORDINATES

    def initial(self):
        return np.zeros(COORDINATES, np.float32)

    def support_size(self):
        return COORDINATES

    def work(self, party, theta, round):
        return LocalUpdate(
            party, np.eye(COORDINATES)[party % COORDINATES], None, dict.fromkeys(self.report_columns, 0.0)
        )


class Remembers(Steady):
    """What a party sends, and what the server makes of it, depend on all rounds before: a state that is lost or old shows."""

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        self.seen, self.pace = {}, np.zeros(COORDINATES)

    def work(self, party, theta, round):
        seen = self.seen.get(party, np.zeros(COORDINATES)) * 0.5 + theta + np.eye(COORDINATES)[party % COORDINATES]
        self.seen[party] = seen
        return LocalUpdate(party, seen / (1 + np.abs(seen).sum()), None, dict.fromkeys(self.report_columns, 0.0))

    def step(self, theta, total, rate, support):
        self.pace = 0.5 * self.pace + rate * total
        return (theta + self.pace).astype(np.float32)

    def server_state(self):
        return {"pace": self.pace}

    def load_server_state(self, state):
        self.pace = state["pace"]

    def party_state(self, party):
        return {"seen": self.seen.get(party, np.zeros(COORDINATES))}

    def load_party_state(self, party, state):
        self.seen[party] = state["seen"]


class Chooses(Steady):
    """Parties 0 and 1 choose to share in the clear."""

    chooses_clear = True

    def host(self, parties):
        self.hosted = parties

    def clear_parties(self):
        return tuple(party for party in self.hosted if party < 2)


class Picks(Steady):
    """Sends coordinates that depend on the party, which a public support does not allow."""

    def work(self, party, theta, round):
        return LocalUpdate(party, np.ones(COORDINATES), np.arange(COORDINATES), dict.fromkeys(self.report_columns, 0.0))


class Longer(Steady):
    """Sends more coordinates than it declared."""

    def work(self, party, theta, round):
        return LocalUpdate(party, np.ones(COORDINATES + 1), None, dict.fromkeys(self.report_columns, 0.0))


class Unasked(Steady):
    """Works for a party of another rank as well."""

    def local_work(self, parties, theta, round):
        return (self.work(party, theta, round) for party in (*parties, 5))


class Twice(Steady):
    def local_work(self, parties, theta, round):
        return (self.work(party, theta, round) for party in (*parties, parties[0]))


class Lazy(Steady):
    """Leaves party 1 out."""

    def local_work(self, parties, theta, round):
        return (self.work(party, theta, round) for party in parties if party != 1)


class Grows(Steady):
    """Declares three coordinates, and has all of them under support union."""

    supports = ("union",)

    def support_size(self):
        return 3

    def work(self, party, theta, round):
        return LocalUpdate(party, np.ones(4), 4 * party + np.arange(4), dict.fromkeys(self.report_columns, 0.0))


class NoNumber(Steady):
    def evaluate_all(self, parties, theta, round):
        return np.full((len(parties), 2), np.nan)


class Huge(Steady):
    def evaluate_all(self, parties, theta, round):
        return np.full((len(parties), 2), 1e13)


class FewRows(Steady):
    def evaluate_all(self, parties, theta, round):
        return np.ones((len(parties) - 1, 2))


class Slow(Steady):
    """Rounds of half a second, so that a signal finds one under way."""

    def work(self, party, theta, round):
        time.sleep(0.5)
        return super().work(party, theta, round)


class SlowAtFirst(Steady):
    """The same until SLURM has queued the job again."""

    def work(self, party, theta, round):
        time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else 0.5)
        return super().work(party, theta, round)


class Endless(Steady):
    """From its second round on."""

    def work(self, party, theta, round):
        while round > 1:
            time.sleep(0.1)
        return super().work(party, theta, round)
