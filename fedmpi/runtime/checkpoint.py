"""Checkpoints: the server's state, and each party's on the rank that hosts it. Neither travels.

    OUT/checkpoint/latest            rank 0: the last round that it kept, for a person or a script to look at
    OUT/checkpoint/<round>/server.npz, server.json
    OUT/checkpoint/<round>/parties-00000-00006.npz     a rank's parties; any rank can read its own from several of these

All ranks may share one OUT, or each host may have its own. Rank 0 writes its half when every rank has written its own, and everybody
keeps two: a run that is killed while it saves goes on from the checkpoint before, and so does one whose newest checkpoint is damaged
(fedmpi.runtime.resume). A client does not go back further than that, whatever rank 0 says: each round that is repeated releases once
more. No key and no noise is ever kept: under `entropy: os` a repeated round draws fresh noise, and counts once more. The log of
releases, which is not part of a checkpoint, knows of the rounds after it (fedmpi.privacy.releases).

Every file holds the round that it is of, the mark of the run that it belongs to, and a SHA-256 over its content; server.json holds that
of server.npz as well. So a file that was cut short, altered, edited by hand, of another run or of another round is refused with the
reason. So is one of an earlier version, which has no seal. This finds damage and slips, not an owner who computes the seal anew.

Whatever is deleted is deleted by its name: the files above, in folders named by a round, and no link is followed.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedmpi.aggregation.protocol import agreed
from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.errors import ConfigError, DataError, WriteError
from fedmpi.files import write_text, writing
from fedmpi.report.sealed import Refused, open_sealed, open_sealed_json, write_sealed, write_sealed_json

PARTIES = re.compile(r"parties-([0-9]{5,})-([0-9]{5,})\.npz")
ROUND = re.compile(r"[1-9][0-9]*")
# Of this run, and what a killed process left of them before they had their names.
OF_PARTIES = re.compile(rf"{PARTIES.pattern}|\.{PARTIES.pattern}\.[0-9]+\.tmp")
OF_SERVER = re.compile(r"server\.(npz|json)|\.server\.(npz|json)\.[0-9]+\.tmp")
COUNTERS = "rank.counters"
MARK, OF_ROUND = "checkpoint.run", "checkpoint.round"


class Counters(NamedTuple):
    """How far a rank has come, so that nothing is asked of it a second time after it was restored."""

    trained: int = 0  # the last round that it was asked to train in
    tested: int = -1  # the last round whose model it was asked to test; 0 is that of the references


def mark_of(config: Config, run: str) -> str:
    """What all files of a run bear, whichever ranks write them and however often it is resumed: the settings that all ranks have alike,
    and `run`, the session of its first start. Sigma follows from them, and may differ in its last digit on another host."""
    return hashlib.sha256(agreed(config, 0.0) + run.encode()).hexdigest()


def parties_file(parties: tuple[int, ...]) -> str:
    return f"parties-{parties[0]:05d}-{parties[-1]:05d}.npz"


def folder(config: Config, round: int) -> Path:
    return config.out / "checkpoint" / str(round)


# ---- a client's half ----


def begin(config: Config) -> None:
    """A new run does not write over the checkpoints of another, which may be on this host though rank 0 knows of none."""
    held = [round for round in _rounds(config) if _files(config, round)]
    if held:
        raise ConfigError(
            f"out = {config.out}: holds another run's checkpoint of round {held[-1]}; continue that with --resume, or choose another --out"
        )


def save_parties(
    config: Config, algorithm: Algorithm, parties: tuple[int, ...], round: int, counters: Counters, mark: str
) -> None:
    """The states of these parties, with what came before; of a host's own checkpoints the last two stay."""
    before = max((other for other in _complete(config, parties) if other < round), default=0)
    with _saving(round, before):
        if not (config.out / "config.yaml").exists():
            write_text(config.out / "config.yaml", config.as_file())  # on a host with its own disk, for --resume
        arrays = {"parties": np.array(parties), COUNTERS: np.array([*counters, before], np.int64)}
        arrays |= algorithm.states(parties)
        write_sealed(folder(config, round) / parties_file(parties), arrays | _marks(round, mark))
    _forget(config, OF_PARTIES, lambda other: other < before)


def usable_round(config: Config, parties: tuple[int, ...], round: int, mark: str) -> int:
    """The newest checkpoint, of this round or before, from which these parties can go on; DataError with what is wrong with the first
    that was looked at if there is none. Nothing is deleted: rank 0 may yet go further back, for another rank's sake."""
    _refuse_going_back(config, parties, round)
    if not round:
        return 0
    least, wrong = _least(config, parties), None
    for other in (round, *(other for other in reversed(_rounds(config)) if least <= other < round)):
        try:
            _read_parties(config, parties, other, mark)
            return other
        except DataError as error:
            wrong = wrong or error
    raise wrong or AssertionError


def restore_parties(config: Config, algorithm: Algorithm, parties: tuple[int, ...], round: int, mark: str) -> Counters:
    """From whichever files hold them: a resumed run may place its parties on other ranks. Round 0: from the beginning."""
    _refuse_going_back(config, parties, round)
    counters = load_parties(config, algorithm, parties, round, mark) if round else Counters()
    # What an interrupted save left must not mix with a later one of the same round.
    _forget(config, OF_PARTIES, lambda other: other > round)
    return counters


def load_parties(config: Config, algorithm: Algorithm, parties: tuple[int, ...], round: int, mark: str) -> Counters:
    """Their states as they were after this round; DataError if they are not all there."""
    counters = [Counters()]
    for path, held, counted, states in _read_parties(config, parties, round, mark):
        counters.append(Counters(*counted[:2].tolist()))
        at = np.flatnonzero(np.isin(held, parties))
        try:
            algorithm.load_states(tuple(held[at].tolist()), {name: values[at] for name, values in states.items()})
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise DataError(f"checkpoint {path} cannot be used ({type(error).__name__}: {error})") from None
    return Counters(*map(max, zip(*counters)))


Held = tuple[
    Path, np.ndarray, np.ndarray, dict[str, np.ndarray]
]  # file, its parties, their rank's counters, their states


def _read_parties(config: Config, parties: tuple[int, ...], round: int, mark: str) -> list[Held]:
    """What the files of this round hold of these parties, and of others beside them; DataError if that is not all of them."""
    missing, found = set(parties), []
    for path in _files(config, round, parties):
        arrays = _open(path, round, mark)[0]
        try:
            held, counted = arrays.pop("parties"), arrays.pop(COUNTERS)
        except KeyError as error:
            raise DataError(f"checkpoint {path} cannot be used (it lacks {error})") from None
        missing -= set(held.tolist())
        found.append((path, held, counted, arrays))
    if missing:
        raise DataError(f"checkpoint {folder(config, round)} has no state of party {min(missing)}")
    return found


def _refuse_going_back(config: Config, parties: tuple[int, ...], round: int) -> None:
    """An honest interruption, between the parties' saves and rank 0's, goes back by one checkpoint; damage does the same."""
    least = _least(config, parties)
    if round < least:
        raise ConfigError(
            f"resume_round = {round}: rank 0 would repeat rounds that this rank has behind it; it holds checkpoints of rounds "
            f"{least} and {_complete(config, parties)[-1]} and goes back no further"
        )


def _least(config: Config, parties: tuple[int, ...]) -> int:
    """The last checkpoint but one: as the last one says, or, if it cannot be read, by the files that are here."""
    held = _complete(config, parties)
    if not held:
        return 0
    said = []
    for path in _files(config, held[-1], parties):
        # Damaged, or gone: another rank forgets it at this moment, as this one is about to.
        with contextlib.suppress(Refused, KeyError, IndexError):
            said.append(int(open_sealed(path)[0][COUNTERS][2]))
    return max(said) if said else held[-2] if len(held) > 1 else 0


def _complete(config: Config, parties: tuple[int, ...]) -> list[int]:
    """The rounds of which this disk has all these parties' states, by the names of its files."""

    def whole(round: int) -> bool:
        ends = list(map(_ends, _files(config, round)))
        return all(any(first <= party <= last for first, last in ends) for party in parties)

    return list(filter(whole, _rounds(config)))


def _files(config: Config, round: int, parties: tuple[int, ...] | None = None) -> list[Path]:
    """A round's files of parties, or those that hold one of these."""
    found = sorted(path for path in _listed(folder(config, round)) if PARTIES.fullmatch(path.name))
    if parties is None or not parties:
        return found if parties is None else []
    return [path for path in found if _ends(path)[0] <= parties[-1] and _ends(path)[1] >= parties[0]]


def _ends(path: Path) -> tuple[int, int]:
    first, last = path.stem.split("-")[1:]
    return int(first), int(last)


# ---- rank 0's half ----


def save_server(config: Config, round: int, arrays: dict[str, np.ndarray], state: dict[str, Any], mark: str) -> None:
    """The server's half, then `latest`; the one before stays, older ones go."""
    before = max((other for other in server_rounds(config) if other < round), default=0)
    with _saving(round, before):
        seal = write_sealed(folder(config, round) / "server.npz", arrays | _marks(round, mark))
        write_sealed_json(folder(config, round) / "server.json", state | {MARK: mark, OF_ROUND: round, "arrays": seal})
        write_text(config.out / "checkpoint" / "latest", f"{round}\n")
    _forget(config, OF_SERVER, lambda other: other not in (round, before))


def load_state(config: Config, round: int, mark: str) -> dict[str, Any]:
    """server.json; DataError if it is not as this run wrote it."""
    path = folder(config, round) / "server.json"
    try:
        state = open_sealed_json(path)
        _check_marks(state.pop(MARK, None), state.pop(OF_ROUND, None), round, mark)
    except Refused as error:
        raise DataError(f"checkpoint {path} {error}") from None
    return state


def load_server(config: Config, round: int, mark: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    state, path = load_state(config, round, mark), folder(config, round) / "server.npz"
    arrays, seal = _open(path, round, mark)
    if state.pop("arrays", None) != seal or not {"theta", "ledger"} <= set(arrays):
        raise DataError(f"checkpoint {path} does not belong to the server.json beside it")
    return arrays, state


def judge(config: Config, round: int, mark: str) -> None:
    """DataError unless rank 0's half is whole, and every file of parties that rank 0 can see. Those on other disks their ranks judge."""
    load_server(config, round, mark)
    for path in _files(config, round):
        _open(path, round, mark)


def server_rounds(config: Config) -> list[int]:
    """The rounds of which there is something of rank 0's, but for a save that was interrupted."""
    named, found = latest_round(config.out), []
    for round in _rounds(config):
        there = sum((folder(config, round) / name).exists() for name in ("server.npz", "server.json"))
        if there == 2 or (there and (named is None or round <= named)):
            found.append(round)
    return found


def latest_round(out: Path) -> int | None:
    """What `latest` says; None if it says nothing."""
    try:
        text = (out / "checkpoint" / "latest").read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if ROUND.fullmatch(text) and len(text) < 20 else None


def forget_after(config: Config, round: int) -> None:
    """Rank 0 goes on from this round: what is later will be made anew."""
    if round and latest_round(config.out) != round:
        write_text(config.out / "checkpoint" / "latest", f"{round}\n")
    _forget(config, OF_SERVER, lambda other: other > round)


# ---- both ----


def _marks(round: int, mark: str) -> dict[str, np.ndarray]:
    return {MARK: np.array(mark), OF_ROUND: np.array(round)}


def _check_marks(found_mark: Any, found_round: Any, round: int, mark: str) -> None:
    if str(found_mark) != mark:
        raise Refused("is of another run, or the settings of this one were changed in its folder")
    if int(found_round) != round:
        raise Refused(f"is of round {int(found_round)}, in the folder of round {round}")


def _open(path: Path, round: int, mark: str) -> tuple[dict[str, np.ndarray], str]:
    """A file's arrays and their seal; DataError if it is not as this run wrote it after this round."""
    try:
        arrays, seal = open_sealed(path)
        _check_marks(arrays.pop(MARK, None), arrays.pop(OF_ROUND, None), round, mark)
    except Refused as error:
        raise DataError(f"checkpoint {path} {error}") from None
    return arrays, seal


@contextlib.contextmanager
def _saving(round: int, before: int) -> Iterator[None]:
    """A disk that is full, gone or read-only is one line, which says what is left."""
    try:
        yield
    except WriteError as error:
        left = (
            f"that of round {before} is whole, and --resume goes on from there" if before else "there is none before it"
        )
        raise DataError(f"checkpoint of round {round}: {error}; {left}") from None


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
                with writing(path):
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
