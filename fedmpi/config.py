"""What a run is: frozen dataclasses, one per layer, with the range of every field beside it.

Field names are unique over all layers, so that each is one plain flag on the command line (`--epsilon`, `--rounds`).
Presets and `--config` files group them by layer, as `config.yaml` of a run does. Here stands what every run has; what a
method can be told stands in the method's own file, as `Method.Settings`, and is the layer `method` of a run of it.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fedmpi.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Allowed values of a number; `over` excludes its bound, `least` includes it."""

    least: float | None = None
    over: float | None = None
    most: float | None = None
    finite: bool = True

    def allows(self, value: float) -> bool:
        if math.isnan(value) or (self.finite and math.isinf(value)):
            return False
        return (
            (self.least is None or value >= self.least)
            and (self.over is None or value > self.over)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        low = f">= {self.least:g}" if self.least is not None else f"> {self.over:g}" if self.over is not None else ""
        high = f"<= {self.most:g}" if self.most is not None else ""
        return " and ".join(part for part in (low, high) if part) or "a finite number"


Positive = Annotated[float, Range(over=0)]
NonNegative = Annotated[float, Range(least=0)]
Count = Annotated[int, Range(least=1)]
CountOrZero = Annotated[int, Range(least=0)]
Fraction = Annotated[float, Range(over=0, most=1)]

MOST_ROUNDS = 2**32 - 1  # that a message can name, see fedmpi.wire.frame
MOST_PARTIES = 10_000_000  # rank 0 knows each by itself


@dataclass(frozen=True)
class Run:
    """What to run, how long, and where it goes."""

    preset: str = "demo"
    """settings to start from: see `fedmpi --presets`"""
    method: str = "dp-pfeddsu"
    """what is trained and shared"""
    rounds: Annotated[int, Range(least=1, most=MOST_ROUNDS)] = 30
    """T, global rounds"""
    parties: Annotated[int, Range(least=1, most=MOST_PARTIES)] = 20
    """N, logical clients; more than client ranks means several on each rank"""
    seed: CountOrZero = 0
    """one seed for data, training, sampling, rounding and (entropy seeded) noise"""
    out: str | None = None
    """the run's folder (default: runs/<preset>-<method>-s<seed>)"""
    resume: str | None = None
    """continue the run in this folder from its last checkpoint"""
    checkpoint_every: CountOrZero = 10
    """rounds between checkpoints; 0: none"""
    keep_parties: bool = False
    """at the end each rank keeps what its parties predict with (heads, running statistics, p_u) in OUT/parties, on its own disk"""
    round_deadline: Positive = 3600.0
    """seconds that one phase of a round may take before the run ends with an error"""
    on_loss: Literal["drop", "adopt", "end"] = "drop"
    """a rank that dies, or is not heard of: its parties drop out for the rest of the run (drop), are taken over by other ranks
    from their last checkpoint, on a disk that all share (adopt), or the run ends, to be resumed (end)"""
    rank_deadline: Annotated[float, Range(least=5)] = 60.0
    """seconds after which a rank that is not heard of is lost; each says once a second that it is there"""
    log: str | None = None
    """folder for a file per rank: when it did what, and what it waited for"""
    link: str = ""
    """a network that rounds are projected onto at the end, beside what they took: lan, wifi, 4g, satellite, or a file (fedmpi
    project --help)"""


MOST_KEY_ROUNDS = 256  # of a batch of keys: what a party holds, and deals in one message, grows with them


@dataclass(frozen=True)
class Data:
    """Whose data: the data set and how it is split over parties."""

    dataset: str = "digits"
    """digits (embedded), cifar10, cifar100, emnist (balanced), emnist-byclass, emnist-letters, emnist-digits, mnist,
    fashion-mnist, kmnist, femnist (needs data_dir); generated (embedded ratings), ml-100k, ml-1m, ml-10m, lastfm; none
    for a method that brings its own"""
    data_dir: str | None = None
    """folder with the data set in its official layout, CIFAR as pickles or binary (default: download to the cache)"""
    cache_dir: str | None = None
    """where prepared data is kept (default: $FEDMPI_CACHE or ~/.cache/fedmpi)"""
    partition: Literal["classes", "drawn", "dirichlet", "writers"] = "classes"
    """classes: exactly s classes a party, as FedRep does; drawn: the same, but each party draws its samples_per_party for
    itself and may have some that others have, for any number of parties; dirichlet: class shares drawn from
    Dirichlet(alpha); writers: each party one of the people who wrote the samples (femnist)"""
    classes_per_party: Count = 5
    """s, for partition classes"""
    alpha: Positive = 0.5
    """concentration, for partition dirichlet"""
    test_fraction: Annotated[float, Range(over=0, most=0.9)] = 0.2
    """share of each party's samples kept for testing, where the data set has no test split"""
    validation_fraction: Annotated[float, Range(least=0, most=0.9)] = 0.0
    """share of the training samples, or ratings, to evaluate on in place of the test ones, for tuning; under partition drawn
    of the pool that parties train from"""
    samples_per_party: CountOrZero = 0
    """most training samples of a party; 0: all it has"""
    shrink: Count = 1
    """images: every shrink x shrink pixels become one, their mean; 2 makes CIFAR 16 x 16 and four times as fast"""
    test_samples_per_party: CountOrZero = 0
    """most test samples of a party; 0: all it has, or where training samples are cut, the same share of them"""
    items: Count = 300
    """dataset generated: items"""
    ratings: CountOrZero = 0
    """dataset generated: ratings in all; 0: 60 a party"""
    tag_components: Count = 20
    """features of ml-10m and lastfm: principal components of the tags"""


@dataclass(frozen=True)
class Settings:
    """What a method can be told: nothing, until its class declares a `Settings` of its own that inherits from this one."""


@dataclass(frozen=True)
class Server:
    """What the server does with the sum."""

    server_lr: Positive = 1.0
    """eta_g, DSU algorithm 1 line 6"""
    denominator: Literal["expected", "survivors", "none"] = "expected"
    """divide the sum by qN, as the sensitivity assumes, by those who answered, or not at all (MMF algorithm 2)"""


@dataclass(frozen=True)
class Privacy:
    """Clipping, noise and the accountant."""

    epsilon: Annotated[float, Range(over=0, finite=False)] = 1.0
    """target; inf adds no noise"""
    delta: Annotated[float, Range(least=1e-10, most=0.5)] = 1e-5
    """target; a smaller one would be below what the sampler of the noise and the protocol are exact to"""
    clip: Positive = 0.01
    """C, DSU (12)"""
    sampling: Fraction = 1.0
    """q: each party joins a round with this probability (Poisson)"""
    min_cohort: Count = 3
    """a smaller cohort is not run"""
    accountant: Literal["rdp", "pld"] = "rdp"
    """rdp holds for the integer noise that is added; pld is tighter, for continuous noise, so nominal here"""
    entropy: Literal["seeded", "os"] = "seeded"
    """seeded: reproducible and protects nobody; os: noise keys from the operating system, no hash promise"""
    noise_margin: Annotated[float, Range(least=0, most=0.9)] = 0.0
    """share of the cohort that may drop out and leave enough noise for the target: shares are larger by 1/(1 - margin)"""
    metrics: Literal["auto", "party", "securesum", "none"] = "auto"
    """party: losses, norms and test counts of each party reach the server, and no epsilon holds towards it; securesum: only
    sums of test figures do, through the protocol; none: they stay home; auto: none under entropy os, otherwise party"""

    @property
    def shown(self) -> str:
        """`metrics` with auto settled; a file keeps auto, so that another entropy settles it anew."""
        if self.metrics != "auto":
            return self.metrics
        return "none" if self.entropy == "os" else "party"


@dataclass(frozen=True)
class Aggregation:
    """How updates reach the server."""

    aggregation: Literal["plain", "secure", "hybrid"] = "secure"
    """plain: each encoded update in the clear; secure: only their sum is seen; hybrid: some parties in the clear"""
    support: Literal["own", "union", "shared", "dense"] = "shared"
    """who picks the coordinates: each party (own; nominal epsilon), all together (union; nominal), the public model
    (shared), nobody (dense)"""
    bits: Annotated[int, Range(least=0, most=64)] = 0
    """width of an encoded coordinate; 0: the smallest that cannot wrap"""
    precision: Annotated[int, Range(least=0, most=40)] = 0
    """2^this integer steps in the clipping bound; 0: as fine as the noise, or the width, asks for"""
    rotation: Literal["none", "hadamard"] = "none"
    """hadamard: updates are turned by public random signs and a Hadamard transform, which takes fewer bits where parties are many;
    support shared or dense, with noise"""
    graph: Literal["complete", "regular"] = "complete"
    """secure: who masks with whom; regular (Bell 2020) for hundreds of parties and more"""
    threshold: CountOrZero = 0
    """secure: shares that open a secret; 0: two thirds of the cohort, or as the regular graph needs"""
    corrupt: Annotated[float, Range(least=0, most=0.5)] = 0.05
    """graph regular: share of parties that may be corrupt"""
    expected_dropout: Annotated[float, Range(least=0, most=0.5)] = 0.05
    """graph regular: share of parties that may drop out"""
    colluding: CountOrZero = 0
    """parties that may collude with the server: their noise is not counted towards it"""
    adversary: Literal["passive", "active"] = "passive"
    """active: a server that may lie; keys and survivors are signed, and --pki alone says so"""
    pki: str | None = None
    """file of identities made by python -m fedmpi.secagg.pki, read by each rank itself; implies adversary active"""
    clear_parties: str = ""
    """hybrid: the parties that share in the clear, as 0,3,7"""
    clear_rule: str = ""
    """hybrid, rating methods: who shares in the clear by its own data, as indicator<=0.03,recovery<=0.3,ranking<=0.6"""
    dropout: str = ""
    """parties that vanish: RATE, PHASE=RATE, ROUND:PARTY:PHASE or (for good) ROUND+:PARTY:PHASE, separated by commas; phases
    support (union), advertise, share, mask, check, unmask"""
    keys: str = "round"
    """secure: how often keys are made: round, in every one (the paper's protocol); batch:16, once for 16 rounds, each with secrets of
    its own: half the trips of a round, and a party that misses the making sits the batch out; not with sampling < 1"""
    download: Literal["delta", "full"] = "delta"
    """how parties get the next model: delta sends the sum that made it, and each makes it by itself; full sends the model"""
    phase_deadline: Positive = 60.0
    """seconds that a phase after the local work waits for a silent party"""

    @property
    def key_rounds(self) -> int:
        """Rounds whose keys are made together; 0: each round has its own. ConfigError if `keys` is neither."""
        kind, _, number = self.keys.partition(":")
        if self.keys == "round":
            return 0
        if kind == "batch" and number.isascii() and number.isdecimal() and 2 <= int(number) <= MOST_KEY_ROUNDS:
            return int(number)
        raise ConfigError(f"keys = {self.keys}: must be round, or batch:2 to batch:{MOST_KEY_ROUNDS}")


@dataclass(frozen=True)
class Evaluation:
    """When accuracy is measured, and beside what."""

    eval_every: CountOrZero = 5
    """rounds between evaluations on all parties; 0: only at the end"""
    local_epochs: CountOrZero = 20
    """epochs of the local-only model in the closing table; 0: not measured"""


@dataclass(frozen=True)
class Machine:
    """Where it computes."""

    device: str = "auto"
    """auto: a GPU by local rank if there is one, else the CPU; or cpu, cuda, cuda:1"""
    threads: str = "1"
    """torch threads a rank; results can depend on it, so 1 by default; auto shares the host's cores out"""


@dataclass(frozen=True)
class Config:
    """mpirun -n RANKS python -m fedmpi.main [OPTIONS]: rank 0 serves, every other rank hosts parties."""

    run: Run = field(default_factory=Run)
    data: Data = field(default_factory=Data)
    method: Settings = field(default_factory=Settings)  # of run.method, once `for_method` was asked for it
    server: Server = field(default_factory=Server)
    privacy: Privacy = field(default_factory=Privacy)
    aggregation: Aggregation = field(default_factory=Aggregation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    machine: Machine = field(default_factory=Machine)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    def as_file(self) -> str:
        """config.yaml of a run's folder, but for the folder: another run that is made from it has its own."""
        import yaml

        settings = self.as_dict()
        del settings["run"]["out"], settings["run"]["resume"]
        return yaml.safe_dump(settings, sort_keys=False)

    @property
    def out(self) -> Path:
        name = f"{self.run.preset}-{self.run.method}-s{self.run.seed}"
        # A method may be module:Class, and not every file system, archive or cluster script takes a colon.
        return Path(self.run.out or Path("runs") / re.sub(r"[^\w.-]+", "-", name))


LAYERS: dict[str, Any] = typing.get_type_hints(Config)
# Each rank's own affair: where it keeps and finds things, what it computes with, and how long rank 0 waits. None of it changes
# what is computed or what protects it, so ranks need not agree.
OWN = {
    "run": (
        "preset",
        "out",
        "resume",
        "checkpoint_every",
        "keep_parties",
        "round_deadline",
        "rank_deadline",
        "log",
        "link",
    ),
    "data": ("data_dir", "cache_dir"),
    "aggregation": ("pki", "download", "phase_deadline"),
    "machine": ("device", "threads"),
}
MOVED = ("model", "training", "ratings")  # layers of earlier versions, whose settings are a method's or the data's now


def settings_of(method: str) -> type[Settings]:
    """What this method can be told; its file is imported for it."""
    from fedmpi.algorithm import load_method  # methods import this file

    kind = getattr(load_method(method), "Settings", None)
    if not (isinstance(kind, type) and issubclass(kind, Settings) and "__dataclass_params__" in vars(kind)):
        raise ConfigError(f"method = {method}: its Settings must be a frozen dataclass, and inherit from its base's")
    for layer, other in LAYERS.items():
        for name in kind.__dataclass_fields__.keys() & other.__dataclass_fields__.keys():
            raise ConfigError(f"method = {method}: its setting {name} needs another name, there is {layer}.{name}")
    return kind


def for_method(config: Config, method: str) -> Config:
    """The configuration of a run of this method; what it and the method before can both be told stays."""
    kind = settings_of(method)
    if (config.run.method, type(config.method)) == (method, kind):
        return config
    before = dataclasses.asdict(config.method)
    both = {name: before[name] for name in kind.__dataclass_fields__ if name in before}
    return dataclasses.replace(config, run=dataclasses.replace(config.run, method=method), method=kind(**both))


def whose(setting: str) -> str:
    """Which methods have a setting; empty if none has."""
    from fedmpi.algorithm import method_names

    found = [name for name in method_names() if setting in settings_of(name).__dataclass_fields__]
    return f"a setting of {_few(found)}" if found else ""


def own_settings(method: str, spell: Callable[[str], str] = str) -> str:
    """What a method has, in words; its base's come last."""
    names = map(spell, reversed(settings_of(method).__dataclass_fields__))
    return f"method {method} has {_few(list(names)) or 'none'}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")


def from_dict(settings: dict, base: Config, source: str) -> Config:
    """`base` with the settings of a file, grouped by layer; ConfigError names the first one that cannot be."""
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: expected settings grouped by layer ({', '.join(LAYERS)})")
    run = settings.get("run")
    base = for_method(base, str(run.get("method", base.run.method)) if isinstance(run, dict) else base.run.method)
    changed = {}
    for layer, values in settings.items():
        if layer not in (*LAYERS, *MOVED):
            raise ConfigError(f"{source}: unknown layer {layer!r}, allowed: {', '.join(LAYERS)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: {layer} must hold named settings, not {values!r}")
        hints = {} if layer in MOVED else typing.get_type_hints(type(getattr(base, layer)), include_extras=True)
        for name in values:
            if name not in hints:
                raise ConfigError(f"{source}: {_misplaced(layer, str(name), base)}")
        if hints:
            read = {name: _coerce(value, hints[name], f"{source}: {layer}.{name}") for name, value in values.items()}
            changed[layer] = dataclasses.replace(getattr(base, layer), **read)
    return dataclasses.replace(base, **changed)


def _misplaced(layer: str, name: str, config: Config) -> str:
    """What is wrong with a setting that its layer does not have."""
    home = next((other for other in LAYERS if name in getattr(config, other).__dataclass_fields__), None)
    if home:
        return f"{layer}.{name} belongs to another layer, {home}.{name}"
    if whose(name):
        return f"{layer}.{name}: {whose(name)}; {own_settings(config.run.method)}"
    allowed = list(getattr(config, "method" if layer in MOVED else layer).__dataclass_fields__)
    near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.7)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"unknown setting {layer}.{name}{meant or ', allowed: ' + ', '.join(allowed)}"


def check(config: Config) -> Config:
    """The config, if every field is in range and they fit each other; otherwise ConfigError with name and value."""
    for layer in LAYERS:
        part = getattr(config, layer)
        for name, hint in typing.get_type_hints(type(part), include_extras=True).items():
            value = getattr(part, name)
            for extra in getattr(hint, "__metadata__", ()):
                if isinstance(extra, Range) and not extra.allows(value):
                    raise ConfigError(f"{name} = {value:g}: must be {extra}")
    if config.privacy.min_cohort > config.run.parties:
        raise ConfigError(
            f"min_cohort = {config.privacy.min_cohort}: must be <= parties ({config.run.parties}), or no round can run"
        )
    _check_aggregation(config)
    threads = config.machine.threads
    if threads != "auto" and not (threads.isdecimal() and int(threads) >= 1):
        raise ConfigError(f"threads = {threads}: must be auto or a number >= 1")
    return config


def _check_aggregation(config: Config) -> None:
    settings = config.aggregation
    if settings.key_rounds and config.privacy.sampling < 1:
        raise ConfigError(
            f"keys = {settings.keys}: not with sampling < 1 ({config.privacy.sampling:g}); keys for several rounds are made by one "
            "cohort, and every round would draw another; take --keys round"
        )
    if settings.aggregation != "plain" and settings.support == "own":
        raise ConfigError(
            f"support = own: {settings.aggregation} aggregation adds vectors over the same coordinates, and each party would "
            "show its own; take shared, dense or union, or --aggregation plain"
        )
    if settings.aggregation != "plain":
        if config.privacy.min_cohort < 3:
            raise ConfigError(
                f"min_cohort = {config.privacy.min_cohort}: {settings.aggregation} aggregation needs at least 3, or a sum "
                "shows one party to another"
            )
        if settings.threshold and settings.graph == "regular":
            raise ConfigError(f"threshold = {settings.threshold}: the regular graph finds its own; leave it 0")
        if settings.threshold and config.privacy.sampling < 1:
            raise ConfigError(f"threshold = {settings.threshold}: with sampling < 1 cohorts vary; leave it 0")
    if settings.adversary == "active":
        implied = ", which --pki implies" if settings.pki else ""
        if settings.graph == "regular":
            raise ConfigError(f"graph = regular: not with adversary active{implied}; it needs --graph complete")
        if settings.pki is None:
            raise ConfigError("adversary = active: needs --pki FILE; make one with python -m fedmpi.secagg.pki")
        if config.run.on_loss == "adopt":
            raise ConfigError(
                f"on_loss = adopt: not with adversary active{implied}; who is lost is rank 0's word, and it could have a party on two "
                "ranks at once"
            )
        if settings.aggregation == "plain":
            raise ConfigError(f"adversary = active{implied}: means nothing under plain aggregation")
    if config.privacy.metrics == "securesum" and settings.aggregation == "plain":
        raise ConfigError("metrics = securesum: needs aggregation secure or hybrid, whose protocol adds them up")
    for name in ("clear_parties", "clear_rule"):
        value = getattr(settings, name)
        if value and settings.aggregation != "hybrid":
            raise ConfigError(f"{name} = {value}: only with aggregation hybrid")


def _coerce(value, hint, where: str):
    """A YAML value as its field's type. 1e-5 without a dot is a string in YAML 1.1, so numbers are read leniently."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ConfigError(f"{where} = {value}: must be one of {', '.join(map(str, typing.get_args(hint)))}")
        return value
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = typing.get_args(hint)[0]
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise ConfigError(f"{where} = {value!r}: must be of type {getattr(hint, '__name__', hint)}")
