"""Number tables: the fast reader takes exactly what the plain one takes, and every bad line is named."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.data.ratings import table
from fedmpi.data.ratings.table import Column, read_lines, read_numbers
from fedmpi.errors import DataError

COLUMNS = (Column("user"), Column("item"), Column("rating", "rating"), Column("timestamp", "skip"))


def read(content: bytes, separator: bytes = b"\t", columns=COLUMNS, header: bytes | None = None):
    return read_numbers(io.BytesIO(content), "file", separator, columns, header)


def refused(content: bytes, **settings) -> str:
    with pytest.raises(DataError) as caught:
        read(content, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("separator", [b"\t", b"::"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("tail", [b"", b"\n", b"\r\n\n\r\n"])
def test_what_is_written_is_read(separator, end, tail):
    rows = [
        (b"1", b"20", b"3", b"881250949"),
        (b"2147483647", b"0", b"3.5", b"1"),
        (b"007", b"5", b"0.5", b"99999999999"),
    ]
    content = end.join(separator.join(row) for row in rows) + tail
    got = read(content, separator)
    assert got["user"].tolist() == [1, 2147483647, 7] and got["user"].dtype == np.int32
    assert got["item"].tolist() == [20, 0, 5]
    assert got["rating"].tolist() == [3.0, 3.5, 0.5] and got["rating"].dtype == np.float32
    assert set(got) == {"user", "item", "rating"}


BAD_LINES = [
    (b"1\t2\t3", "3 fields, expected 4"),
    (b"1\t2\t3\t4\t5", "5 fields, expected 4"),
    (b"", "no fields, expected 4"),
    (b"1\t\t3\t4", "item '': must be a whole number from 0 to 2147483647"),
    (b"-1\t2\t3\t4", "user '-1': must be a whole number from 0 to 2147483647"),
    (b"1.5\t2\t3\t4", "user '1.5': must be a whole number from 0 to 2147483647"),
    (b"1\t2147483648\t3\t4", "item '2147483648': must be a whole number from 0 to 2147483647"),
    (b"1\t123456789012345\t3\t4", "item '123456789012345': must be a whole number from 0 to 2147483647"),
    (b"1\t2\tnan\t4", "rating 'nan': must be a number"),
    (b"1\t2\tinf\t4", "rating 'inf': must be a number"),
    (b"1\t2\t1e3\t4", "rating '1e3': must be a number"),
    (b"1\t2\t3.\t4", "rating '3.': must be a number"),
    (b"1\t2\t3.0.1\t4", "rating '3.0.1': must be a number"),
    (b"1\t2\t123456789\t4", "rating '123456789': must be a number"),
    (b"1\t2\t3\t", "timestamp '': must be digits"),
    (b"1\t2\t3\t\r", "timestamp '': must be digits"),
    (b"1\t2\t3\t4.5", "timestamp '4.5': must be digits"),
    (b"1\t2\t3\t4\r5", "timestamp '4\\r5': must be digits"),
    (b"1\t2\t3 \t4", "rating '3 ': must be a number"),
    (b"1\t2\t\x00\t4", "rating '\\x00': must be a number"),
    (b"1\xff\t2\t3\t4", "user '1ÿ': must be a whole number from 0 to 2147483647"),
]


@pytest.mark.parametrize("line, reason", BAD_LINES)
@pytest.mark.parametrize("block", [16, 1 << 23])
def test_a_bad_line_is_named(line, reason, block, monkeypatch):
    monkeypatch.setattr(table, "BLOCK_BYTES", block)
    good = b"1\t2\t3\t4\n"
    assert refused(good * 9 + line + b"\n" + good) == f"file, line 10: {reason}"


@pytest.mark.parametrize(
    "line", [b"1:2::3::4", b"1::2::3::4:5", b"1:::2::3::4", b"1::2::::3::4", b"::1::2::3", b":::::::", b"1::2::3:4:5"]
)
def test_colons_in_the_wrong_places(line):
    good = b"1::2::3::4\n"
    assert refused(good + line + b"\n" + good, separator=b"::").startswith("file, line 2: ")


def test_two_bad_lines_that_have_the_right_number_of_fields_together():
    assert refused(b"1\t2\t3\n1\t2\t3\t4\t5\n") == "file, line 1: 3 fields, expected 4"


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n\r\n"])
def test_an_empty_file(content):
    assert refused(content) == "file is empty"
    with pytest.raises(DataError, match="^file is empty$"):
        list(read_lines(io.BytesIO(content), "file", "utf-8"))


def test_a_file_without_line_ends(monkeypatch):
    monkeypatch.setattr(table, "BLOCK_BYTES", 16)
    assert refused(b"7" * 200) == "file has no line ends: it is not the text table that it should be"


def test_header():
    columns = (Column("a"), Column("b"))
    assert read(b"a\tb\r\n1\t2\r\n3\t4\r\n", columns=columns, header=b"a\tb")["b"].tolist() == [2, 4]
    assert (
        refused(b"1\t2\n", columns=columns, header=b"a\tb") == "file, line 1: the header is '1\\t2', expected 'a\\tb'"
    )
    assert refused(b"a\tb\n1\tx\n", columns=columns, header=b"a\tb").startswith("file, line 2: b 'x'")
    assert refused(b"a\tb\n", columns=columns, header=b"a\tb") == "file is empty"


def test_lines_are_parted_at_line_feeds_only():
    text = "a\x85b\u2028c\r\nd\n\n"
    lines = list(read_lines(io.BytesIO(text.encode()), "file", "utf-8"))
    assert lines == [(1, "a\x85b\u2028c"), (2, "d")]


digits = st.text("0123456789", min_size=1, max_size=11)
ratings = st.one_of(digits, st.from_regex(r"[0-9]{1,5}\.[0-9]{1,4}", fullmatch=True))


@st.composite
def tables(draw):
    """Lines that are mostly in order, with a few bytes replaced, put in or left out."""
    separator = draw(st.sampled_from(["\t", "::"]))
    lines = draw(st.lists(st.tuples(digits, digits, ratings, digits).map(separator.join), min_size=1, max_size=6))
    content = bytearray("".join(line + draw(st.sampled_from(["\n", "\r\n"])) for line in lines).encode())
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(content) - 1))
        width = draw(st.integers(0, 1))
        content[place : place + width] = draw(
            st.sampled_from([b"", b".", b":", b"\t", b"\r", b"\n", b"5", b"-", b"\xe9"])
        )
        content = content or bytearray(b"1")
    return separator.encode(), bytes(content)


@given(tables())
def test_fast_and_plain_reader_agree(case):
    separator, content = case
    lines = [line.removesuffix(b"\r") for line in content.rstrip(b"\r\n").split(b"\n")]
    faults = [table._fault(line, separator, COLUMNS) for line in lines]
    try:
        got = read(content, separator)
    except DataError as error:
        bad = [number for number, fault in enumerate(faults, 1) if fault]
        assert lines == [b""] or str(error) == f"file, line {bad[0]}: {faults[bad[0] - 1]}"
    else:
        assert not any(faults)
        fields = [line.split(separator) for line in lines]
        assert got["user"].tolist() == [int(field[0]) for field in fields]
        assert got["item"].tolist() == [int(field[1]) for field in fields]
        assert got["rating"].tolist() == [float(np.float32(float(field[2]))) for field in fields]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_the_size_of_a_block_changes_nothing(block, monkeypatch):
    monkeypatch.setattr(table, "BLOCK_BYTES", max(block, 12))  # a block of one line at least fits four times
    rng = np.random.default_rng(0)
    rows = np.stack([rng.integers(0, 10 ** rng.integers(1, 8, 500)) for _ in range(2)], axis=1)
    content = "".join(f"{u}\t{i}\t{1 + u % 5}\t1\n" for u, i in rows).encode()
    got = read(content)
    assert np.array_equal(got["user"], rows[:, 0]) and np.array_equal(got["item"], rows[:, 1])
