"""The privacy account of a run: what each round really released, towards outside and towards the server."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from fedmpi.config import Config
from fedmpi.errors import DataError
from fedmpi.privacy.accountant import Accountant, ServerView
from fedmpi.privacy.noise import sum_divergence, sum_multiplier
from fedmpi.privacy.statement import Statement, state
from fedmpi.runtime.release import Release

# The server sees every party's own update in the clear, so it compares it with any other: 2C.
PLAIN_ADJACENCY = 2.0


@dataclass(frozen=True)
class Asked:
    """What a round asked for, before anything came back."""

    share: float  # one party's noise over the bound of an update
    drawn: frozenset[int]  # whose updates are in the round; who only fills it up gives nothing away
    cohort: int
    exposed: bool  # whether so many collude that they open any single input with rank 0


class PrivacyAccount:
    """What was released, composed. `opens(hidden, colluding)`: whether so many of a cohort's hidden parties open any input of the protocol among them."""

    def __init__(self, config: Config, release: Release, opens: Callable[[int, int], bool]):
        self._config = config
        self._opens = opens
        self._release = release
        kind = config.privacy.accountant
        self.outside = Accountant(kind)
        # The same as if everybody had been drawn, which is what holds once a round has lost somebody: who is missing shows in
        # how much noise is left, and in whether there is a sum at all, and with it who was drawn.
        self.unsampled = Accountant(kind)
        self.lost = False
        self.nominal = Accountant(kind)
        self.server = ServerView(config.run.parties, kind=kind)
        self.party = ServerView(config.run.parties, kind=kind)  # what another party learns of each
        self._asked: dict[int, Asked] = {}  # by round

    @property
    def noisy(self) -> bool:
        return self._release.multiplier > 0

    def begin(self, round: int, drawn: Collection[int], cohort: Collection[int], clear: Collection[int]) -> None:
        """These are asked for their updates; everybody in the cohort adds the noise of one of that many. `clear`: whose updates
        rank 0 will see."""
        share = self._release.share(len(cohort)) / self._release.encoding.sensitivity
        hidden = [party for party in cohort if party not in clear]
        exposed = bool(hidden) and self._opens(len(hidden), self._config.aggregation.colluding)
        self._asked[round] = Asked(share, frozenset(drawn), len(cohort), exposed)
        # Once asked, an update in the clear may reach rank 0 at any time, late and whatever became of the round.
        seen = cohort if exposed else [party for party in cohort if party in clear]
        self._join(self.server, round, seen, share, PLAIN_ADJACENCY)

    def opened(self, round: int, survivors: Collection[int], coordinates: int, clear: Collection[int]) -> None:
        """Rank 0 asked for what opens the sum of these, and may have it, in time or late, whatever became of the round."""
        hidden = [party for party in survivors if party not in clear]
        self._summed(round, hidden, len(hidden), coordinates)

    def failed(self) -> None:
        """A round had no sum: that it had none says something of who was drawn."""
        self.lost = True

    def spend(self, round: int, survivors: Collection[int], coordinates: int) -> None:
        """The model took a step with the sum of these, and everybody will see it: its noise is what they contributed."""
        if not self.noisy:
            return
        number = len(survivors)
        self.lost |= number < self._asked[round].cohort
        self.outside.spend(self._of_sum(round, number, coordinates), self._config.privacy.sampling)
        self.unsampled.spend(self._of_sum(round, number, coordinates), 1.0)
        self.nominal.spend(self._release.multiplier, self._config.privacy.sampling)
        # Whoever looks knows its own share. A sum of one party's update has no share of another in it.
        others = self._of_sum(round, max(1, number - 1), coordinates)
        self._join(self.party, round, survivors, others, 1.0)

    def cut_short(
        self, round: int, drawn: Collection[int], cohort: Collection[int], fewest: int, clear: Collection[int]
    ) -> None:
        """Count a round that an interruption ended: nobody outside saw its sum, rank 0 may have seen all of it, with no more
        noise than that of the `fewest` that the protocol lets through."""
        self.failed()
        self.begin(round, drawn, cohort, clear)
        hidden = [party for party in cohort if party not in clear]
        self._summed(round, hidden, fewest, self._release.encoding.dimension)

    def _summed(self, round: int, hidden: list[int], noises: int, coordinates: int) -> None:
        if hidden and self.noisy and not self._asked[round].exposed:
            noises -= self._config.aggregation.colluding
            self._join(self.server, round, hidden, self._of_sum(round, noises, coordinates), 1.0)

    def _join(
        self, view: ServerView, round: int, parties: Collection[int], multiplier: float, adjacency: float
    ) -> None:
        """Only who was drawn: a sum with a filler's noise tells nothing of the filler."""
        members = [party for party in parties if party in self._asked[round].drawn]
        if members and self.noisy:
            view.join(np.array(members), multiplier, adjacency=adjacency)

    def _of_sum(self, round: int, parties: int, coordinates: int) -> float:
        """The multiplier of a sum of this many shares, as one discrete Gaussian."""
        share, sensitivity = self._asked[round].share, self._release.over(coordinates).encoding.sensitivity
        divergence = sum_divergence(share * sensitivity, parties)
        return sum_multiplier(share * math.sqrt(max(0, parties)), divergence, coordinates)

    def statement(self, *, quick: bool = False) -> Statement:
        config, delta = self._config, self._config.privacy.delta
        return state(
            support=config.aggregation.support,
            aggregation=config.aggregation.aggregation,
            entropy=config.privacy.entropy,
            accountant=config.privacy.accountant,
            sigma=self._release.multiplier,
            epsilon_outside=(self.unsampled if self.lost else self.outside).epsilon(delta, quick=quick),
            epsilon_server=self.server.epsilon(delta),
            epsilon_party=self.party.epsilon(delta),
            epsilon_nominal=self.nominal.epsilon(delta, quick=quick),
            delta=delta,
            parties=config.run.parties,
            metrics=config.privacy.shown,
            colluding=config.aggregation.colluding,
            denominator="survivors" if config.server.denominator == "survivors" else "fixed",
            adversary=config.aggregation.adversary,
            sampled=config.privacy.sampling < 1,
            lost=self.lost,
            sparse=config.aggregation.graph == "regular",
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
        return {
            "outside": self.outside.state(),
            "unsampled": self.unsampled.state(),
            "lost": self.lost,
            "nominal": self.nominal.state(),
            "server": self.server.state(),
            "party": self.party.state(),
        }

    def restore(self, saved: dict) -> None:
        """DataError for an account of another version: what it does not know it cannot be taken to know."""
        try:
            self._restore(saved)
        except (KeyError, TypeError) as error:
            raise DataError(f"checkpoint: the account cannot be read ({type(error).__name__}: {error})") from None

    def _restore(self, saved: dict) -> None:
        self.outside = Accountant.from_state(saved["outside"])
        self.unsampled = Accountant.from_state(saved["unsampled"])
        self.lost = bool(saved["lost"])
        self.nominal = Accountant.from_state(saved["nominal"])
        self.server = ServerView.from_state(saved["server"])
        self.party = ServerView.from_state(saved["party"])

    def older_than(self, saved: dict) -> bool:
        """Whether this account knows less than another one of the same run."""
        rounds = Accountant.from_state(saved["outside"]).rounds
        return self.outside.rounds < rounds or not self.server.covers(ServerView.from_state(saved["server"]))
