"""A party's end of every session: of its update, or of its test figures."""

from collections.abc import Collection, Mapping

import numpy as np

from fedmpi.aggregation import dropout, figures
from fedmpi.aggregation.base import PartySession
from fedmpi.aggregation.plain import PlainParty
from fedmpi.aggregation.protocol import ProtocolRules, Session
from fedmpi.aggregation.secure import SecureParty, SilentParty
from fedmpi.config import Config
from fedmpi.privacy.encoding import Encoding
from fedmpi.secagg.party import Identity, SecAggParty
from fedmpi.secagg.rules import Meter, no_meter
from fedmpi.wire.phases import Phase, Purpose


class PartyEnd:
    """For the parties of a rank. `clear`: those of them that share in the clear."""

    def __init__(
        self,
        config: Config,
        rules: ProtocolRules,
        dimension: int,
        clear: Collection[int],
        identities: Mapping[int, Identity] | None = None,
    ):
        self.dimension, self.clear = dimension, frozenset(clear)
        self._rules = rules
        self._plan = dropout.plan_of(config)
        self._identities = identities or {}
        self._keyed: dict[
            int, SecAggParty
        ] = {}  # of each party the last one that made keys for several rounds, or used them

    def update(
        self,
        session: Session,
        party: int,
        hidden: int,
        encoding: Encoding,
        values: np.ndarray,
        support: np.ndarray | None = None,
        meter: Meter = no_meter,
    ) -> PartySession:
        """Of an encoded update. `hidden`: how many of the cohort go through the protocol."""
        if party in self.clear:
            return PlainParty(session.round, party, encoding, self.dimension, values, support)
        if not self.has_keys(session, party):
            return SilentParty()
        rules, later = self._rules.of(session, hidden, encoding), session.keys not in (0, session.round)
        ring = self._keyed[party].ring if later else None
        machine = SecAggParty(rules, party, values, identity=self._identities.get(party), meter=meter, ring=ring)
        if session.keys:
            self._keyed[party] = machine
        return SecureParty(machine)

    def has_keys(self, session: Session, party: int) -> bool:
        """Whether it can take part: the keys are made in this round, or it was there when they were."""
        if session.keys in (0, session.round) or party in self.clear:
            return True
        ring = self._keyed[party].ring if party in self._keyed else None
        return ring is not None and ring.first == session.keys and ring.has(session.round)

    def test(
        self, round: int, about: bytes, party: int, everyone: int, row: np.ndarray, meter: Meter = no_meter
    ) -> PartySession:
        """Of a party's test figures, hidden whatever it does with its updates."""
        rules = self._rules.of(Session(round, Purpose.TEST, about=about), everyone, figures.encoding(len(row)))
        machine = SecAggParty(
            rules, party, figures.encode(row, everyone), identity=self._identities.get(party), meter=meter
        )
        return SecureParty(machine)

    def vanishing(self, inner: PartySession, round: int, party: int) -> PartySession:
        """The same, as far as the dropout plan lets it speak."""
        return dropout.VanishingParty(inner, self._plan, round, party)

    def misses(self, round: int, party: int) -> bool:
        """Whether the plan has the party's update in the clear never come."""
        return self._plan.misses(round, party, Phase.UPDATE)
