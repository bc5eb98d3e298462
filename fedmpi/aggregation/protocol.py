"""What secure aggregation works by: the rules that both ends of a session work out by themselves, and whether they can hold."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fedmpi.config import OWN, Config, from_dict
from fedmpi.errors import ConfigError
from fedmpi.privacy.encoding import Encoding
from fedmpi.secagg import graph
from fedmpi.secagg.rules import Rules
from fedmpi.wire.phases import Purpose

SMALL_COHORT = 200


@dataclass(frozen=True)
class Session:
    """Which session of the run, and what both its ends know: the round, how many are hidden, what the method says of losses."""

    round: int
    purpose: Purpose = Purpose.TRAINING
    most_lost: int | None = None  # parties that it may lose and still open its sum, `Algorithm.most_lost`
    about: bytes = b""  # what the inputs were made from, `digest` of the model
    keys: int = 0  # the round in which its keys are made, in a batch; 0: they are its own


def digest(theta: np.ndarray) -> bytes:
    """The model that everybody was shown."""
    return hashlib.sha256(np.ascontiguousarray(theta, "<f4").data).digest()


def agreed(config: Config, multiplier: float) -> bytes:
    """Digest of the settings that all ranks must have alike, and of sigma. As they are once they have travelled: a number that was
    written as 1 and is a fraction by its type is 1.0 on every rank."""
    travelled = from_dict(json.loads(json.dumps(config.as_dict())), config, "settings")
    settings = {
        layer: {name: value for name, value in values.items() if name not in OWN.get(layer, ())}
        for layer, values in travelled.as_dict().items()
    }
    return hashlib.sha256(json.dumps([settings, multiplier.hex()], sort_keys=True).encode()).digest()


def name_of_session(chosen: bytes, nonces: bytes) -> bytes:
    """Of what rank 0 chose and of every party's nonce: no party can be brought into a session that was there before."""
    return hashlib.sha256(b"fedmpi/session/1" + len(chosen).to_bytes(4, "big") + chosen + nonces).digest()


def batch_of(config: Config, round: int) -> tuple[int, int]:
    """The first and the last round of those that have their keys made together with this one's, if nothing comes in between."""
    size = config.aggregation.key_rounds
    first = (round - 1) // size * size + 1
    return first, min(first + size - 1, config.run.rounds)


def chosen_clear(config: Config) -> frozenset[int]:
    """Who shares in the clear by the configuration alone: everybody, nobody, or who is listed. A method's rule adds to these."""
    kind, text = config.aggregation.aggregation, config.aggregation.clear_parties
    if kind != "hybrid":
        return frozenset(range(config.run.parties) if kind == "plain" else ())
    try:
        chosen = frozenset(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ConfigError(f"clear_parties = {text}: must be numbers of parties, separated by commas") from None
    if not chosen <= set(range(config.run.parties)):
        raise ConfigError(f"clear_parties = {text}: must be between 0 and {config.run.parties - 1}")
    return chosen


class ProtocolRules:
    """What secure aggregation works by, for any number of hidden parties; and whether it can."""

    def __init__(self, config: Config, session: bytes = b"", multiplier: float = 0.0):
        self._config, self._settings, self._session = config, config.aggregation, session
        self._agreed = agreed(config, multiplier)

    def meet(self, nonces: bytes) -> None:
        """Everybody's nonces are there: from now on the session is theirs as well."""
        self._session = name_of_session(self._session, nonces)

    def of(self, session: Session, hidden: int, encoding: Encoding) -> Rules:
        """The same for the server and for every party. ConfigError if so many cannot run the protocol."""
        settings, most_lost = self._settings, session.most_lost
        degree, threshold = self._shape(hidden)
        if settings.graph == "regular":
            # With more than these lost, what is left of a sparse graph may fall apart, and a part's sum would show.
            of_graph = graph.share_of(hidden, settings.expected_dropout)
            most_lost = of_graph if most_lost is None else min(of_graph, most_lost)
        return Rules(
            session=self._session,
            round=session.round,
            purpose=session.purpose,
            cohort=hidden,
            threshold=threshold,
            degree=degree,
            dimension=encoding.dimension,
            bits=encoding.bits,
            active=settings.adversary == "active",
            most_lost=most_lost,
            agreed=self._agreed,
            about=session.about,
            batch=(session.keys, batch_of(self._config, session.keys)[1]) if session.keys else None,
        )

    def _shape(self, hidden: int) -> tuple[int, int]:
        """(neighbours of a party, shares that open a secret)"""
        settings = self._settings
        if settings.graph == "regular":
            degree, threshold = graph.regular_parameters(hidden, settings.corrupt, settings.expected_dropout)
        else:
            degree, threshold = hidden - 1, settings.threshold or graph.default_threshold(hidden)
        if settings.adversary == "active" and not 2 * threshold > hidden + settings.colluding:
            raise ConfigError(
                f"threshold = {threshold}: an active adversary needs 2t > n + colluding ({hidden} + {settings.colluding})"
            )
        graph.check_cohort(hidden)
        graph.check_degree(degree, hidden)
        graph.check_threshold(threshold, degree + 1)
        return degree, threshold

    def opens(self, hidden: int, colluding: int) -> bool:
        """Whether so many colluders among `hidden` parties, together with rank 0, can unmask any one party: they hold enough shares of
        both its secrets, or are more than the sparse graph is safe against."""
        if self._settings.graph == "regular":
            return colluding > self._settings.corrupt * hidden
        return colluding >= self._shape(hidden)[1]

    def least_noise(self) -> tuple[int, int]:
        """(honest shares of the noise, size of the cohort that they were made for) of the sum with the least noise that a rank 0
        which lies can have opened, where the adversary is active: it announces the cohort that suits it, and has as many
        dropped as the threshold allows. (0, 0) where there is no such bound: parties in the clear have none."""
        config, settings = self._config, self._settings
        if settings.adversary != "active" or settings.aggregation != "secure":
            return 0, 0
        everyone = config.run.parties
        sizes = [everyone] if config.privacy.sampling >= 1 else range(config.privacy.min_cohort, everyone + 1)
        noises = {size: max(0, self._shape(size)[1] - settings.colluding) for size in sizes}
        worst = min(noises, key=lambda size: noises[size] / size)
        return (noises[worst], worst) if noises[worst] else (0, 0)

    def check(self, clear: Collection[int]) -> None:
        """ConfigError if the whole cohort, or one that may be drawn, cannot run the protocol as configured."""
        config, least = self._config, self._config.privacy.min_cohort
        hidden = config.run.parties - len(clear)
        if config.privacy.shown == "securesum":
            self._shape(config.run.parties)  # in a sum of test figures everybody is hidden
        if not hidden:
            return
        if hidden < least:
            raise ConfigError(
                f"hybrid: {hidden} of {config.run.parties} parties are left for secure aggregation, at least {least} "
                "are needed, or all in the clear (--aggregation plain)"
            )
        if config.privacy.sampling < 1:
            return self._check_sizes(least, hidden)
        threshold, colluding = self._shape(hidden)[1], self._settings.colluding
        if self.opens(hidden, colluding):
            most = str(threshold - 1)
            if self._settings.graph == "regular":
                most = f"--corrupt ({self._settings.corrupt:g}) of {hidden}"
            raise ConfigError(
                f"colluding = {colluding}: so many open any single update with rank 0; must be at most {most}"
            )

    def _check_sizes(self, least: int, most: int) -> None:
        """Sampled cohorts vary: every size must do, or a run would end when the first one that does not is drawn. It is small
        ones that do not."""
        for size in (most, *range(min(most, SMALL_COHORT), least - 1, -1)):
            try:
                self._shape(size)
            except ConfigError as error:
                higher = f"; --min-cohort {size + 1} would keep cohorts larger" if size < most else ""
                raise ConfigError(f"a cohort of {size} hidden parties may be drawn: {error}{higher}") from None
