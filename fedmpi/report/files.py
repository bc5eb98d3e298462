"""Files of a run, written so that a reader never sees half of one."""

import json
import os
from pathlib import Path

import numpy as np


def write_text(path: Path, text: str) -> None:
    """Write beside the place and rename into it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    # allow_nan=False: an infinite epsilon must have been turned into null and a reason before it gets here.
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, "wb") as stream:
            np.savez(stream, **arrays)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
