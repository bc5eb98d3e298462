"""A party's end of every session: of its update, or of its test figures."""

from collections.abc import Collection, Mapping

import numpy as np

from fedmpi.aggregation import dropout, figures
from fedmpi.aggregation.base import PartySession
from fedmpi.aggregation.plain import PlainParty
from fedmpi.aggregation.protocol import ProtocolRules, Session
from fedmpi.aggregation.secure import SecureParty
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
        self._plan = dropout.parse(config.aggregation.dropout, config.run.seed, config.run.parties)
        self._identities = identities or {}

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
        rules = self._rules.of(session, hidden, encoding)
        return SecureParty(SecAggParty(rules, party, values, identity=self._identities.get(party), meter=meter))

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
