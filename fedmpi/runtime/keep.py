"""What a finished run leaves to be used, see fedmpi.model: the shared model, and each party's part on the rank that hosts it.

OUT/model.npz                          rank 0: the shared parameters by name, the vector that they are, and `meta`
OUT/parties/parties-00000-00006.npz    a client rank, under --keep-parties; for its owner's eyes
"""

import json
from pathlib import Path

import numpy as np

from fedmpi import __version__
from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.errors import DataError
from fedmpi.files import make_folder
from fedmpi.report.sealed import vector_sha256, write_sealed
from fedmpi.runtime.checkpoint import PARTIES, parties_file

FORMAT = 1
STATE = "state."  # before the names of what a party would need to train on; the others are what it predicts with


def save_model(config: Config, algorithm: Algorithm, theta: np.ndarray) -> str:
    """Write the shared model; returns its name, `model_sha256`. No seed, no path and no hash of the data: it can be handed on."""
    name = vector_sha256(theta)
    meta = {
        "format": FORMAT,
        "fedmpi": __version__,
        "method": config.run.method,
        "task": algorithm.task,
        "shares": algorithm.shares,
        "dataset": config.data.dataset,
        "parties": config.run.parties,
        "rounds": config.run.rounds,
        "support": config.aggregation.support,
        "model_sha256": name,
    }
    shared, others = algorithm.shared_arrays(theta), algorithm.model_arrays(theta)
    meta |= {"shared": list(shared), **algorithm.model_facts()}
    arrays = {"theta": np.ascontiguousarray(theta, "<f4"), **shared, **others}
    write_sealed(config.out / "model.npz", arrays | {"meta": np.array(json.dumps(meta))})
    return name


def save_parties(config: Config, algorithm: Algorithm, parties: tuple[int, ...], theta: np.ndarray) -> None:
    """What these parties predict with under the finished model, and the states they end in, for this user's eyes alone."""
    folder = config.out / "parties"
    path = folder / parties_file(parties)
    arrays = {"parties": np.array(parties), "model_sha256": np.array(vector_sha256(theta))}
    arrays |= algorithm.own_parts(parties, theta, config.run.rounds)
    arrays |= {STATE + name: values for name, values in algorithm.states(parties).items()}
    try:
        make_folder(folder)
        for old in kept_files(config.out, parties[0], parties[-1]):
            old.unlink(missing_ok=True)  # of an interrupted run with other ranks; of a link the link
        write_sealed(path, arrays)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or error})") from None


def kept_files(run: Path, first: int, last: int) -> list[Path]:
    """The files that hold a party from `first` to `last`."""
    found = []
    for path in sorted((run / "parties").glob("parties-*.npz")):
        ends = PARTIES.fullmatch(path.name)
        if ends and int(ends[1]) <= last and int(ends[2]) >= first and not path.is_dir():
            found.append(path)
    return found
