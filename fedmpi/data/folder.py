"""How a folder of prepared data is written and read: it is whole or absent, and nothing damaged is served.

A folder is written beside its place and renamed into it. A preparation that was killed can leave a folder named *.tmp-*,
which may be deleted. meta.json describes the folder and carries its own checksum; arrays are .npy files that are mapped,
with their checksums kept by whoever writes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmpi.data import one_line
from fedmpi.errors import DataError
from fedmpi.files import PARSING

META = "meta.json"

#: Of all prepared data, and part of every folder's name: a change of the files, or of the rule that picks what a party
#: holds, makes new folders.
FORMAT = 1


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def damaged(file: Path, reason: str) -> DataError:
    return DataError(f"{file} cannot be used ({reason}): delete the folder {file.parent} and prepare it again")


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A scratch folder that takes the place of `folder` when the block ends, and vanishes if it fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        yield scratch
        try:
            scratch.rename(folder)
        except OSError:
            # another process was faster, and its folder holds the same; anything else is a real failure
            if not (folder / META).is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_array(file: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], blocks: Iterable[np.ndarray]) -> list[int]:
    """Write the blocks one after the other; give back the CRC-32 of each.

    Plain writes and not a writable map: a full disk must be an error, and through a map it is a fatal signal.
    """
    checksums = []
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    with open(file, "wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for block in blocks:
            rows = block.tobytes()
            stream.write(rows)
            checksums.append(zlib.crc32(rows))
    return checksums


def checksum(rows: np.ndarray) -> int:
    """Of an array, or contiguous part of one, that `write_array` wrote as one block."""
    return zlib.crc32(rows.data)


def map_array(file: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    try:
        with PARSING:
            array = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:
        # numpy's header parser lets the exceptions of tokenizer, literal parser and mmap through
        raise damaged(file, one_line(error)) from error
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise damaged(file, f"{array.dtype} of shape {array.shape}, expected {dtype.__name__} of {shape}")
    return array


def write_meta(folder: Path, about: dict[str, Any]) -> None:
    meta = {"format": FORMAT, **about}
    sealed = meta | {"crc32": zlib.crc32(canonical_json(meta))}
    (folder / META).write_text(json.dumps(sealed) + "\n", encoding="utf-8")


def read_meta(folder: Path) -> dict[str, Any]:
    file = folder / META
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of prepared data: prepare it first")
    try:
        meta = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(file, one_line(error)) from error
    if not isinstance(meta, dict) or "format" not in meta:
        raise damaged(file, "not the description of prepared data")
    if meta["format"] != FORMAT:
        raise damaged(file, f"format {meta['format']!r}, expected {FORMAT}")
    # with its own checksum right, the fields are the ones that were written and need no check one by one
    if meta.pop("crc32", None) != zlib.crc32(canonical_json(meta)):
        raise damaged(file, "wrong checksum")
    return meta
