"""Everything that can go wrong before the first message, on rank 0: settings, folder, data, noise."""

import dataclasses
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from fedmpi import HOW
from fedmpi.aggregation import dropout
from fedmpi.aggregation.protocol import ProtocolRules, chosen_clear
from fedmpi.bill.links import find
from fedmpi.cli import resolve
from fedmpi.config import Config
from fedmpi.errors import ConfigError
from fedmpi.privacy.calibrations import calibrated
from fedmpi.report.record import Record, free_folder, interrupted
from fedmpi.report.terminal import Terminal, screen_behind_launcher
from fedmpi.runtime import build, resume
from fedmpi.runtime.placement import Placement
from fedmpi.secagg.pki import read_public


class Start(NamedTuple):
    """What `run_server` takes beside the endpoint, in its order."""

    orders: build.Orders
    placement: Placement
    record: Record


def prepare_run(argv: list[str], ranks: int, transport: str) -> Start:
    if not screen_behind_launcher(os.environ):
        os.environ["TERM"] = "dumb"  # or --help is coloured by its library, which sees a pseudo-terminal
    config = resolve(argv)
    if config.run.link:
        find(config.run.link)  # at the end it would be too late to say that there is no such
    if ranks < 2:
        raise ConfigError(f"one rank is not enough; {HOW}")
    return start_run(config, ranks, transport)


def start_run(config: Config, ranks: int, transport: str, terminal: Terminal | None = None) -> Start:
    if build.check_method(config).task == "recommendation":
        build.algorithm(config)  # quick, and it knows what else it cannot work with; torch would hold up every rank
    placement = Placement(config.run.parties, ranks)
    dropout.plan_of(config)
    if not (config.aggregation.aggregation == "hybrid" and config.aggregation.clear_rule):
        # Where a rule decides, the server checks once the parties have chosen.
        ProtocolRules(config).check(chosen_clear(config))
    if config.aggregation.pki is not None:
        read_public(Path(config.aggregation.pki), config.run.parties)
    unfinished = None if config.run.resume else interrupted(config.out)
    config = _choose_folder(config)
    record = Record(config, transport, terminal or Terminal())
    try:
        return _start(config, placement, record, unfinished)
    except BaseException:
        record.close()
        raise


def _start(config: Config, placement: Placement, record: Record, unfinished: Path | None) -> Start:
    build.open_store(config)
    privacy = config.privacy
    target = privacy.epsilon, privacy.delta, privacy.sampling, config.run.rounds, privacy.accountant
    multiplier = calibrated(build.calibrations(config), *target)
    record.claim()
    session = secrets.token_hex(16)
    going = resume.Going(0, session)
    if config.run.resume:
        resume.refuse_ended(config, record.terminal.say)
        going = resume.choose(config, record.terminal.warn)
    record.open(going.round)
    if unfinished is not None:
        record.terminal.warn(
            f"{unfinished} was interrupted after it released something under secret noise, which this run's epsilon does not "
            "count; --resume goes on with it"
        )
    orders = build.Orders(config, multiplier, session, going.round, going.run or session, going.absent)
    return Start(orders, placement, record)


def _choose_folder(config: Config) -> Config:
    """Absolute, because ranks may start in other folders; a default name steps aside for an earlier run's."""
    if config.run.resume:
        out = Path(config.run.resume)
    elif config.run.out:
        out = config.out
    else:
        out = free_folder(config.out)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, out=str(out.absolute())))
