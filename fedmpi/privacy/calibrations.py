"""The noise that a target epsilon asks for, remembered where finding it takes seconds: under `pld` at q < 1.

Every rank works out for itself what rank 0 must have put into sigma. Twenty ranks on two cores cannot each import dp-accounting and
search for it, so the first one that needs an answer on a host, rank 0 as a rule, leaves it in the cache folder. A rank believes what lies
there because that folder is its own: whoever can write into it can change the data that the rank trains on as well, and needs
no weaker noise. It is on the rank's own disk and by its own command line, so rank 0 cannot name another one.

An entry says what it is the answer to, by which versions, and has a checksum; one that is damaged, or cannot be, is worked out again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedmpi import __version__
from fedmpi.files import make_folder, write_json
from fedmpi.privacy.accountant import calibrate


def calibrated(folder: Path, epsilon: float, delta: float, q: float, rounds: int, kind: str) -> float:
    """What `calibrate` says, from `folder` where it is known."""
    if kind != "pld" or q == 1.0 or math.isinf(epsilon):
        return calibrate(epsilon, delta, q, rounds, kind)
    from importlib.metadata import version  # 10 ms, and every rank imports this file

    inputs = {"epsilon": epsilon, "delta": delta, "q": q, "rounds": rounds, "accountant": kind}
    inputs |= {"fedmpi": __version__, "dp-accounting": version("dp-accounting")}
    path = folder / f"{_digest(inputs)[:32]}.json"
    with _one_at_a_time(folder):
        known = _read(path, inputs)
        if known is None:
            known = calibrate(epsilon, delta, q, rounds, kind)
            with contextlib.suppress(OSError):  # a cache that cannot be written: found all the same
                write_json(path, {"inputs": inputs, "multiplier": known, "sha256": _digest([inputs, known])})
    return known


def _read(path: Path, inputs: dict[str, Any]) -> float | None:
    try:
        entry = json.loads(path.read_bytes())
        known = entry["multiplier"]
        whole = entry["inputs"] == inputs and entry["sha256"] == _digest([inputs, known])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return known if whole and isinstance(known, float) and 0.0 < known < math.inf else None


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """The ranks of a host that find nothing there wait for the first of them and read what it found."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no folder, or a file system without locks: each for itself
            make_folder(folder)
            fcntl.flock(stack.enter_context(open(folder / ".lock", "w")), fcntl.LOCK_EX)
        yield
