"""What a run is: frozen dataclasses, one per layer, with the range of every field beside it.

Field names are unique over all layers, so that each is one plain flag on the command line (`--epsilon`, `--rounds`).
Presets and `--config` files group them by layer, as `config.yaml` of a run does.
"""

import dataclasses
import math
import re
import types
import typing
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


@dataclass(frozen=True)
class Run:
    """What to run, how long, and where it goes."""

    preset: str = "demo"
    """settings to start from: see `fedmpi --presets`"""
    method: str = "dp-pfeddsu"
    """what is trained and shared"""
    rounds: Count = 30
    """T, global rounds"""
    parties: Count = 20
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


@dataclass(frozen=True)
class Model:
    """The network: a shared extractor and a head that never leaves its party."""

    network: Literal["cnn", "resnet20"] = "cnn"
    """cnn: four layers, meant for 8x8 digits; resnet20 (He 2016, option A) for the papers' data; any image size"""
    norm: Literal["batch", "group"] = "batch"
    """normalisation; batch statistics stay on the party"""


@dataclass(frozen=True)
class Training:
    """Local work of a party in one round, DSU algorithm 1."""

    head_epochs: CountOrZero = 15
    """phase 1: epochs on the head, extractor frozen"""
    ext_epochs: Count = 5
    """phase 2: epochs on the extractor, head frozen"""
    batch_size: Annotated[int, Range(least=2)] = 32
    """samples a step"""
    head_lr: Positive = 0.01
    """learning rate of the head"""
    ext_lr: Positive = 0.01
    """learning rate of the extractor"""
    sparse_layers: CountOrZero = 4
    """k: the last k convolution layers are sparsified; 0 switches reparameterisation off"""
    density: Fraction = 0.05
    """S: share of a sparsified layer's weights that stay; 1 switches reparameterisation off"""
    dan_weight: NonNegative = 0.2
    """lambda of the dynamic adaptive norm, DSU (10); 0 switches it off"""
    gradient: Literal["masked", "straight-through"] = "masked"
    """gradient of the masked weights: through the mask, or dense"""
    augment: bool = False
    """phase 2 sees each image moved by a few pixels at random, and mirrored where that keeps its class; never phase 1,
    whose features are cached, and never a test"""
    noise_budget: Positive = 4.0
    """dp-pfedhome: how much noise a run may have over the most that its updates can carry; beyond, the server's step is damped"""
    home_rounds: CountOrZero = 0
    """dp-pfedhome: rounds of local work that a party adds for itself before a test, where noise exceeds the budget; 0: as
    many as --rounds, which a party alone would have had"""
    mu: NonNegative = 0.1
    """pmtl-ft: how strongly a party's own network is pulled to the mean, (mu/2) ||w_i - mean||^2"""
    personal_rate: NonNegative = 1.0
    """ppsgd: learning rates of a party's own offset over those of the shared weights; 0 leaves no offset"""


@dataclass(frozen=True)
class Ratings:
    """Rating methods, paper MMF: the shared item factors, and each party's own model."""

    factors: Count = 20
    """k, latent factors"""
    item_bias: bool = True
    """items have a shared bias beside their factors, and parties a private offset"""
    party_solver: Literal["steps", "ridge", "posterior"] = "posterior"
    """p_u by gradient steps as printed, MMF (7); exactly; or exactly and with its uncertainty in the gradients"""
    party_steps: Count = 2
    """party_solver steps: how many in a round"""
    party_lr: Positive = 0.5
    """party_solver steps: rate of a step over the party's mean gradient"""
    party_reg: NonNegative = 0.9
    """lambda of p_u; under posterior the variance of a rating's noise"""
    offset_reg: NonNegative = 1.0
    """lambda of a party's offset"""
    item_reg: NonNegative = 60.0
    """lambda of q_i; under steps a share of every rating's gradient as printed, MMF (6), otherwise once an item"""
    bias_reg: NonNegative = 2.0
    """lambda of an item's bias"""
    rating_centre: float = 3.5
    """where biases and constants start from and are pulled to: a public guess of the mean rating"""
    factor_start: NonNegative = 0.1
    """spread of q_i before round 1 (and of p_u, under steps)"""
    factor_mean: float = 0.0
    """mean of q_i before round 1 (and of p_u, under steps); raw ratings without biases want sqrt(3.5 / k)"""
    min_raters: CountOrZero = 0
    """items with fewer raters are not trained; above 1, the first round only counts them"""
    rater_margin: CountOrZero = 0
    """min_raters: parties that a round may lose; items with fewer than min_raters + this raters are not trained, and a
    round that loses more ends without a sum"""
    tag_components: Count = 20
    """features of ml-10m and lastfm: principal components of the tags"""
    items: Count = 300
    """dataset generated: items"""
    ratings: CountOrZero = 0
    """dataset generated: ratings in all; 0: 60 a party"""
    mask_reg: NonNegative = 20.0
    """private model: penalty of the weights of item attributes, or of hidden units; small ones hide ratings better"""
    mask_offset_reg: NonNegative = 10.0
    """private model: penalty of its constant term"""
    mask_inner_reg: NonNegative = 15.0
    """private model: penalty of the pairs of a factorisation machine, or of a hidden layer's distance from its start"""
    mask_rank: Count = 4
    """private or shared factorisation machine: rank of its pairs"""
    mask_hidden: Count = 16
    """private or shared neural network: hidden units"""
    mask_epochs: Count = 30
    """private factorisation machine or neural network: passes over the party's ratings"""
    mask_lr: Positive = 0.03
    """private factorisation machine or neural network: Adam's rate"""
    item_prior: bool = False
    """the server pulls item factors and biases to what public item attributes predict of them, not to zero; not in the paper"""


@dataclass(frozen=True)
class Server:
    """What the server does with the sum."""

    server_lr: Positive = 1.0
    """eta_g, DSU algorithm 1 line 6"""
    denominator: Literal["expected", "survivors", "none"] = "expected"
    """divide the sum by qN, as the sensitivity assumes, by those who answered, or not at all (MMF algorithm 2)"""
    optimizer: Literal["sgd", "adam", "counted"] = "sgd"
    """rating methods: plain steps, MMF algorithm 2; Adam; or steps over the number of raters, with momentum"""
    momentum: Annotated[float, Range(least=0, most=0.99)] = 0.5
    """optimizer counted"""


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
    """active: a server that may lie; keys and survivors are signed, see --pki"""
    pki: str | None = None
    """adversary active: file of identities made by python -m fedmpi.secagg.pki, read by each rank itself"""
    clear_parties: str = ""
    """hybrid: the parties that share in the clear, as 0,3,7"""
    clear_rule: str = ""
    """hybrid, rating methods: who shares in the clear by its own data, as indicator<=0.03,recovery<=0.3,ranking<=0.6"""
    dropout: str = ""
    """parties that vanish: RATE, PHASE=RATE or ROUND:PARTY:PHASE, separated by commas; phases advertise, share, mask,
    check, unmask"""
    phase_deadline: Positive = 60.0
    """seconds that a phase after the local work waits for a silent party"""


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
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    ratings: Ratings = field(default_factory=Ratings)
    server: Server = field(default_factory=Server)
    privacy: Privacy = field(default_factory=Privacy)
    aggregation: Aggregation = field(default_factory=Aggregation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    machine: Machine = field(default_factory=Machine)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    @property
    def out(self) -> Path:
        name = f"{self.run.preset}-{self.run.method}-s{self.run.seed}"
        # A method may be module:Class, and not every file system, archive or cluster script takes a colon.
        return Path(self.run.out or Path("runs") / re.sub(r"[^\w.-]+", "-", name))


LAYERS = {layer.name: layer.default_factory for layer in dataclasses.fields(Config)}


def from_dict(settings: dict, base: Config, source: str) -> Config:
    """`base` with the settings of a file, grouped by layer; ConfigError names the first one that cannot be."""
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: expected settings grouped by layer ({', '.join(LAYERS)})")
    layers = {}
    for layer, values in settings.items():
        if layer not in LAYERS:
            raise ConfigError(f"{source}: unknown layer {layer!r}, allowed: {', '.join(LAYERS)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{source}: {layer} must hold named settings, not {values!r}")
        hints = typing.get_type_hints(LAYERS[layer], include_extras=True)
        for name in values:
            if name not in hints:
                home = next((other for other, kind in LAYERS.items() if name in kind.__dataclass_fields__), None)
                if home:
                    raise ConfigError(f"{source}: {layer}.{name} belongs to another layer, {home}.{name}")
                raise ConfigError(f"{source}: unknown setting {layer}.{name}, allowed: {', '.join(hints)}")
        layers[layer] = dataclasses.replace(
            getattr(base, layer),
            **{name: _coerce(value, hints[name], f"{source}: {layer}.{name}") for name, value in values.items()},
        )
    return dataclasses.replace(base, **layers)


def check(config: Config) -> Config:
    """The config, if every field is in range and they fit each other; otherwise ConfigError with name and value."""
    for layer, kind in LAYERS.items():
        part = getattr(config, layer)
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
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
        if settings.graph == "regular":
            raise ConfigError("graph = regular: not with adversary active, which needs --graph complete")
        if settings.pki is None:
            raise ConfigError("adversary = active: needs --pki FILE; make one with python -m fedmpi.secagg.pki")
        if settings.aggregation == "plain":
            raise ConfigError("adversary = active: means nothing under plain aggregation")
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
        except ValueError:
            pass
    raise ConfigError(f"{where} = {value!r}: must be of type {getattr(hint, '__name__', hint)}")
