"""From a party's local work to the sessions that carry it out of the rank: the mechanism first, then the aggregation.

Nothing that a party computed leaves it another way, but for the figures of its work, where those may leave.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import numpy as np

from fedmpi.aggregation.base import PartySession
from fedmpi.aggregation.party_end import PartyEnd
from fedmpi.aggregation.protocol import Session
from fedmpi.aggregation.rows import RowsParty
from fedmpi.aggregation.union import UnionParty, over, over_union
from fedmpi.algorithm import Algorithm, LocalUpdate, RowUpdates
from fedmpi.config import Config
from fedmpi.errors import ProtocolError
from fedmpi.privacy.mechanism import Cut, Mechanism, Vector
from fedmpi.privacy.noise import l2_norm
from fedmpi.randomness.sources import source
from fedmpi.randomness.words import WordSource
from fedmpi.secagg.rules import Meter
from fedmpi.wire.messages import Fill, Train
from fedmpi.wire.phases import Cost, Phase

Work = TypeVar("Work", LocalUpdate, RowUpdates)  # a vector mechanism takes the one, a row mechanism the other
Watch = Callable[[str], AbstractContextManager[None]]
Leaving = Iterator[tuple[tuple[int, ...], PartySession]]  # (parties, the session that they speak through)


class Departures(ABC, Generic[Work]):
    takes: type[Work]

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        mechanism: Mechanism,
        end: PartyEnd,
        watch: Watch,
        meter_of: Callable[[int], Meter],
    ):
        self._config, self._algorithm, self._mechanism, self._end = config, algorithm, mechanism, end
        self._watch, self._meter_of = watch, meter_of

    def of(self, work: Work, asked: Train, theta: np.ndarray) -> tuple[np.ndarray, Leaving]:
        """(what the parties say of their work, a row each: the method's columns, the norm of the update, whether or how much of
        it is cut; their sessions). `theta`: the model that they worked from."""
        if not isinstance(work, self.takes):
            declared, given = type(self._algorithm.sends).__name__, type(work).__name__
            raise ProtocolError(f"the method declared that it sends {declared}, and gave {given}", phase="local work")
        most_lost = self._algorithm.most_lost(theta)
        return self._of(work, asked, Session(asked.round, most_lost=most_lost, about=asked.model, keys=asked.keys))

    @abstractmethod
    def _of(self, work: Work, asked: Train, session: Session) -> tuple[np.ndarray, Leaving]: ...

    def fill(self, asked: Fill) -> Leaving:
        """Parties that take part with an update of zeros, and so with noise alone."""
        raise ProtocolError("rank 0 asked for noise alone, but this method adds none", phase=Phase.MODEL)


class VectorDepartures(Departures[LocalUpdate]):
    """Each party an update of its own: clipped, rounded, noised, and then in the clear or through the protocol."""

    takes = LocalUpdate
    _mechanism: Vector

    def _of(self, work: LocalUpdate, asked: Train, session: Session) -> tuple[np.ndarray, Leaving]:
        self._check(work)
        norm = l2_norm(work.values)
        said = [work.figures[name] for name in self._algorithm.report_columns]
        figures = np.array([[*said, norm, norm > self._mechanism.encoding.clip]], np.float64)
        return figures, self._sessions(work, asked, session)

    def _sessions(self, work: LocalUpdate, asked: Train, session: Session) -> Leaving:
        if self._config.aggregation.support == "union" and self._end.has_keys(session, work.party):

            def follow(coded: bytes, values: np.ndarray) -> PartySession:
                return self._encoded(over_union(session, coded), asked, work.party, values)

            dimension = self._algorithm.dimension
            inner: PartySession = UnionParty(asked.round, work.party, dimension, work.values, work.support, follow)
        else:
            inner = self._encoded(session, asked, work.party, work.values, work.support)
        yield work.parties, self._end.vanishing(inner, asked.round, work.party)

    def fill(self, asked: Fill) -> Leaving:
        if not self._mechanism.noisy:
            yield from super().fill(asked)
        zeros = np.zeros(self._algorithm.support_size())
        for party in asked.parties:
            inner = self._encoded(Session(asked.round, about=asked.model), asked, party, zeros)
            yield (party,), self._end.vanishing(inner, asked.round, party)

    def _encoded(
        self, session: Session, asked: Train | Fill, party: int, values: np.ndarray, support: np.ndarray | None = None
    ) -> PartySession:
        """The update after the mechanism, over the coordinates that it has."""
        privacy, seed = self._config.privacy, self._config.run.seed

        def draw(purpose: str) -> WordSource:
            return source(privacy.entropy, seed, purpose, party, asked.round)

        meter, mechanism = self._meter_of(party), over(self._mechanism, len(values)).of_round(asked.round)
        with meter(Phase.UPDATE, Cost.ENCODE):
            encoded = mechanism.encode(values, asked.cohort, draw, party)
            return self._end.update(session, party, asked.hidden, mechanism.encoding, encoded, support, meter)

    def _check(self, work: LocalUpdate) -> None:
        """The noise is for what the method declared: coordinates that depend on data leave only where that was said."""
        own, size, shape = self._mechanism.own_coordinates, self._algorithm.support_size(), np.shape(work.values)
        what = ""
        if work.support is not None and not own:
            support = self._config.aggregation.support
            what = f"the method chose coordinates of its own, which support {support} does not allow"
        elif not own and shape != (size,):
            what = f"the method gave an update of shape {shape}, expected {size} coordinates"
        if what:
            raise ProtocolError(what, party=work.party, phase="local work")


class RowDepartures(Departures[RowUpdates]):
    """All the rank's parties at once; each goes the way that it chose, with the rows that it touched."""

    takes = RowUpdates
    _mechanism: Cut

    def _of(self, work: RowUpdates, asked: Train, session: Session) -> tuple[np.ndarray, Leaving]:
        with self._watch(Cost.ENCODE):
            self._check(work)
            steps, cut = self._mechanism.encode_rows(work.values)
            norms = np.sqrt(_per_party(work, np.einsum("nw,nw->n", work.values, work.values)))
            sizes = np.maximum(1, work.counts * work.values.shape[1])
            figures = np.column_stack((work.figures, norms, _per_party(work, cut) / sizes))
        return figures, self._sessions(work, steps, asked, session)

    def _check(self, work: RowUpdates) -> None:
        """Rows that are there, once each: a sum in the clear and a sum of hidden vectors are then the same."""
        rows, width = self._mechanism.encoding.dimension // self._mechanism.width, self._mechanism.width
        what, counted = "", int(work.counts.sum())
        if len(work.counts) != len(work.parties) or counted != len(work.rows) or (work.counts < 0).any():
            what = f"{len(work.rows)} rows, and counts that add up to {counted}, for {len(work.parties)} parties"
        elif np.shape(work.values) != (len(work.rows), width):
            what = f"values of shape {np.shape(work.values)}, expected {(len(work.rows), width)}"
        elif counted and (not _ascend(work) or work.rows.min() < 0 or work.rows.max() >= rows):
            what = f"rows that do not ascend within a party, or are not between 0 and {rows - 1}"
        if what:
            raise ProtocolError(f"the method gave {what}", phase="local work")

    def _sessions(self, work: RowUpdates, steps: np.ndarray, asked: Train, session: Session) -> Leaving:
        encoding = self._mechanism.encoding
        clear = np.array([party in self._end.clear for party in work.parties], bool)
        late = np.array([self._end.misses(asked.round, party) for party in work.parties], bool)
        yield work.parties, RowsParty(asked.round, work.parties, work.counts, work.rows, steps, clear & ~late, encoding)
        for index in np.flatnonzero(~clear).tolist():
            party = work.parties[index]
            meter = self._meter_of(party)
            with meter(Phase.UPDATE, Cost.ENCODE):
                values = encoding.wrap(_dense(work, steps, index, encoding.dimension))
                inner = self._end.update(session, party, asked.hidden, encoding, values, meter=meter)
            yield (party,), self._end.vanishing(inner, asked.round, party)


def _ascend(work: RowUpdates) -> bool:
    down = np.diff(work.rows) <= 0
    ends = np.cumsum(work.counts)[:-1]
    down[ends[(ends > 0) & (ends < len(work.rows))] - 1] = False  # from one party to the next
    return not down.any()


def _per_party(work: RowUpdates, per_row: np.ndarray) -> np.ndarray:
    """The sum of a figure of each row over each party's rows."""
    return np.bincount(np.repeat(np.arange(len(work.counts)), work.counts), per_row, len(work.counts))


def _dense(work: RowUpdates, steps: np.ndarray, index: int, dimension: int) -> np.ndarray:
    """A party's rows in an otherwise empty vector over all coordinates."""
    width = steps.shape[1]
    first = int(work.counts[:index].sum())
    at = slice(first, first + int(work.counts[index]))
    dense = np.zeros((dimension // width, width), np.int64)
    dense[work.rows[at]] = steps[at]
    return dense.reshape(-1)


DEPARTURES: dict[str, type[Departures[Any]]] = {
    "vector": VectorDepartures,
    "rows": RowDepartures,
}  # by the mechanism's form
