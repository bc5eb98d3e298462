"""Where a resumed run goes on: the newest checkpoint that is whole, on rank 0 and on every other rank.

Rank 0 looks at its own files and at those of parties that it can see, newest round first, and names the first round that is whole.
Ranks with disks of their own look at theirs and say in `Ready` up to which round they can go on; if that is less for one of them,
rank 0 steps back to the newest checkpoint that it has itself from there on, and `GoOn` tells everybody. Until then nobody deletes
anything. What is refused is said in a line each, and the log of releases counts what is repeated.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import NamedTuple

from fedmpi.config import Config
from fedmpi.errors import ConfigError, DataError
from fedmpi.privacy import releases
from fedmpi.privacy.account import Releases
from fedmpi.privacy.releases import ReleaseLog, Started
from fedmpi.report.record import Record
from fedmpi.report.sealed import read_sealed, vector_sha256
from fedmpi.runtime import checkpoint


class Ended(SystemExit):
    """The run that was to be resumed has ended, and there is nothing to do: exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def refuse_ended(config: Config, say: Callable[[str], None]) -> None:
    """A run that has ended: Ended if its results are there; under secret noise it cannot be run again in any case."""
    if config.privacy.entropy == "os" and (config.out / "summary.json").exists():
        raise ConfigError(
            f"resume = {config.out}: that run has ended, and its noise cannot be drawn again; "
            f"--config {config.out}/config.yaml starts another"
        )
    try:
        summary = json.loads((config.out / "summary.json").read_bytes())
        whole = vector_sha256(read_sealed(config.out / "model.npz")["theta"]) == summary["model_sha256"]
        rounds = int(summary["rounds"])
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return  # not ended, or not with all that it should have left
    if whole:
        say(f"{config.out} has ended: {rounds} rounds, model_sha256 {summary['model_sha256']}; nothing to resume")
        raise Ended


class Going(NamedTuple):
    """Where it goes on, and as which run."""

    round: int
    run: str
    absent: tuple[int, ...] = ()  # parties of ranks that were lost before


def choose(config: Config, warn: Callable[[str], None]) -> Going:
    """The round that rank 0 names; 0 for a run that was interrupted before its first checkpoint; ConfigError if there is nothing to
    go on from."""
    latest = config.out / "checkpoint" / "latest"
    if not (config.out / releases.NAME).exists() and not checkpoint.server_rounds(config):
        raise ConfigError(f"resume = {config.out}: no checkpoint there ({latest} is missing)")
    log = ReleaseLog.read(config.out)
    mark = checkpoint.mark_of(config, log.run)
    round, refused = newest_whole(config, mark, log)
    if round is None:
        if refused:
            raise ConfigError(f"resume = {config.out}: no checkpoint there can be used: {'; '.join(refused)}")
        return Going(0, log.run)
    if checkpoint.latest_round(config.out) is None:
        refused.insert(0, f"{latest} is {'damaged' if latest.exists() else 'missing'}")
    for line in refused:
        warn(f"{line}; the checkpoint of round {round} is used")
    return Going(round, log.run, tuple(checkpoint.load_state(config, round, mark)["conduct"].get("lost", ())))


def newest_whole(config: Config, mark: str, log: ReleaseLog, most: int | None = None) -> tuple[int | None, list[str]]:
    """(The newest round whose checkpoint is whole as far as rank 0 can see, why later ones are not.) DataError if the log of releases
    lacks what it held when one of them was made: to go back behind that would be to forget it."""
    found, refused = None, []
    rounds = {*checkpoint.server_rounds(config), checkpoint.latest_round(config.out) or 0} - {0}
    for round in sorted(rounds, reverse=True):
        if most is not None and round > most:
            continue
        try:
            position = checkpoint.load_state(config, round, mark)["releases"]
            log.check_covers(position)
            checkpoint.judge(config, round, mark)
        except releases.Forgotten:
            raise
        except DataError as error:
            refused.append(str(error))
            continue
        found = round
        break
    return found, refused


def settle(config: Config, mark: str, named: int, reach: dict[int, int], account: Releases, record: Record) -> int:
    """The round that everybody goes on from, where rank 0 named one and the ranks have said how far they can follow."""
    rank = min(reach, key=lambda rank: (reach[rank], rank))
    if reach[rank] >= named:
        return named
    round, refused = newest_whole(config, mark, account.log, reach[rank])
    why = f"rank {rank} has no whole checkpoint of round {named}, and can go on from round {reach[rank]}"
    if round is None:
        raise DataError("; ".join([why, *(refused or [f"rank 0 has none of that round or before in {config.out}"])]))
    record.terminal.warn(f"{why}; the checkpoint of round {round} is used")
    started = account.log.events[-1]
    assert isinstance(started, Started), "nothing was asked for yet"
    account.note(dataclasses.replace(started, after=round))
    record.cut_rows(round)
    return round
