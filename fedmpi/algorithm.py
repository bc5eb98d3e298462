"""What the engine asks of a method, and how it finds one.

A method decides what is trained and what is shared. It never sees a message, a rank or a sum in the making: the engine
hands it the shared vector and takes back an update. Everything shared is one flat float32 vector.

A method is one file in a `methods` folder, named as the user types it (`dp_pfeddsu.py` is `--method dp-pfeddsu`), that
defines a class `Method`. A class elsewhere works as well: `--method mypackage.mymodule:MyMethod`. What it can be told is
its `Settings`, a frozen dataclass inside the class: each field is a flag, a line of `config.yaml` and a line of --help.
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedmpi import config
from fedmpi.errors import ConfigError
from fedmpi.privacy.mechanism import ClippedVector, Declaration, ExactRows

FOLDERS = ("fedmpi.vision.methods", "fedmpi.recsys.methods")


@dataclass(frozen=True)
class LocalUpdate:
    """What a party's local work yields: the update on its support, before clipping."""

    party: int
    values: np.ndarray  # float, one per coordinate of the support
    support: np.ndarray | None = None  # sorted int64 coordinates; None: the public support of this round
    figures: dict[str, float] = field(default_factory=dict)  # Algorithm.report_columns by name

    @property
    def parties(self) -> tuple[int, ...]:
        return (self.party,)


@dataclass(frozen=True)
class RowUpdates:
    """What the parties of a rank send when the shared vector is a matrix and each touches some of its rows."""

    parties: tuple[int, ...]
    counts: np.ndarray  # rows of each party, in their order
    rows: np.ndarray  # int64, ascending within a party
    values: np.ndarray  # (rows, width) float
    figures: np.ndarray  # (parties, report columns) float64


@dataclass(frozen=True)
class Score:
    """A party's test result."""

    correct: int
    total: int
    loss: float


@dataclass(frozen=True)
class References:
    """What a party reaches without any sharing; the closing table shows them beside the result."""

    untrained_correct: int  # the extractor as it was drawn, the head trained as long as the run will train it
    local_correct: int | None  # extractor and head trained alone; None: it was not asked for
    total: int


class Algorithm(ABC):
    """One per rank. Party state stays here between rounds, keyed by party.

    The engine asks about many parties at once. A method starts from one of the two kinds below: `PartyAlgorithm`, which works
    party by party, or `RowAlgorithm`, which works on all parties of a rank at once.

    What a method sends it declares in `sends`, and the engine does the rest: clipping, rounding and noise are the mechanism's,
    and whatever `local_work` yields goes through it.
    """

    @dataclass(frozen=True)
    class Settings(config.Settings):
        """What the method can be told. A subclass may declare its own, which inherits from its base's."""

    task: str
    sends: Declaration = ClippedVector()
    supports: tuple[str, ...] = ("dense",)  # the values of --support that make sense for it
    shares: bool = True  # False: nothing is sent; the run is one evaluation
    noise_ratio: float = (
        0.0  # the engine sets it: R, a run's noise over the most that its updates can carry; 0: no noise
    )
    pays_below: float = 8.0  # the noise_ratio above which parties did better alone (benchmarks/README.md) ...
    measured_with: str = "centaur"  # ... with this method: the nearest one, where its own is not known
    chooses_clear: bool = False  # whether `clear_parties` follows --clear-rule
    scores: tuple[str, ...]  # what `summarise` gives, as summary.json names it
    score_columns: int  # of an `evaluate_all` row
    reference_scores: tuple[str, ...]  # what `summarise_references` gives; none: it is not asked
    reference_columns: int  # of a `references_all` row
    report_columns: tuple[str, ...]  # of a party's figures of its local work

    @abstractmethod
    def __init__(self, config: Any, store: Any, device: str = "cpu"):
        """`config`: the run's Config; `store`: its prepared data, None without."""

    @classmethod
    def pick_device(cls, setting: str, threads: int) -> str:
        """The device that this rank computes on; a method that uses no GPU stays on the CPU."""
        return "cpu"

    def host(self, parties: tuple[int, ...]) -> None:  # noqa: B027
        """A client rank says once, before its first round, whose data it holds."""

    def clear_parties(self) -> tuple[int, ...]:
        """Hybrid aggregation: the hosted parties whose own data let them share in the clear."""
        return ()

    @property
    @abstractmethod
    def data_fingerprint(self) -> int:
        """32 bits that are equal on ranks with the same data."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Length of the shared vector."""

    @abstractmethod
    def initial(self) -> np.ndarray:
        """The shared vector before round 1, the same on every rank."""

    @abstractmethod
    def public_support(self, theta: np.ndarray) -> np.ndarray | None:
        """The coordinates that every party sends in this round, a function of theta alone; None: all of them."""

    @abstractmethod
    def support_size(self) -> int:
        """How many coordinates a party sends a round, known before the run; under support `union`, at most."""

    @abstractmethod
    def local_work(self, parties: tuple[int, ...], theta: np.ndarray, round: int) -> Iterable[LocalUpdate | RowUpdates]:
        """One round's work of these parties on their own data, from theta: as vectors, or as rows if `sends` says so."""

    @abstractmethod
    def evaluate_all(self, parties: tuple[int, ...], theta: np.ndarray, round: int) -> np.ndarray:
        """A row of figures for each party; their sum over parties is all that `summarise` needs."""

    @abstractmethod
    def references_all(self, parties: tuple[int, ...], theta: np.ndarray) -> np.ndarray:
        """The same for `summarise_references`."""

    @abstractmethod
    def summarise(self, total: np.ndarray) -> dict[str, float]:
        """The scores from the sum of everybody's `evaluate_all` rows."""

    @abstractmethod
    def summarise_references(self, total: np.ndarray) -> dict[str, float | None]:
        """The reference scores from the sum of everybody's `references_all` rows."""

    def plausible(self, figures: np.ndarray, round: int) -> np.ndarray:
        """Which rows of test figures can be what `evaluate_all`, or in round 0 `references_all`, gives: rank 0 believes no others."""
        return np.isfinite(figures).all(axis=1)

    def summarise_training(self, rows: np.ndarray) -> dict[str, float]:
        """What a round's row says of the parties' own figures: by default the mean of each column."""
        return dict(zip(self.report_columns, rows.mean(axis=0).tolist()))

    def most_lost(self, theta: np.ndarray) -> int | None:
        """How many of the parties that were asked a round from theta may lose and still open its sum; None: as many as the
        aggregation can do without. A function of theta, so that each party works it out by itself.
        Not for hybrid aggregation, neither half of which knows what the other lost: a method that needs it refuses that."""
        return None

    def step(self, theta: np.ndarray, total: np.ndarray, rate: float, support: np.ndarray | None) -> np.ndarray:
        """theta + rate * total, rate being eta_g over the denominator; float64 inside, one rounding at the end. Every rank does it with the
        sum that rank 0 sends, so it must follow from these and from `server_state` alone; where it does not, ranks notice, and are sent all of
        theta from then on."""
        moved = theta.astype(np.float64)
        if support is None:
            moved += total * rate
        else:
            moved[support] += total * rate
        return moved.astype(np.float32)

    # ---- what a finished run leaves, see fedmpi.model ----

    def shared_arrays(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        """The shared parameters by name: every coordinate of theta in one of them; of a method that shares nothing, none."""
        return {"theta": theta}

    def model_facts(self) -> dict:
        """What a reader needs to use them, as JSON. `predicts` names the reader; without it there is none."""
        return {}

    def model_arrays(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        """The same as arrays: what everybody may see and nobody trained."""
        return {}

    def own_parts(self, parties: tuple[int, ...], theta: np.ndarray, round: int) -> dict[str, np.ndarray]:
        """--keep-parties: what each of them predicts with beside theta, stacked, as `evaluate_all` would have it; leaves no
        trace in their states."""
        return {}

    # ---- state ----

    def server_state(self) -> dict[str, np.ndarray]:
        """What `step` keeps between rounds, for the server's checkpoint."""
        return {}

    def load_server_state(self, state: dict[str, np.ndarray]) -> None:  # noqa: B027
        """Put it back."""

    def party_state(self, party: int) -> dict[str, np.ndarray]:
        """What the party keeps between rounds, for its checkpoint; the same names and shapes for every party."""
        return {}

    def load_party_state(self, party: int, state: dict[str, np.ndarray]) -> None:  # noqa: B027
        """Put a checkpointed state back."""

    def states(self, parties: tuple[int, ...]) -> dict[str, np.ndarray]:
        """The states of these parties, stacked."""
        each = [self.party_state(party) for party in parties]
        return {name: np.stack([state[name] for state in each]) for name in each[0]}

    def load_states(self, parties: tuple[int, ...], stacked: dict[str, np.ndarray]) -> None:
        for index, party in enumerate(parties):
            self.load_party_state(party, {name: values[index] for name, values in stacked.items()})


class PartyAlgorithm(Algorithm):
    """A method that works party by party and is scored by the accuracy of each."""

    scores = ("accuracy",)
    score_columns = 2
    reference_scores: tuple[str, ...] = ("accuracy_untrained", "accuracy_local_only")
    reference_columns = 3
    report_columns: tuple[str, ...] = ("loss", "head_loss", "penalty")  # LocalUpdate.figures, in this order

    @abstractmethod
    def work(self, party: int, theta: np.ndarray, round: int) -> LocalUpdate:
        """Train on the party's own data from theta."""

    @abstractmethod
    def evaluate(self, party: int, theta: np.ndarray, round: int) -> Score:
        """Test theta on the party's own test data; leaves no trace in its state."""

    @abstractmethod
    def references(self, party: int, theta: np.ndarray) -> References:
        """What the party reaches from the untrained theta on its own; leaves no trace in its state."""

    def local_work(self, parties: tuple[int, ...], theta: np.ndarray, round: int) -> Iterator[LocalUpdate]:
        return (self.work(party, theta, round) for party in parties)

    def evaluate_all(self, parties: tuple[int, ...], theta: np.ndarray, round: int) -> np.ndarray:
        scores = (self.evaluate(party, theta, round) for party in parties)
        return np.array([(score.correct / score.total, 1.0) for score in scores])

    def references_all(self, parties: tuple[int, ...], theta: np.ndarray) -> np.ndarray:
        def row(own: References) -> tuple[float, float, float]:
            # Rows are added up, also by the protocol, which knows no NaN: a sum below 0 was not measured.
            alone = -1.0 if own.local_correct is None else own.local_correct / own.total
            return own.untrained_correct / own.total, alone, 1.0

        return np.array([row(self.references(party, theta)) for party in parties])

    def plausible(self, figures: np.ndarray, round: int) -> np.ndarray:
        """Shares of samples that are right, then a one; a reference that was not measured is -1. A method with columns of its own
        knows better what they can be."""
        own = (type(self).evaluate_all, type(self).references_all)
        if own != (PartyAlgorithm.evaluate_all, PartyAlgorithm.references_all):
            return super().plausible(figures, round)
        shares, ones = figures[:, :-1], figures[:, -1]
        possible = (shares >= 0) & (shares <= 1)
        if round == 0:
            possible[:, 1] |= shares[:, 1] == -1
        return possible.all(axis=1) & (ones == 1)

    def summarise(self, total: np.ndarray) -> dict[str, float]:
        return {"accuracy": float(total[0] / total[1])}

    def summarise_references(self, total: np.ndarray) -> dict[str, float | None]:
        untrained, alone = (float(total[column] / total[2]) for column in (0, 1))
        return {"accuracy_untrained": untrained, "accuracy_local_only": alone if alone >= 0 else None}


class RowAlgorithm(Algorithm):
    """The shared vector is a matrix of rows; a rank works on all its parties at once and each sends the rows it touched."""

    sends: ExactRows
    supports = ("own", "dense")  # own: each party names its rows, in the clear; dense: all rows, most of them zero

    @abstractmethod
    def row_updates(self, parties: tuple[int, ...], theta: np.ndarray, round: int) -> RowUpdates:
        """One round's local work of these parties."""

    def local_work(self, parties: tuple[int, ...], theta: np.ndarray, round: int) -> Iterator[RowUpdates]:
        yield self.row_updates(parties, theta, round)

    def public_support(self, theta: np.ndarray) -> None:
        return None

    def support_size(self) -> int:
        return self.dimension


def method_names(folders: tuple[str, ...] = FOLDERS) -> list[str]:
    """Every method by the name the user types; no method is imported for it."""
    files = (
        entry.name for folder in folders for entry in pkgutil.iter_modules(importlib.import_module(folder).__path__)
    )
    return sorted(name.replace("_", "-") for name in files if not name.startswith("_"))


def load_method(name: str) -> type[Algorithm]:
    """The class behind --method; ConfigError says what there is."""
    if ":" in name:
        module_name, _, class_name = name.partition(":")
        try:
            return getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"method = {name}: {error}") from None
        except SystemExit as stop:
            raise ConfigError(
                f"method = {name}: {module_name} left by sys.exit({stop.code}) as it was imported"
            ) from None
    return importlib.import_module(f"{folder_of(name)}.{name.replace('-', '_')}").Method


def folder_of(name: str) -> str | None:
    """The folder that a method's file is in, without importing it; None for one from elsewhere, ConfigError for none."""
    if ":" in name:
        return None
    for folder in FOLDERS:
        if name in method_names((folder,)):
            return folder
    raise ConfigError(f"method = {name}: must be one of {', '.join(method_names())}, or module:Class")
