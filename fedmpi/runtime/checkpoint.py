"""Checkpoints: the server's state, and each party's on the rank that hosts it. Neither travels.

    OUT/checkpoint/latest            rank 0: the round that is complete on every rank
    OUT/checkpoint/<round>/server.npz, server.json
    OUT/checkpoint/<round>/parties-00000-00006.npz     a rank's parties; any rank can read its own from several of these

All ranks may share one OUT, or each host may have its own. `latest` is written last, so a run that is killed while it saves goes on from
the checkpoint before: rank 0 keeps one, and a client two. A client does not go back further than that, whatever rank 0 says: each round
that is repeated releases once more. No key and no noise is ever kept: under `entropy: os` a repeated round draws fresh noise, and counts
once more. The log of releases, which is not part of a checkpoint, knows of the rounds after it (fedmpi.privacy.releases).

Whatever is deleted is deleted by its name: the files above, in folders named by a round, and no link is followed.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.data.folder import PARSING
from fedmpi.errors import ConfigError, DataError
from fedmpi.files import write_arrays, write_json, write_text
from fedmpi.privacy import releases

PARTIES = re.compile(r"parties-([0-9]{5,})-([0-9]{5,})\.npz")
ROUND = re.compile(r"[1-9][0-9]*")
# Of this run, and what a killed process left of them before they had their names.
OF_PARTIES = re.compile(rf"{PARTIES.pattern}|\.{PARTIES.pattern}\.[0-9]+\.tmp")
OF_SERVER = re.compile(r"server\.(npz|json)|\.server\.(npz|json)\.[0-9]+\.tmp")
COUNTERS = "rank.counters"


class Counters(NamedTuple):
    """How far a rank has come, so that nothing is asked of it a second time after it was restored."""

    trained: int = 0  # the last round that it was asked to train in
    tested: int = -1  # the last round whose model it was asked to test; 0 is that of the references


def parties_file(parties: tuple[int, ...]) -> str:
    return f"parties-{parties[0]:05d}-{parties[-1]:05d}.npz"


def folder(config: Config, round: int) -> Path:
    return config.out / "checkpoint" / str(round)


def latest_round(out: Path) -> int:
    """The round to resume after; 0 for a run that was interrupted before its first checkpoint; ConfigError if there is no run, or its
    checkpoints were taken away, unless something was released under secret noise."""
    path = out / "checkpoint" / "latest"
    try:
        return int(path.read_text())
    except OSError:
        if (out / releases.NAME).exists():
            begun = any((out / "checkpoint").glob("*/server.*"))
            if releases.ReleaseLog.read(out).under_secret_noise or not begun:
                return 0
        raise ConfigError(f"resume = {out}: no checkpoint there ({path} is missing)") from None
    except ValueError:
        raise DataError(f"{path} is damaged: expected a round number") from None


# ---- a client's half ----


def begin(config: Config) -> None:
    """A new run does not write over the checkpoints of another, which may be on this host though rank 0 knows of none."""
    held = [round for round in _rounds(config) if _files(config, round)]
    if held:
        raise ConfigError(
            f"out = {config.out}: holds another run's checkpoint of round {held[-1]}; continue that with --resume, or choose another --out"
        )


def save_parties(
    config: Config, algorithm: Algorithm, parties: tuple[int, ...], round: int, counters: Counters
) -> None:
    """The states of these parties, with what came before; of a host's own checkpoints the last two stay."""
    if not (config.out / "config.yaml").exists():
        write_text(config.out / "config.yaml", config.as_file())  # on a host with its own disk, for --resume
    before = max((other for other in _complete(config, parties) if other < round), default=0)
    arrays = {"parties": np.array(parties), COUNTERS: np.array([*counters, before], np.int64)}
    write_arrays(folder(config, round) / parties_file(parties), arrays | algorithm.states(parties))
    _forget(config, OF_PARTIES, lambda other: other < before)


def restore_parties(config: Config, algorithm: Algorithm, parties: tuple[int, ...], round: int) -> Counters:
    """From whichever files hold them: a resumed run may place its parties on other ranks. Round 0: from the beginning."""
    _refuse_going_back(config, parties, round)
    # What an interrupted save left must not mix with a later one of the same round.
    _forget(config, OF_PARTIES, lambda other: other > round)
    if not round:
        return Counters()
    missing, counters = set(parties), []
    for path in _files(config, round, parties):
        arrays = _load(path)
        try:
            held, counted = arrays.pop("parties"), arrays.pop(COUNTERS, None)
            counters.append(Counters(round, round) if counted is None else Counters(*counted[:2].tolist()))
            at = np.flatnonzero(np.isin(held, parties))
            chosen = tuple(held[at].tolist())
            algorithm.load_states(chosen, {name: values[at] for name, values in arrays.items()})
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise DataError(f"checkpoint {path} cannot be used ({type(error).__name__}: {error})") from None
        missing -= set(chosen)
    if missing:
        raise DataError(f"checkpoint {folder(config, round)} has no state of party {min(missing)}")
    return Counters(*map(max, zip(*counters)))


def _refuse_going_back(config: Config, parties: tuple[int, ...], round: int) -> None:
    """An honest interruption, between the parties' saves and rank 0's, goes back by one checkpoint."""
    held = _complete(config, parties)
    if not held or round >= held[-1]:
        return
    before = _before(config, parties, held[-1])
    if before is None:  # a checkpoint of an earlier version does not say
        before = held[-2] if len(held) > 1 else 0
    if round < before:
        raise ConfigError(
            f"resume_round = {round}: rank 0 would repeat rounds that this rank has behind it; it holds checkpoints of rounds "
            f"{before} and {held[-1]} and goes back no further"
        )


def _before(config: Config, parties: tuple[int, ...], round: int) -> int | None:
    """The checkpoint before this one, as the rank wrote it down; the latest, where its parties were on several."""
    said = []
    for path in _files(config, round, parties):
        try:
            with PARSING, np.load(path, allow_pickle=False) as content:
                said.append(int(content[COUNTERS][2]))
        except (
            Exception
        ):  # damaged, of before, or gone: another rank forgets it at this moment, as this one is about to
            continue
    return max(said, default=None)


def _complete(config: Config, parties: tuple[int, ...]) -> list[int]:
    """The rounds of which this disk has all these parties' states, by the names of its files."""

    def whole(round: int) -> bool:
        missing = parties[0]
        for first, last in sorted(map(_ends, _files(config, round))):
            if first <= missing <= last:
                missing = last + 1
        return missing > parties[-1]

    return list(filter(whole, _rounds(config)))


def _files(config: Config, round: int, parties: tuple[int, ...] | None = None) -> list[Path]:
    """A round's files of parties, or those that hold one of these."""
    found = sorted(path for path in _listed(folder(config, round)) if PARTIES.fullmatch(path.name))
    if parties is None:
        return found
    return [path for path in found if _ends(path)[0] <= parties[-1] and _ends(path)[1] >= parties[0]]


def _ends(path: Path) -> tuple[int, int]:
    first, last = path.stem.split("-")[1:]
    return int(first), int(last)


# ---- rank 0's half ----


def save_server(config: Config, round: int, arrays: dict[str, np.ndarray], state: dict) -> None:
    """The server's half, then `latest`; its older ones go."""
    write_arrays(folder(config, round) / "server.npz", arrays)
    write_json(folder(config, round) / "server.json", state)
    write_text(config.out / "checkpoint" / "latest", f"{round}\n")
    _forget(config, OF_SERVER, lambda other: other != round)


def load_server(config: Config, round: int) -> tuple[dict[str, np.ndarray], dict]:
    arrays = _load(folder(config, round) / "server.npz")
    path = folder(config, round) / "server.json"
    try:
        if not {"theta", "ledger"} <= set(arrays):
            raise ValueError("server.npz lacks theta or ledger")
        return arrays, json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint {path} cannot be used ({error})") from None


# ---- both ----


def _rounds(config: Config) -> list[int]:
    """The folders of checkpoints, by their rounds; a link is none."""
    return sorted(
        int(path.name)
        for path in _listed(config.out / "checkpoint")
        if ROUND.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def _forget(config: Config, names: re.Pattern[str], gone: Callable[[int], bool]) -> None:
    """Delete the files of these names in the rounds that are gone, and their folders once nothing is in them."""
    if (config.out / "checkpoint").is_symlink():
        return
    for round in filter(gone, _rounds(config)):
        for path in _listed(folder(config, round)):
            if names.fullmatch(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)  # another rank may have been quicker
        try:
            folder(config, round).rmdir()
        except OSError:
            continue  # somebody else's files are in it, or it is gone


def _listed(path: Path) -> list[Path]:
    try:
        return [path / name for name in os.listdir(path)]
    except OSError:
        return []


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        with PARSING, np.load(path, allow_pickle=False) as content:
            return dict(content)
    except (OSError, ValueError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"checkpoint {path} cannot be used ({reason})") from None
    except Exception as error:  # zipfile raises its own kinds for a damaged archive
        raise DataError(f"checkpoint {path} is damaged ({type(error).__name__})") from None
