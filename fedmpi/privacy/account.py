"""The account: what the releases of a run add up to, towards whoever sees the models, towards rank 0, and towards a party.

A fold over the log of releases and nothing else: the same lines give the same figures, whether they are counted one by one
while the run goes on, all at once when it is resumed, or later by somebody who has only the file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from fedmpi.errors import DataError
from fedmpi.privacy.accountant import Accountant, CohortView
from fedmpi.privacy.releases import Asked, Ended, Event, Failed, Opened, ReleaseLog, Shown, Started, Stepped, Terms
from fedmpi.privacy.statement import Spent, Statement, state

# How far one party can move what is seen, in units of C: in a sum its update is there or is not; seen alone, it may be any other.
IN_CLEAR, IN_SUM = 2.0, 1.0


def fold(events: Iterable[Event]) -> Account:
    """The account of a log; DataError if it is empty. A round that was asked for and has no end counts as cut short."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, Started) and kept and event.terms != _terms(kept):
            raise DataError("the log of releases is of runs with different settings: what was released is unknown")
        if isinstance(event, Started) and event.terms.entropy == "seeded":
            # What a seeded run repeats is the same to the last bit, and told nobody anything new.
            kept = [old for old in kept if isinstance(old, Started) or old.round <= event.after]
        kept.append(event)
    account = Account(_terms(kept))
    for event in kept:
        account.take(event)
    return account


def _terms(events: list[Event]) -> Terms:
    if not events or not isinstance(events[0], Started):
        raise DataError("the log of releases is empty: nothing was released, and nothing can be stated")
    return events[0].terms


class Releases:
    """A log that is being written, and its account. `note` an event before the act that it stands for."""

    def __init__(self, log: ReleaseLog):
        self.log = log
        self.account = fold(log.events)

    def note(self, event: Event) -> None:
        self.log.append(event)
        self.account.take(event)


class Account:
    def __init__(self, terms: Terms):
        self.terms = terms
        self.outside = Accountant(terms.accountant)
        # The same without credit for secret sampling: the figure that counts once a round has lost somebody. How much noise is
        # left then, and whether there is a sum at all, tells who had been drawn.
        self.unsampled = Accountant(terms.accountant)
        self.lost = False
        self.nominal = Accountant(terms.accountant)
        self.server = CohortView(terms.parties, terms.accountant)
        self.party = CohortView(terms.parties, terms.accountant)  # what another party learns of each
        self.figures = "none"  # the least protected that left a party
        self.ended = False
        self._startable = 0  # rounds that the parties would take part in, over all starts of the run
        self._asked: Asked | None = None  # the round under way

    def take(self, event: Event) -> None:
        """Count one more event, in the order of the log."""
        if isinstance(event, Started):
            self.settle()
            # What a resumed run repeats under fresh noise is one more release, and with a rank 0 that lies that may be all of it:
            # nobody but rank 0 says after which round it goes on, or has a checkpoint made.
            repeats = self.terms.entropy == "os" or not self._startable
            self._startable += self.terms.rounds if repeats else 0
            if event.figures:
                self._show("party")
        elif isinstance(event, Asked):
            self._begin(event)
        elif isinstance(event, Opened):
            self._open(self._of(event), event)
        elif isinstance(event, Stepped):
            self._step(self._of(event), event)
            self._asked = None
        elif isinstance(event, Failed):
            self._of(event)
            self.lost, self._asked = True, None  # that there was no sum says something of who was drawn
        elif isinstance(event, Shown):
            self._show(event.figures)
        elif isinstance(event, Ended):
            self.ended = True
        else:  # a kind that is logged and not counted would cost nothing
            raise TypeError(f"{type(event).__name__} is not counted")

    def settle(self) -> None:
        """A round that an interruption ended: nobody outside saw its sum, and what rank 0 may have seen of it is counted: updates
        in the clear since they were asked for, a sum since it was to be opened."""
        if self._asked is not None:
            self.lost, self._asked = True, None

    def _of(self, event: Opened | Stepped | Failed) -> Asked:
        if self._asked is None or self._asked.round != event.round:
            raise DataError(f"the log of releases speaks of round {event.round}, for which nobody was asked")
        return self._asked

    def _show(self, figures: str) -> None:
        self.figures = max(self.figures, figures, key=("none", "securesum", "party").index)

    def _begin(self, asked: Asked) -> None:
        self.settle()
        self._asked = asked
        if asked.figures:
            self._show("party")
        self._join(self.server, asked, asked.cohort if asked.exposed else asked.clear, asked.share, IN_CLEAR)

    def _open(self, asked: Asked, event: Opened) -> None:
        """The colluders' noise is no noise to rank 0."""
        if not asked.exposed and self.terms.mechanism.noisy:
            noises = len(event.parties) - self.terms.colluding
            self._join(self.server, asked, event.parties, self._of_sum(asked, noises, event.coordinates), IN_SUM)

    def _step(self, asked: Asked, event: Stepped) -> None:
        if not self.terms.mechanism.noisy:
            return
        number = len(event.survivors)
        self.lost |= number < len(asked.cohort)
        multiplier = self._of_sum(asked, number, event.coordinates)
        self.outside.spend(multiplier, self.terms.sampling)
        self.unsampled.spend(multiplier, 1.0)
        self.nominal.spend(self.terms.mechanism.multiplier, self.terms.sampling)
        # A party that looks can subtract its own noise, so one share fewer protects the others. In a sum over one party nobody
        # else has a share, and its one share stays.
        others = self._of_sum(asked, max(1, number - 1), event.coordinates)
        self._join(self.party, asked, event.survivors, others, IN_SUM)

    def _of_sum(self, asked: Asked, noises: int, coordinates: int) -> float:
        return self.terms.mechanism.of_sum(asked.share, noises, coordinates)

    def _join(
        self, view: CohortView, asked: Asked, parties: Collection[int], multiplier: float, adjacency: float
    ) -> None:
        """Only who was drawn: a sum with a filler's noise tells nothing of the filler."""
        drawn = set(asked.drawn)
        members = [party for party in parties if party in drawn]
        if members and self.terms.mechanism.noisy:
            view.join(np.array(members), multiplier, adjacency)

    # ---- what it says ----

    def statement(self, *, quick: bool = False) -> Statement:
        delta = self.terms.delta
        spent = Spent(
            outside=(self.unsampled if self.lost else self.outside).epsilon(delta, quick=quick),
            server=self.server.epsilon(delta),
            party=self.party.epsilon(delta),
            nominal=self.nominal.epsilon(delta, quick=quick),
            lost=self.lost,
            figures=self.figures,
        )
        return state(self.terms, spent)

    def lying(self) -> float | None:
        """Epsilon towards a rank 0 that lies, where the adversary is active: it has every party take part in every round, and in
        each the sum opened that has the least noise in it. None where nothing holds towards it."""
        terms, statement = self.terms, self.statement(quick=True)
        if not terms.least_noises or statement.epsilon_server is None:
            return None
        mechanism = terms.mechanism
        share = mechanism.share(terms.least_cohort) / mechanism.encoding.sensitivity
        accountant = Accountant(terms.accountant)
        multiplier = mechanism.of_sum(share, terms.least_noises, mechanism.encoding.dimension)
        accountant.spend(multiplier, 1.0, max(1, self._startable))
        found = accountant.epsilon(terms.delta)
        return found if math.isfinite(found) else None

    def as_dict(self) -> dict[str, Any]:
        """privacy.json: the statement, the mechanism, and how the figures came about."""
        terms = self.terms
        worst, joined = self.server.worst()
        about = {
            "sampling": terms.sampling,
            "noise_to_signal": terms.mechanism.noise_to_signal(terms.sampling, terms.parties, terms.rounds),
        }
        return {
            **self.statement().as_dict(),
            "epsilon_server_lying": self.lying(),
            "mechanism": terms.mechanism.as_dict() | about,
            "accountant": terms.accountant,
            "rounds_accounted": self.outside.rounds,
            "worst_party": {"party": worst, "rounds_joined": joined},
        }
