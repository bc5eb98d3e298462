"""The two ends of a round's aggregation, from the configuration. Both ends work out the rules by themselves."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from fedmpi.aggregation.base import PartySession, ServerSession
from fedmpi.aggregation.plain import PlainParty, PlainServer
from fedmpi.aggregation.rows import RowServer
from fedmpi.aggregation.secure import HybridServer, SecureParty, SecureServer
from fedmpi.config import Config
from fedmpi.errors import ConfigError
from fedmpi.privacy.encoding import Encoding
from fedmpi.randomness.words import WordSource
from fedmpi.secagg import graph
from fedmpi.secagg.party import Identity, SecAggParty
from fedmpi.secagg.rules import Rules, no_meter
from fedmpi.secagg.server import SecAggServer
from fedmpi.wire.phases import Cost, Phase

SMALL_COHORT = 200


@dataclass
class Aggregator:
    config: Config
    session: bytes
    dimension: int  # of the shared vector
    width: int = 0  # of its rows, if parties send rows; 0: they send coordinates
    meter: Callable[[str], AbstractContextManager[object]] | None = None  # by cost
    clear: set[int] = field(default_factory=set)  # who shares in the clear
    hide_all: bool = False  # nobody, whatever the configuration says

    def __post_init__(self) -> None:
        """Everybody under plain, nobody under secure, the listed under hybrid; a rule of the method's adds to these."""
        kind = "" if self.hide_all else self.config.aggregation.aggregation
        if kind == "plain":
            self.clear.update(range(self.config.run.parties))
        elif kind == "hybrid":
            self.clear.update(parse_parties(self.config))

    def _measure(self, phase: Phase, cost: Cost) -> AbstractContextManager[object]:
        return self.meter(cost) if self.meter else no_meter(phase, cost)

    def check(self) -> None:
        """ConfigError if the whole cohort cannot run the protocol as configured: threshold, degree, adversary."""
        hidden, least = self.config.run.parties - len(self.clear), self.config.privacy.min_cohort
        if 0 < hidden < least:
            raise ConfigError(
                f"hybrid: {hidden} of {self.config.run.parties} parties are left for secure aggregation, at least {least} "
                "are needed, or all in the clear (--aggregation plain)"
            )
        if hidden and self.config.privacy.sampling < 1:
            self._check_sizes(least, hidden)
        if hidden and self.config.privacy.sampling >= 1:
            rules, colluding = self.rules(1, hidden, Encoding(1.0, 4, 8, 1)), self.config.aggregation.colluding
            if self.opens(hidden, colluding):
                most = rules.threshold - 1
                if self.config.aggregation.graph == "regular":
                    most = f"--corrupt ({self.config.aggregation.corrupt:g}) of {hidden}"
                raise ConfigError(
                    f"colluding = {colluding}: so many open any single update with rank 0; must be at most {most}"
                )

    def _check_sizes(self, least: int, most: int) -> None:
        """Sampled cohorts vary: every size must do, or a run would end when the first one that does not is drawn. It is small
        ones that do not."""
        for size in (most, *range(min(most, SMALL_COHORT), least - 1, -1)):
            try:
                self.rules(1, size, Encoding(1.0, 4, 8, 1))
            except ConfigError as error:
                higher = f"; --min-cohort {size + 1} would keep cohorts larger" if size < most else ""
                raise ConfigError(f"a cohort of {size} hidden parties may be drawn: {error}{higher}") from None

    def rules(self, round: int, cohort: int, encoding: Encoding, most_lost: int | None = None) -> Rules:
        """The protocol's rules for a cohort of this size, the same for the server and for every party. `most_lost`: what the
        method says to this round's."""
        settings = self.config.aggregation
        degree, threshold = cohort - 1, settings.threshold or graph.default_threshold(cohort)
        if settings.graph == "regular":
            degree, threshold = graph.regular_parameters(cohort, settings.corrupt, settings.expected_dropout)
            # With more than these lost, what is left of a sparse graph may fall apart, and a part's sum would show.
            of_graph = math.ceil(cohort * settings.expected_dropout)
            most_lost = of_graph if most_lost is None else min(of_graph, most_lost)
        active = settings.adversary == "active"
        if active and not 2 * threshold > cohort + settings.colluding:
            raise ConfigError(
                f"threshold = {threshold}: an active adversary needs 2t > n + colluding ({cohort} + {settings.colluding})"
            )
        return Rules(
            self.session, round, cohort, threshold, degree, encoding.dimension, encoding.bits, active, most_lost
        )

    def opens(self, hidden: int, colluding: int) -> bool:
        """Whether so many of `hidden` parties, with rank 0, open whatever input they like: they hold a threshold of the shares of
        both its secrets, or are more than the sparse graph was drawn for."""
        if self.config.aggregation.graph == "regular":
            return colluding > self.config.aggregation.corrupt * hidden
        return colluding >= self.rules(1, hidden, Encoding(1.0, 4, 8, 1)).threshold

    def fewest(self, hidden: int) -> int:
        """Of so many who go through the protocol, how many must be left for it to give a sum."""
        if not hidden:
            return 0
        rules = self.rules(1, hidden, Encoding(1.0, 4, 8, 1))
        return max(rules.threshold, hidden - rules.tolerated)

    def server(
        self,
        round: int,
        cohort: tuple[int, ...],
        encoding: Encoding,
        source: WordSource,
        identities,
        threads: int,
        most_lost: int | None = None,
    ) -> ServerSession:
        """`most_lost`: parties that the round may lose, `Algorithm.most_lost`."""
        clear = self.clear
        in_clear = tuple(party for party in cohort if party in clear)
        hidden = tuple(party for party in cohort if party not in clear)
        if self.width:
            plain = RowServer(round, in_clear, encoding, self.width, most_lost)
        else:
            own = encoding.dimension < self.dimension and self.config.aggregation.support == "own"
            plain = PlainServer(round, in_clear, encoding, self.dimension, own, most_lost)
        if not hidden:
            return plain
        rules = self.rules(round, len(hidden), encoding, most_lost)
        if rules.complete:
            drawn = graph.complete(hidden, rules.threshold)
        else:
            drawn = graph.regular(hidden, rules.degree, rules.threshold, source)
        neighbours = {party: drawn.neighbours(party) for party in hidden}
        machine = SecAggServer(rules, neighbours, identities=identities, threads=threads, meter=self._measure)
        secure = SecureServer(machine, encoding)
        return HybridServer(plain, secure, frozenset(in_clear)) if in_clear else secure

    def party(
        self,
        round: int,
        party: int,
        cohort: int,
        encoding: Encoding,
        values: np.ndarray,
        support: np.ndarray | None,
        identity: Identity | None,
        most_lost: int | None = None,
    ) -> PartySession:
        """`cohort`: how many go the same way as this party; `most_lost` as for the server."""
        if party in self.clear:
            return PlainParty(round, party, encoding, self.dimension, values, support)
        rules = self.rules(round, cohort, encoding, most_lost)
        return SecureParty(SecAggParty(rules, party, values, identity=identity, meter=self._measure))


def parse_parties(config: Config) -> frozenset[int]:
    text = config.aggregation.clear_parties
    try:
        chosen = frozenset(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ConfigError(f"clear_parties = {text}: must be numbers of parties, separated by commas") from None
    if not chosen <= set(range(config.run.parties)):
        raise ConfigError(f"clear_parties = {text}: must be between 0 and {config.run.parties - 1}")
    return chosen
