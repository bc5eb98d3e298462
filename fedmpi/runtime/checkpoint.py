"""Checkpoints: the server's state, and each party's on the rank that hosts it. Neither travels.

    OUT/checkpoint/latest            the round that is complete on every rank
    OUT/checkpoint/<round>/server.npz, server.json
    OUT/checkpoint/<round>/parties-00000-00006.npz     a rank's parties; any rank can read its own from several of these

`latest` is written last, so a run that is killed while it saves goes on from the checkpoint before. No key and no noise is
ever kept: under `entropy: os` a repeated round draws fresh noise, and counts once more. The log of releases, which is not part
of a checkpoint, knows of the rounds after it (fedmpi.privacy.releases).
"""

import json
import shutil
from pathlib import Path

import numpy as np

from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.errors import ConfigError, DataError
from fedmpi.files import write_arrays, write_json, write_text
from fedmpi.privacy import releases


def folder(config: Config, round: int) -> Path:
    return config.out / "checkpoint" / str(round)


def latest_round(out: Path) -> int:
    """The round to resume after; 0 where something was released under secret noise and no round was checkpointed; ConfigError if
    there is neither."""
    path = out / "checkpoint" / "latest"
    try:
        return int(path.read_text())
    except OSError:
        if (out / releases.NAME).exists() and releases.ReleaseLog.read(out).under_secret_noise:
            return 0
        raise ConfigError(f"resume = {out}: no checkpoint there ({path} is missing)") from None
    except ValueError:
        raise DataError(f"{path} is damaged: expected a round number") from None


def save_parties(config: Config, algorithm: Algorithm, parties: tuple[int, ...], round: int) -> None:
    path = folder(config, round) / f"parties-{parties[0]:05d}-{parties[-1]:05d}.npz"
    write_arrays(path, {"parties": np.array(parties)} | algorithm.states(parties))


def restore_parties(config: Config, algorithm: Algorithm, parties: tuple[int, ...], round: int) -> None:
    """From whichever files hold them: a resumed run may place its parties on other ranks."""
    _forget_others(config, round)  # what an interrupted save left must not mix with a later one of the same round
    missing = set(parties)
    for path in sorted(folder(config, round).glob("parties-*.npz")):
        first, last = (int(number) for number in path.stem.split("-")[1:])
        if first <= parties[-1] and last >= parties[0]:
            arrays = _load(path)
            try:
                held = arrays.pop("parties")
                at = np.flatnonzero(np.isin(held, parties))
                chosen = tuple(held[at].tolist())
                algorithm.load_states(chosen, {name: values[at] for name, values in arrays.items()})
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise DataError(f"checkpoint {path} cannot be used ({type(error).__name__}: {error})") from None
            missing -= set(chosen)
    if missing:
        raise DataError(f"checkpoint {folder(config, round)} has no state of party {min(missing)}")


def save_server(config: Config, round: int, arrays: dict[str, np.ndarray], state: dict) -> None:
    """The server's half, then `latest`; older checkpoints go."""
    write_arrays(folder(config, round) / "server.npz", arrays)
    write_json(folder(config, round) / "server.json", state)
    write_text(config.out / "checkpoint" / "latest", f"{round}\n")
    _forget_others(config, round)


def load_server(config: Config, round: int) -> tuple[dict[str, np.ndarray], dict]:
    arrays = _load(folder(config, round) / "server.npz")
    path = folder(config, round) / "server.json"
    try:
        if not {"theta", "ledger"} <= set(arrays):
            raise ValueError("server.npz lacks theta or ledger")
        return arrays, json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint {path} cannot be used ({error})") from None


def forget_all(config: Config) -> None:
    """Before a run begins anew: what an interrupted save left must not mix with a later one."""
    _forget_others(config, 0)


def _forget_others(config: Config, round: int) -> None:
    for old in (config.out / "checkpoint").glob("[0-9]*"):
        if old.is_dir() and old.name != str(round):
            shutil.rmtree(old, ignore_errors=True)


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as content:
            return dict(content)
    except (OSError, ValueError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"checkpoint {path} cannot be used ({reason})") from None
    except Exception as error:  # zipfile raises its own kinds for a damaged archive
        raise DataError(f"checkpoint {path} is damaged ({type(error).__name__})") from None
