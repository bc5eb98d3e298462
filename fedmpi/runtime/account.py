"""The privacy account of a run: what each round really released, towards outside and towards the server."""

import math

import numpy as np

from fedmpi.config import Config
from fedmpi.privacy.accountant import Accountant, ServerView
from fedmpi.privacy.mechanisms import sum_divergence, sum_multiplier
from fedmpi.privacy.statement import Statement, noise_to_signal, state
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
        self.server = ServerView(config.run.parties, PLAIN_ADJACENCY, kind)

    def spend(self, cohort: tuple[int, ...], survivors: tuple[int, ...]) -> None:
        """Count one round: the noise in its sum is what the survivors contributed."""
        q, sigma = self._config.privacy.sampling, self._release.multiplier
        if sigma == 0:
            return
        share = self._release.share(len(cohort))
        contributed = sigma * math.sqrt(len(survivors) / len(cohort))
        divergence = sum_divergence(share, len(survivors))
        self.outside.spend(sum_multiplier(contributed, divergence, self._release.encoding.dimension), q)
        self.nominal.spend(sigma, q)
        self.server.join(np.array(survivors), sigma / math.sqrt(len(cohort)))

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
            denominator="fixed" if config.server.denominator == "expected" else "survivors",
        )

    def noise_to_signal(self) -> float:
        config = self._config
        return noise_to_signal(
            self._release.multiplier, config.privacy.sampling, config.run.parties, self._release.encoding.dimension
        )

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
