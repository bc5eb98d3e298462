"""Text tables of numbers, read a few megabytes at a time with whole-array operations: ten million lines in seconds.

The fast reader only ever says "every line of this block is in order" or "one is not". In the second case the block is
read again line by line, by code that is slow and plain, to say which line and why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal

import numpy as np

from fedmpi.errors import DataError

BLOCK_BYTES = 1 << 23

_ID_LIMIT = 1 << 31
_ID = re.compile(rb"\d{1,10}")
_RATING = re.compile(rb"\d{1,4}(\.\d{1,3})?")
_DIGITS = re.compile(rb"\d+")


@dataclass(frozen=True)
class Column:
    name: str
    #: id: a whole number below 2^31, as int32. rating: digits with at most one point, as float32. skip: digits, unread.
    kind: Literal["id", "rating", "skip"] = "id"


def read_numbers(
    stream: IO[bytes], where: str, separator: bytes, columns: Sequence[Column], header: bytes | None = None
) -> dict[str, np.ndarray]:
    """The columns that are not skipped, by name. Lines end in LF or CRLF; empty lines at the end are no lines."""
    blocks: list[dict[str, np.ndarray]] = []
    line = 1
    if header is not None:
        _check_header(stream.readline(), header, where)
        line = 2
    for block in _whole_lines(stream, where):
        parsed = _parse(np.frombuffer(block, dtype=np.uint8), separator, columns)
        if parsed is None:
            raise _explain(block, where, line, separator, columns)
        blocks.append(parsed)
        line += block.count(b"\n")
    if not blocks:
        raise DataError(f"{where} is empty")
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def read_lines(stream: IO[bytes], where: str, encoding: str, header: bytes | None = None) -> Iterator[tuple[int, str]]:
    """Number and text of every line, for tables that hold more than numbers."""
    line = 0
    if header is not None:
        _check_header(stream.readline(), header, where)
        line = 1
    content = stream.read().rstrip(b"\r\n")
    if not content:
        raise DataError(f"{where} is empty")
    # not splitlines: it also parts at characters that occur inside titles and tags
    for number, text in enumerate(content.split(b"\n"), line + 1):
        yield number, text.removesuffix(b"\r").decode(encoding, errors="replace")


def _check_header(found: bytes, expected: bytes, where: str) -> None:
    found = found.rstrip(b"\r\n")
    if found != expected:
        shown = found[:60].decode("latin-1")
        raise DataError(f"{where}, line 1: the header is {shown!r}, expected {expected.decode()!r}")


def _whole_lines(stream: IO[bytes], where: str) -> Iterator[bytes]:
    """Blocks that end in a line feed. The last line is held back until it is known that something follows it."""
    held = b""
    while chunk := stream.read(BLOCK_BYTES):
        held += chunk
        cut = held.rstrip(b"\r\n").rfind(b"\n") + 1
        if cut:
            yield held[:cut]
            held = held[cut:]
        elif len(held) > 4 * BLOCK_BYTES:
            raise DataError(f"{where} has no line ends: it is not the text table that it should be")
    held = held.rstrip(b"\r\n")
    if held:
        yield held + b"\n"


# --- fast ------------------------------------------------------------------------------------------------------------


def _parse(data: np.ndarray, separator: bytes, columns: Sequence[Column]) -> dict[str, np.ndarray] | None:
    """None: some line of the block is not in order."""
    fields = _find_fields(data, separator, len(columns))
    if fields is None:
        return None
    points = 0
    out = {}
    for column, (begin, end) in zip(columns, fields):
        if column.kind == "id":
            values = _whole_numbers(data, begin, end)
            if values is None:
                return None
            out[column.name] = values
        elif column.kind == "rating":
            ratings = _ratings(data, begin, end)
            if ratings is None:
                return None
            out[column.name], found = ratings
            points += found
    # every point lies in a rating; what is skipped is not looked at otherwise
    return out if np.count_nonzero(data == ord(".")) == points else None


def _find_fields(data: np.ndarray, separator: bytes, count: int) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Begin and end of each line's first field, second field, and so on."""
    allowed = np.zeros(256, dtype=bool)
    allowed[np.frombuffer(b"0123456789.\r\n" + separator, dtype=np.uint8)] = True
    if not allowed[data].all():
        return None
    newlines = np.flatnonzero(data == ord("\n"))
    returns = data[newlines - 1] == ord("\r")
    if np.count_nonzero(data == ord("\r")) != np.count_nonzero(returns):
        return None
    marks = np.flatnonzero(data == separator[0])
    if len(separator) == 2:
        if len(marks) % 2 or (marks[1::2] - marks[::2] != 1).any():
            return None
        marks = marks[::2]
    if len(marks) != len(newlines) * (count - 1):
        return None
    separators = marks.reshape(len(newlines), count - 1).T
    begins = [np.concatenate([[0], newlines[:-1] + 1]), *(separators + len(separator))]
    ends = [*separators, newlines - returns]
    # no field is empty, and so no separator belongs to another line
    if any((begin >= end).any() for begin, end in zip(begins, ends)):
        return None
    return list(zip(begins, ends))


def _whole_numbers(data: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    length = end - begin
    longest = int(length.max())
    if longest > 10:
        return None
    values = np.zeros(len(begin), dtype=np.int64)
    for place in range(longest):
        inside = length > place
        digit = data[begin + np.minimum(place, length - 1)] - np.uint8(ord("0"))  # what is no digit wraps above 9
        if (digit > 9).any():
            return None
        values = np.where(inside, values * 10 + digit, values)
    return values.astype(np.int32) if values.max() < _ID_LIMIT else None


def _ratings(data: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, int] | None:
    """The values, and how many points they contain. A table has few different ratings: each is converted once."""
    length = end - begin
    longest = int(length.max())
    if longest > 8:
        return None
    keys = np.zeros(len(begin), dtype=np.uint64)
    for place in range(longest):
        byte = data[begin + np.minimum(place, length - 1)].astype(np.uint64)
        keys |= np.where(length > place, byte << np.uint64(8 * place), np.uint64(0))
    texts, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
    values, points = [], 0
    for text, count in zip(texts.tolist(), counts.tolist()):
        content = text.to_bytes(8, "little").rstrip(b"\0")
        if not _RATING.fullmatch(content):
            return None
        values.append(float(content))
        points += count * content.count(b".")
    return np.array(values, dtype=np.float32)[which], points


# --- plain -----------------------------------------------------------------------------------------------------------


def _explain(block: bytes, where: str, line: int, separator: bytes, columns: Sequence[Column]) -> DataError:
    for number, text in enumerate(block.removesuffix(b"\n").split(b"\n"), line):
        reason = _fault(text.removesuffix(b"\r"), separator, columns)
        if reason:
            return DataError(f"{where}, line {number}: {reason}")
    last = line + block.count(b"\n") - 1
    return DataError(f"{where}, lines {line} to {last}: cannot be read")


def _fault(text: bytes, separator: bytes, columns: Sequence[Column]) -> str | None:
    fields = text.split(separator)
    if len(fields) != len(columns):
        return f"{len(fields) if text else 'no'} fields, expected {len(columns)}"
    for column, field in zip(columns, fields):
        shown = f"{column.name} {field[:40].decode('latin-1')!r}"
        if column.kind == "id" and not (_ID.fullmatch(field) and int(field) < _ID_LIMIT):
            return f"{shown}: must be a whole number from 0 to {_ID_LIMIT - 1}"
        if column.kind == "rating" and not _RATING.fullmatch(field):
            return f"{shown}: must be a number"
        if column.kind == "skip" and not _DIGITS.fullmatch(field):
            return f"{shown}: must be digits"
    return None
