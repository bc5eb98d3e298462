"""The privacy account of a run: what each round really released, towards outside and towards the server."""

import math

import numpy as np

from fedmpi.config import Config
from fedmpi.privacy.accountant import Accountant, ServerView
from fedmpi.privacy.mechanisms import sum_divergence, sum_multiplier
from fedmpi.privacy.statement import Statement, state
from fedmpi.runtime.release import Release

# The server sees every party's own update in the clear, so it compares it with any other: 2C.
PLAIN_ADJACENCY = 2.0


class PrivacyAccount:
    def __init__(self, config: Config, release: Release):
        self._config = config
        self._release = release
        kind = config.privacy.accountant
        self.outside = Accountant(kind)
        self.nominal = Accountant(kind)
        self.server = ServerView(config.run.parties, kind=kind)

    def spend(
        self, cohort: tuple[int, ...], survivors: tuple[int, ...], coordinates: int, clear: frozenset[int]
    ) -> None:
        """Count one round: the noise in its sum is what the survivors contributed. `clear`: who the server saw alone."""
        q, release = self._config.privacy.sampling, self._release.over(coordinates)
        if release.multiplier == 0:
            return
        share = (
            release.share(len(cohort)) / release.encoding.sensitivity
        )  # one party's noise over the bound of an update

        def of_sum(parties: int) -> float:
            """The multiplier of a sum of this many shares, as one discrete Gaussian."""
            divergence = sum_divergence(share * release.encoding.sensitivity, parties)
            return sum_multiplier(share * math.sqrt(max(0, parties)), divergence, coordinates)

        self.outside.spend(of_sum(len(survivors)), q)
        self.nominal.spend(release.multiplier, q)
        seen = np.array([party for party in survivors if party in clear], dtype=np.int64)
        hidden = np.array([party for party in survivors if party not in clear], dtype=np.int64)
        if seen.size:
            self.server.join(seen, share, adjacency=PLAIN_ADJACENCY)
        if hidden.size:
            self.server.join(hidden, of_sum(hidden.size - self._config.aggregation.colluding), adjacency=1.0)

    def statement(self, *, quick: bool = False) -> Statement:
        config, delta = self._config, self._config.privacy.delta
        return state(
            support=config.aggregation.support,
            aggregation=config.aggregation.aggregation,
            entropy=config.privacy.entropy,
            accountant=config.privacy.accountant,
            sigma=self._release.multiplier,
            epsilon_outside=self.outside.epsilon(delta, quick=quick),
            epsilon_server=self.server.epsilon(delta),
            epsilon_nominal=self.nominal.epsilon(delta, quick=quick),
            delta=delta,
            parties=config.run.parties,
            metrics=config.privacy.metrics,
            colluding=config.aggregation.colluding,
            denominator="survivors" if config.server.denominator == "survivors" else "fixed",
        )

    def noise_to_signal(self) -> float:
        return self._release.noise_ratio(self._config)

    def as_dict(self) -> dict:
        """privacy.json: the statement, the mechanism, and how the figures came about."""
        encoding = self._release.encoding
        worst, joined = self.server.worst()
        return {
            **self.statement().as_dict(),
            "mechanism": {
                "noise": "discrete Gaussian on the encoded update" if self._release.multiplier else "none",
                "noise_multiplier": self._release.multiplier,
                "clip": encoding.clip,
                "steps_per_clip": encoding.steps,
                "sensitivity_in_steps": encoding.sensitivity,
                "bits": encoding.bits,
                "coordinates": encoding.dimension,
                "sampling": self._config.privacy.sampling,
                "noise_to_signal": self.noise_to_signal(),
            },
            "accountant": self._config.privacy.accountant,
            "rounds_accounted": self.outside.rounds,
            "worst_party": {"party": worst, "rounds_joined": joined},
        }

    def checkpoint(self) -> dict:
        return {"outside": self.outside.state(), "nominal": self.nominal.state(), "server": self.server.state()}

    def restore(self, saved: dict) -> None:
        self.outside = Accountant.from_state(saved["outside"])
        self.nominal = Accountant.from_state(saved["nominal"])
        self.server = ServerView.from_state(saved["server"])
