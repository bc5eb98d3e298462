"""Checkpoints: the server's state, and each party's on the rank that hosts it. Neither travels.

    OUT/checkpoint/latest            the round that is complete on every rank
    OUT/checkpoint/<round>/server.npz, server.json
    OUT/checkpoint/<round>/party-00007.npz

`latest` is written last, so a run that is killed while it saves goes on from the checkpoint before. No key and no noise is
ever kept: under `entropy: os` a repeated round draws fresh noise, and the accountant counts both.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.errors import ConfigError, DataError
from fedmpi.report.files import write_arrays, write_json, write_text


def folder(config: Config, round: int) -> Path:
    return config.out / "checkpoint" / str(round)


def latest_round(out: Path) -> int:
    """The round to resume after; ConfigError if the folder has no complete checkpoint."""
    path = out / "checkpoint" / "latest"
    try:
        return int(path.read_text())
    except OSError:
        raise ConfigError(f"resume = {out}: no checkpoint there ({path} is missing)") from None
    except ValueError:
        raise DataError(f"{path} is damaged: expected a round number") from None


def save_parties(config: Config, algorithm: Algorithm, parties: tuple[int, ...], round: int) -> None:
    for party in parties:
        write_arrays(_party_file(config, party, round), algorithm.party_state(party))


def restore_parties(config: Config, algorithm: Algorithm, parties: tuple[int, ...], round: int) -> None:
    for party in parties:
        algorithm.load_party_state(party, _load(_party_file(config, party, round)))


def save_server(config: Config, round: int, arrays: dict[str, np.ndarray], state: dict) -> None:
    """The server's half, then `latest`; older checkpoints go."""
    write_arrays(folder(config, round) / "server.npz", arrays)
    write_json(folder(config, round) / "server.json", state)
    write_text(config.out / "checkpoint" / "latest", f"{round}\n")
    for old in (config.out / "checkpoint").iterdir():
        if old.is_dir() and old.name != str(round):
            shutil.rmtree(old, ignore_errors=True)


def load_server(config: Config, round: int) -> tuple[dict[str, np.ndarray], dict]:
    arrays = _load(folder(config, round) / "server.npz")
    path = folder(config, round) / "server.json"
    try:
        if not {"theta", "ledger"} <= set(arrays):
            raise ValueError("server.npz lacks theta or ledger")
        return arrays, json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint {path} cannot be used ({error})") from None


def _party_file(config: Config, party: int, round: int) -> Path:
    return folder(config, round) / f"party-{party:05d}.npz"


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as content:
            return dict(content)
    except (OSError, ValueError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"checkpoint {path} cannot be used ({reason})") from None
    except Exception as error:  # zipfile raises its own kinds for a damaged archive
        raise DataError(f"checkpoint {path} is damaged ({type(error).__name__})") from None
