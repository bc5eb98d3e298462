"""The mechanism: everything that is done to an update before it leaves its party, as one object.

A method declares once what it sends; with the run's settings that makes the mechanism, and whoever needs to know (the party
that encodes, the account that counts, the lines that are printed, the law of message sizes) reads it there.

    ClippedVector    a vector, shortened to norm C, rounded at random, with the party's share of the noise: what an epsilon is for
    BoundedVector    a vector that must be within a bound; longer ones end the run. No noise, so no epsilon
    ExactRows        rows of a matrix, each value cut to [-C, C] and rounded to the nearest step. No noise, so no epsilon
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from fedmpi.errors import ConfigError, DataError, ProtocolError
from fedmpi.privacy.encoding import Encoding, choose_encoding, rounding_cost, wrap_probability
from fedmpi.privacy.noise import clip, discrete_gaussian, round_conditionally, sum_divergence, sum_multiplier
from fedmpi.privacy.rotation import block_of, padded, rotate, rotate_back
from fedmpi.randomness.words import WordSource

ROWS = 1 << 14  # encoded at a time: they stay in the cache

Kind = TypeVar("Kind", bound="Mechanism")
KindRotated = TypeVar("KindRotated", bound="Rotated")
Draw = Callable[[str], WordSource]  # the source of randomness for a purpose: "rounding", "noise"


def noise_to_signal(sigma: float, q: float, parties: int, coordinates: int, rounds: int) -> float:
    """R: the norm that noise adds up to over a run, sigma C/(qN) sqrt(rounds coordinates), over the furthest that clipped mean
    updates can go, rounds C. It knows nothing of the data. Noise has no direction and updates may have one, so something can
    be learnt above 1, though not far above."""
    return sigma * math.sqrt(coordinates) / (q * parties * math.sqrt(rounds))


# ---- what is done ----


@dataclass(frozen=True)
class Mechanism(ABC):
    encoding: Encoding
    own_coordinates: bool = False  # chosen by the party's data, which noise on the values does not cover
    multiplier: float = 0.0  # sigma: noise on the whole sum, divided by the most that one party can change it; 0: none
    margin: float = 0.0  # share of the cohort whose noise may be lost
    width: int = 1  # of a row, where rows are sent

    form: ClassVar[str]  # of what is sent: vector, rows
    shortens: ClassVar[bool] = False  # longer updates lose what is beyond the bound
    adds_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.multiplier and not self.adds_noise:
            raise ValueError(f"{type(self).__name__} adds no noise, and has a multiplier of {self.multiplier}")

    @property
    def noisy(self) -> bool:
        return self.multiplier > 0

    @property
    def summed(self) -> float:
        """The multiplier of a sum that nobody is missing from: the margin is in it."""
        return self.multiplier / math.sqrt(1 - self.margin)

    @property
    def coordinates(self) -> int:
        """Of an update, which may be fewer than are sent."""
        return self.encoding.dimension

    @property
    def block(self) -> int:
        """Of the rotation; 0: none."""
        return 0

    def of_round(self: Kind, round: int) -> Kind:
        """The mechanism as it is in this round."""
        return self

    def decode(self, total: np.ndarray) -> np.ndarray:
        """A sum of encoded updates as a sum of updates, float64."""
        return self.encoding.decode(total)

    def over(self: Kind, dimension: int) -> Kind:
        """The same mechanism over another number of coordinates, for a support that is found in the round."""
        return dataclasses.replace(self, encoding=dataclasses.replace(self.encoding, dimension=dimension))

    def share(self, cohort: int) -> float:
        """The deviation of one party's noise in integer steps: so much that a cohort's shares add up to the noise that was asked
        for, also where the margin's part of them is lost."""
        return self.multiplier * self.encoding.sensitivity / math.sqrt(cohort * (1 - self.margin))

    def of_sum(self, share: float, parties: int, coordinates: int) -> float:
        """The multiplier of a sum of this many shares as one discrete Gaussian; `share`: one party's noise divided by the
        sensitivity."""
        sensitivity = self.over(coordinates).encoding.sensitivity
        divergence = sum_divergence(share * sensitivity, parties)
        return sum_multiplier(share * math.sqrt(max(0, parties)), divergence, coordinates)

    def noise_to_signal(self, sampling: float, parties: int, rounds: int) -> float:
        """R of a run, see `noise_to_signal`."""
        return noise_to_signal(self.summed, sampling, parties, self.coordinates, rounds)

    def rounding_cost(self, parties: int) -> float:
        """By what part of sigma rounding makes the deviation of a whole cohort's sum larger; only where there is noise."""
        return rounding_cost(self.encoding.steps, self.encoding.dimension, parties, self.summed)

    def wrap_probability(self, parties: int, rounds: int) -> float:
        """A bound on the probability that any sum of a run wraps."""
        encoding = self.encoding
        run = encoding.dimension, parties, self.summed, rounds
        return wrap_probability(encoding.steps, encoding.bits, *run, self.block)

    def opening(self, sampling: float, parties: int, rounds: int) -> str:
        """The line about noise that is printed before a run starts."""
        bound = self.encoding.clip
        if not self.noisy:
            return f"noise: none; a mean update has norm {bound:g} at most"
        ratio = self.noise_to_signal(sampling, parties, rounds)
        return (
            f"noise: sigma {self.summed:.4g}; over {rounds} rounds it adds up to norm {ratio * bound * rounds:.3g} in "
            f"{self.coordinates} coordinates, mean updates to {bound * rounds:g} at most: R = {ratio:.3g}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For privacy.json."""
        return {
            "noise": "discrete Gaussian on the encoded update" if self.noisy else "none",
            "noise_multiplier": self.multiplier,
            "clip": self.encoding.clip,
            "steps_per_clip": self.encoding.steps,
            "sensitivity_in_steps": self.encoding.sensitivity,
            "bits": self.encoding.bits,
            "coordinates": self.encoding.dimension,
        }

    def facts(self) -> dict[str, Any]:
        """All of it, for the log of releases; `from_facts` reads it."""
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}

    @staticmethod
    def from_facts(facts: dict[str, Any]) -> Mechanism:
        kinds: dict[str, type[Mechanism]] = {kind.__name__: kind for kind in (Noised, Rotated, Bounded, Cut)}
        try:
            given = dict(facts)
            kind, encoding = kinds[given.pop("kind")], Encoding(**given.pop("encoding"))
            return kind(encoding, **given)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"the mechanism cannot be read ({type(error).__name__}: {error})") from None


@dataclass(frozen=True)
class Vector(Mechanism):
    """One vector a party, its norm bounded."""

    form = "vector"

    def encode(self, update: np.ndarray, cohort: int, draw: Draw, party: int) -> np.ndarray:
        """The update as integers modulo 2^bits, as one of a cohort of this many."""
        clipped, norm = clip(update, self.encoding.clip, party=party)  # DSU (12)
        if norm > self.encoding.clip and not self.shortens:
            raise ProtocolError(
                f"the update has norm {norm:.3g}, more than the {self.encoding.clip:g} that a method without clipping can "
                "send; did training diverge?",
                party=party,
                phase="encode",
            )
        # The product may be a last bit above the bound: rounded up from there, it would be a step more than the width has room for.
        scaled = np.clip(self.turned(clipped) * self.encoding.scale, -self.encoding.steps, self.encoding.steps)
        steps = round_conditionally(scaled, self.encoding.steps, draw("rounding"), party=party)
        if self.noisy:
            # DSU (13), as integers after the encoding: what the accountant's proof speaks about.
            steps += discrete_gaussian(self.share(cohort), steps.size, draw("noise"))
        return self.encoding.wrap(steps)

    def turned(self, clipped: np.ndarray) -> np.ndarray:
        """What is rounded and noised in place of the clipped update."""
        return clipped


@dataclass(frozen=True)
class Noised(Vector):
    """Clipped, rounded, noised; sigma 0 where epsilon is infinite."""

    shortens = adds_noise = True


@dataclass(frozen=True)
class Rotated(Noised):
    """Noised, after a rotation that everybody knows: `encoding` is of the padded vector, and so are noise and sensitivity."""

    length: int = 0  # coordinates of an update, before they are padded
    seed: int = 0
    round: int = 0  # whose signs these are

    @property
    def coordinates(self) -> int:
        return self.length

    @property
    def block(self) -> int:
        return block_of(self.length)

    def of_round(self: KindRotated, round: int) -> KindRotated:
        return dataclasses.replace(self, round=round)

    def over(self: KindRotated, dimension: int) -> KindRotated:
        """Coordinates are not found in a round here, so it is the same."""
        return self

    def turned(self, clipped: np.ndarray) -> np.ndarray:
        return rotate(clipped, self.seed, self.round)

    def decode(self, total: np.ndarray) -> np.ndarray:
        return rotate_back(total, self.length, self.seed, self.round) / self.encoding.scale


@dataclass(frozen=True)
class Bounded(Vector):
    """Rounded; what is too long ends the run."""


@dataclass(frozen=True)
class Cut(Mechanism):
    """Rows; each value cut and rounded by itself."""

    form = "rows"

    def opening(self, sampling: float, parties: int, rounds: int) -> str:
        return f"noise: none; values of a row within ±{self.encoding.clip:g}, in steps of {1 / self.encoding.scale:.2g}"

    def encode_rows(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(steps, how many of a row's values were cut)

        Rounding to nearest is a function of the value alone, so all parties of a rank are encoded at once. It errs by
        half a step at most, and no proof about noise depends on it, because there is none.
        """
        bound, scale = self.encoding.clip, np.asarray(self.encoding.scale, values.dtype)
        steps = np.empty(values.shape, np.int32)
        cut = np.zeros(values.shape[0], np.int64)
        for first in range(0, len(values), ROWS):
            at = slice(first, first + ROWS)
            chunk = values[at] * scale
            largest = np.abs(chunk).max(initial=0)
            if not largest <= self.encoding.steps:  # not finite, or out of range
                if not np.isfinite(chunk).all():
                    raise ProtocolError(
                        "an update holds a value that is not a finite number; it was not sent", phase="encode"
                    )
                cut[at] = (np.abs(values[at]) > bound).sum(axis=1)
                np.clip(chunk, -self.encoding.steps, self.encoding.steps, out=chunk)
            steps[at] = np.rint(chunk, out=chunk)
        return steps, cut


# ---- how it is chosen ----


@dataclass(frozen=True)
class Wanted:
    """What the settings of a run ask of its mechanism."""

    epsilon: float
    clip: float
    multiplier: float  # sigma that the accountant asks for epsilon
    margin: float
    parties: int
    rounds: int
    bits: int  # of an encoded coordinate; 0: as many as it takes
    steps: int  # in the clipping bound; 0: likewise
    own_coordinates: bool
    rotation: str = "none"
    seed: int = 0  # of the rotation's signs, which are public


@dataclass(frozen=True)
class Declaration(ABC):
    """What a method says of what it sends."""

    kind: ClassVar[type[Mechanism]]

    def bound_on(self, wanted: Wanted) -> float:
        return wanted.clip

    def mechanism(self, encoding: Encoding, wanted: Wanted) -> Mechanism:
        return self.kind(encoding, wanted.own_coordinates)


@dataclass(frozen=True)
class ClippedVector(Declaration):
    """One vector a party, shortened to --clip and noised for --epsilon."""

    kind = Noised

    def mechanism(self, encoding: Encoding, wanted: Wanted) -> Mechanism:
        return Noised(encoding, wanted.own_coordinates, wanted.multiplier, wanted.margin)

    def rotated(self, encoding: Encoding, wanted: Wanted, coordinates: int) -> Mechanism:
        noise = wanted.multiplier, wanted.margin
        return Rotated(encoding, False, *noise, length=coordinates, seed=wanted.seed)


@dataclass(frozen=True)
class BoundedVector(Declaration):
    """One vector a party, never shortened: `bound` is the range of its encoding, in place of --clip."""

    kind = Bounded
    bound: float

    def bound_on(self, wanted: Wanted) -> float:
        return self.bound


@dataclass(frozen=True)
class ExactRows(Declaration):
    """Rows of a matrix, of `width` values each: those that a party touched."""

    kind = Cut
    width: int

    def mechanism(self, encoding: Encoding, wanted: Wanted) -> Mechanism:
        return Cut(encoding, wanted.own_coordinates, width=self.width)


def check_epsilon(declared: Declaration, epsilon: float, method: str) -> None:
    """ConfigError where an epsilon is asked of what has no noise."""
    if not declared.kind.adds_noise and math.isfinite(epsilon):
        raise ConfigError(f"epsilon = {epsilon:g}: {method} adds no noise and promises no epsilon; take inf")


def choose_mechanism(declared: Declaration, wanted: Wanted, coordinates: int, method: str) -> Mechanism:
    """The one mechanism of a run; ConfigError where an epsilon is asked of what has no noise, and where a sum could wrap."""
    check_epsilon(declared, wanted.epsilon, method)
    rotates = wanted.rotation == "hadamard"
    if rotates and (not isinstance(declared, ClippedVector) or wanted.multiplier == 0 or wanted.own_coordinates):
        raise ConfigError(
            "rotation = hadamard: only for updates that are clipped and noised over coordinates that nobody's data chose; take none"
        )
    encoding = choose_encoding(
        clip=declared.bound_on(wanted),
        dimension=padded(coordinates) if rotates else coordinates,
        parties=wanted.parties,
        multiplier=wanted.multiplier / math.sqrt(1 - wanted.margin),
        rounds=wanted.rounds,
        bits=wanted.bits,
        steps=wanted.steps,
        block=block_of(coordinates) if rotates else 0,
    )
    if rotates and isinstance(declared, ClippedVector):
        return declared.rotated(encoding, wanted, coordinates)
    return declared.mechanism(encoding, wanted)
