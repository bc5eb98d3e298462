"""Rank 0's end of every session: a round's aggregation, or a sum of test figures."""

import os
from collections.abc import Collection

from fedmpi.aggregation import dropout, figures
from fedmpi.aggregation.base import ServerSession
from fedmpi.aggregation.plain import PlainServer
from fedmpi.aggregation.protocol import ProtocolRules, Session
from fedmpi.aggregation.rows import RowServer
from fedmpi.aggregation.secure import HybridServer, SecureServer
from fedmpi.aggregation.union import UnionServer, over, over_union
from fedmpi.config import Config
from fedmpi.crypto.prg import KeyStream
from fedmpi.privacy.encoding import Encoding
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.secagg import graph
from fedmpi.secagg.disputes import Group, alone
from fedmpi.secagg.material import BatchMaterial
from fedmpi.secagg.rules import Meter, Rules, no_meter
from fedmpi.secagg.server import SecAggServer
from fedmpi.wire.phases import Purpose

PLAIN = {"vector": PlainServer, "rows": RowServer}  # by the mechanism's form


class ServerEnd:
    """Makes rank 0's end of every session."""

    def __init__(
        self,
        config: Config,
        rules: ProtocolRules,
        dimension: int,
        mechanism: Mechanism,
        identities: dict[int, bytes] | None = None,
        meter: Meter = no_meter,
        group: Group = alone,
    ):
        """`dimension` of the shared vector; `group`: the rank of a party."""
        self.rules = rules
        self._config, self._dimension, self._mechanism = config, dimension, mechanism
        self._plan = dropout.plan_of(config)
        self._keyed: SecAggServer | None = None  # the last one that made keys for several rounds, or used them
        self._identities, self._meter, self._group = identities, meter, group

    def training(self, session: Session, cohort: tuple[int, ...], clear: Collection[int]) -> ServerSession:
        if self._config.aggregation.support == "union":

            def follow(coded: bytes, coordinates: int) -> ServerSession:
                return self._sum(over_union(session, coded), cohort, clear, over(self._mechanism, coordinates).encoding)

            speak = tuple(party for party in cohort if party in clear or self._has_keys(session, party))
            inner: ServerSession = UnionServer(session.round, speak, self._dimension, follow)
        else:
            inner = self._sum(session, cohort, clear, self._mechanism.encoding)
        return dropout.ForewarnedServer(inner, self._plan, session.round, cohort, clear)

    def keys_of(self, round: int) -> int:
        """The round in which the keys of this one are made, or were; 0 where every round has its own."""
        if not self._config.aggregation.key_rounds:
            return 0
        batch = self._keyed.batch if self._keyed is not None else None
        return batch.first if batch is not None and batch.first <= round <= batch.last else round

    def renew_keys(self) -> None:
        """The next round makes new ones: parties are elsewhere, or too few have the old."""
        self._keyed = None

    def test(self, round: int, about: bytes, everyone: tuple[int, ...], columns: int) -> ServerSession:
        """The sum of everybody's test figures, hidden whatever they do with their updates."""
        return self._sum(Session(round, Purpose.TEST, about=about), everyone, (), figures.encoding(columns))

    def _sum(
        self, session: Session, cohort: tuple[int, ...], clear: Collection[int], encoding: Encoding
    ) -> ServerSession:
        in_clear = tuple(party for party in cohort if party in clear)
        hidden = tuple(party for party in cohort if party not in clear)
        if not hidden:
            return self._plain(session, in_clear, encoding)
        rules = self.rules.of(session, len(hidden), encoding)
        batch = self._batch(session)
        threads = len(os.sched_getaffinity(0))
        machine = SecAggServer(
            rules,
            self._neighbours(rules, hidden) if batch is None else batch.neighbours,
            identities=self._identities,
            group=self._group,
            threads=threads,
            meter=self._meter,
            batch=batch,
        )
        if session.keys:
            self._keyed = machine
        secure = SecureServer(machine, encoding)
        if not in_clear:
            return secure
        return HybridServer(self._plain(session, in_clear, encoding), secure, frozenset(in_clear))

    def _neighbours(self, rules: Rules, hidden: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        if rules.complete:
            drawn = graph.complete(hidden, rules.threshold)
        else:
            # The graph is the server's to draw; it cancels in the sum.
            drawn = graph.regular(hidden, rules.degree, rules.threshold, KeyStream.from_os(b"graph"))
        return {party: drawn.neighbours(party) for party in hidden}

    def _batch(self, session: Session) -> BatchMaterial | None:
        """The keys that are there for it, if they are not to be made."""
        return None if session.keys in (0, session.round) or self._keyed is None else self._keyed.batch

    def _has_keys(self, session: Session, party: int) -> bool:
        batch = self._batch(session)
        return batch is None or party in batch.dealt

    def _plain(self, session: Session, cohort: tuple[int, ...], encoding: Encoding) -> PlainServer:
        own = self._config.aggregation.support == "own" and encoding.dimension < self._dimension
        dimension = self._dimension if own else encoding.dimension
        return PLAIN[self._mechanism.form](
            session.round, cohort, encoding, dimension, own, session.most_lost, self._mechanism.width
        )
