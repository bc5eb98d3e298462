"""The parts of a run from its configuration, the same on every rank."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from fedmpi.aggregation.protocol import ProtocolRules
from fedmpi.aggregation.server_end import ServerEnd
from fedmpi.algorithm import Algorithm, folder_of, load_method
from fedmpi.config import Config, check, from_dict
from fedmpi.data.cache import cache_folder
from fedmpi.data.images.spec import PartitionSpec
from fedmpi.data.prepared import Prepared, Spec, prepare
from fedmpi.data.ratings.catalog import RATING_SETS
from fedmpi.data.ratings.spec import RatingSpec
from fedmpi.errors import ConfigError
from fedmpi.privacy.account import Releases
from fedmpi.privacy.mechanism import Mechanism, Wanted, check_epsilon, choose_mechanism
from fedmpi.privacy.releases import ReleaseLog, Started, Terms
from fedmpi.runtime import checkpoint
from fedmpi.secagg.disputes import Group
from fedmpi.secagg.pki import read_public
from fedmpi.secagg.rules import Meter
from fedmpi.transport.ledger import MOST_DETAIL


@dataclass(frozen=True)
class Orders:
    """What rank 0 tells every rank: the configuration, and what follows from it and must be the same everywhere. What a rank makes
    of it is fedmpi.runtime.floor's to say."""

    config: Config
    multiplier: float  # sigma
    session: str = ""  # of this start, 16 bytes in hexadecimal: binds every key of the protocol to it
    resume_round: int = 0  # the checkpointed round to go on from; 0: from the beginning
    run: str = ""  # the session of the run's first start: stays over all of them
    absent: tuple[int, ...] = ()  # parties of ranks that were lost before that round: nobody has a state of them

    @property
    def session_bytes(self) -> bytes:
        return bytes.fromhex(self.session)

    @property
    def mark(self) -> str:
        """What the files of a checkpoint bear."""
        return checkpoint.mark_of(self.config, self.run)

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def load_config(run: Path) -> Config:
    """The configuration of the run in this folder."""
    import yaml

    try:
        settings = yaml.safe_load((run / "config.yaml").read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run}: no run there ({error})".splitlines()[0]) from None
    return check(from_dict(settings, Config(), str(run / "config.yaml")))


def calibrations(config: Config) -> Path:
    """Where this host keeps what fedmpi.privacy.calibrations found."""
    return cache_folder(config.data.cache_dir) / "calibrations"


def data_spec(config: Config) -> Spec:
    data = config.data
    if data.dataset in RATING_SETS:
        return RatingSpec(
            dataset=data.dataset,
            data_dir=data.data_dir,
            parties=config.run.parties,
            test_fraction=data.test_fraction,
            validation_fraction=data.validation_fraction,
            seed=config.run.seed,
            tag_components=data.tag_components,
            items=data.items,
            ratings=data.ratings,
        )
    return PartitionSpec(
        dataset=data.dataset,
        parties=config.run.parties,
        data_dir=data.data_dir,
        scheme=data.partition,
        classes_per_party=data.classes_per_party,
        alpha=data.alpha,
        test_fraction=data.test_fraction,
        validation_fraction=data.validation_fraction,
        samples_per_party=data.samples_per_party,
        shrink=data.shrink,
        test_samples_per_party=data.test_samples_per_party,
        seed=config.run.seed,
    )


def open_store(config: Config) -> Prepared | None:
    """The prepared data; on a host where it is not there yet, it is made. None for a method that needs none."""
    if config.data.dataset == "none":
        return None
    spec = data_spec(config)
    return spec.open(prepare(spec, cache_folder(config.data.cache_dir) / "prepared"))


def check_method(config: Config) -> type[Algorithm]:
    """The class of the method, if it can do what is asked of it; no data is read and torch is not imported for it."""
    name, dataset, settings = config.run.method, config.data.dataset, config.aggregation
    method = load_method(name)
    rates = method.task == "recommendation"
    if folder_of(name) and (dataset == "none" or rates != (dataset in RATING_SETS)):
        wanted = ", ".join(RATING_SETS) if rates else "an image set"
        raise ConfigError(f"dataset = {dataset}: not for method {name}, which takes {wanted}")
    if settings.support not in method.supports:
        raise ConfigError(f"support = {settings.support}: method {name} takes {', '.join(method.supports)}")
    if settings.clear_rule and not method.chooses_clear:
        raise ConfigError(
            f"clear_rule = {settings.clear_rule}: method {name} has no mask to judge; list --clear-parties"
        )
    check_epsilon(method.sends, config.privacy.epsilon, name)
    return method


def algorithm(config: Config, device: str | None = None) -> Algorithm:
    """The method over this rank's data. The server names its device: it trains nothing and takes no GPU from a client."""
    # Thread counts are read when torch is first imported, so they are set before.
    threads = thread_count(config, os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    method, store = check_method(config), open_store(config)
    if store is not None and store.task != method.task:
        raise ConfigError(
            f"dataset = {config.data.dataset}: not for method {config.run.method}, a {method.task} method"
        )
    made = method(config, store, device or method.pick_device(config.machine.device, threads))
    check_epsilon(made.sends, config.privacy.epsilon, config.run.method)
    return made


def thread_count(config: Config, environ) -> int:
    """Torch threads of this rank. auto: the host's cores shared out among its ranks, as far as the launcher tells."""
    if config.machine.threads != "auto":
        return int(config.machine.threads)
    told = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
    ranks = next((int(environ[name]) for name in told if environ.get(name, "").isdecimal()), 1)
    return max(1, len(os.sched_getaffinity(0)) // max(1, ranks))


def detailed_ledger(config: Config) -> bool:
    """Whether the run is small enough for a ledger row of every party in every round."""
    return config.run.parties * config.run.rounds <= MOST_DETAIL


def public_identities(config: Config) -> dict[int, bytes] | None:
    """What the server checks signatures against, if the adversary is active."""
    if config.aggregation.adversary != "active" or config.aggregation.pki is None:
        return None
    return read_public(Path(config.aggregation.pki), config.run.parties)


def mechanism(orders: Orders, method: Algorithm) -> Mechanism:
    """What is done to every update before it leaves its party."""
    config = orders.config
    wanted = Wanted(
        epsilon=config.privacy.epsilon,
        clip=config.privacy.clip,
        multiplier=orders.multiplier,
        margin=config.privacy.noise_margin,
        parties=config.run.parties,
        rounds=config.run.rounds,
        bits=config.aggregation.bits,
        steps=1 << config.aggregation.precision if config.aggregation.precision else 0,
        own_coordinates=config.aggregation.support in ("own", "union"),
        rotation=config.aggregation.rotation,
        seed=config.run.seed,
    )
    chosen = choose_mechanism(method.sends, wanted, method.support_size(), config.run.method)
    method.noise_ratio = chosen.noise_to_signal(config.privacy.sampling, config.run.parties, config.run.rounds)
    return chosen


def protocol_rules(orders: Orders) -> ProtocolRules:
    return ProtocolRules(orders.config, orders.session_bytes, orders.multiplier)


def server_end(orders: Orders, method: Algorithm, mechanism: Mechanism, meter: Meter, group: Group) -> ServerEnd:
    identities = public_identities(orders.config)
    return ServerEnd(orders.config, protocol_rules(orders), method.dimension, mechanism, identities, meter, group)


def terms(config: Config, mechanism: Mechanism, method: type[Algorithm]) -> Terms:
    """Under which the run's releases are made."""
    noises, cohort = ProtocolRules(config).least_noise()
    return Terms(
        mechanism=mechanism,
        parties=config.run.parties,
        rounds=config.run.rounds,
        delta=config.privacy.delta,
        accountant=config.privacy.accountant,
        sampling=config.privacy.sampling,
        entropy=config.privacy.entropy,
        aggregation=config.aggregation.aggregation,
        support=config.aggregation.support,
        denominator=config.server.denominator,
        graph=config.aggregation.graph,
        adversary=config.aggregation.adversary,
        colluding=config.aggregation.colluding,
        clear_by_data=config.aggregation.aggregation == "hybrid" and method.chooses_clear,
        least_noises=noises,
        least_cohort=cohort,
    )


def releases(orders: Orders, mechanism: Mechanism, method: type[Algorithm]) -> Releases:
    """The run's log of releases, begun or gone on with."""
    config = orders.config
    given = terms(config, mechanism, method)
    log = ReleaseLog.go_on(config.out, given) if config.run.resume else ReleaseLog.create(config.out)
    log.append(Started(given, orders.resume_round, config.privacy.shown == "party", orders.run))
    return Releases(log)
