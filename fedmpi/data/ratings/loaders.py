"""Rating data sets as plain arrays, read from their official files.

Every fault is named by file and line. Ratings may only name items of the item file (and users of the user file, where
there is one); tags that name others are left out, because the official files have some. Users without a rating are left
out as well: they would be parties with nothing to train on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedmpi.data.ratings.features import Features, join, one_hot, standardised, tag_columns
from fedmpi.data.ratings.source import Files, RatingSet, RatingSource
from fedmpi.data.ratings.table import Column, read_lines, read_numbers
from fedmpi.errors import DataError

_GENRE_NONE = "(no genres listed)"
_MOST_LISTENS = 1 << 24  # float32 holds every whole number up to here


# --- the data sets ---------------------------------------------------------------------------------------------------

_MOVIELENS_COLUMNS = (Column("user"), Column("item"), Column("rating", "rating"), Column("timestamp", "skip"))


def load_ml_100k(source: RatingSource, files: Files, tag_components: int, complete: bool) -> RatingSet:
    genres: list[str] = []
    for line, (genre, number) in _rows(files, "u.genre", "|", 2):
        if number != str(len(genres)):
            raise DataError(f"{files.label('u.genre')}, line {line}: genre number {number!r}, expected {len(genres)}")
        genres.append(genre)
    item_ids, labels, years = [], [], []
    for line, fields in _rows(files, "u.item", "|", 5 + len(genres)):
        item_ids.append(_whole(fields[0], "item", files.label("u.item"), line))
        # the title's year comes first: a film's date may be that of a later release
        years.append(_year(fields[1], fields[2]))
        flags = fields[5:]
        if not set(flags) <= {"0", "1"}:
            raise DataError(f"{files.label('u.item')}, line {line}: genre flags must be 0 or 1")
        labels.append([genre for genre, flag in zip(genres, flags) if flag == "1"])
    items = join(one_hot("genre", labels, genres), standardised("year", years))
    user_ids, users = _people(files, "u.user", "|", order=("user", "age", "gender", "occupation"))
    table = _read_ratings(source, files, b"\t", _MOVIELENS_COLUMNS)
    return _assemble(source, files, complete, table, item_ids, items, user_ids, users)


def load_ml_1m(source: RatingSource, files: Files, tag_components: int, complete: bool) -> RatingSet:
    item_ids, items = _films(files, "latin-1")
    user_ids, users = _people(files, "users.dat", "::", order=("user", "gender", "age", "occupation"))
    table = _read_ratings(source, files, b"::", _MOVIELENS_COLUMNS)
    return _assemble(source, files, complete, table, item_ids, items, user_ids, users)


def load_ml_10m(source: RatingSource, files: Files, tag_components: int, complete: bool) -> RatingSet:
    item_ids, items = _films(files, "utf-8")
    where = files.label("tags.dat")
    tagging: list[tuple[int, int, int]] = []
    vocabulary: dict[str, int] = {}
    lines = 0
    for line, fields in _rows(files, "tags.dat", "::", 4, encoding="utf-8", text=2):
        lines += 1
        user, item, _ = (
            _whole(fields[at], what, where, line) for at, what in ((0, "user"), (1, "item"), (3, "timestamp"))
        )
        tag = fields[2].strip().casefold()
        if tag:
            tagging.append((user, item, vocabulary.setdefault(tag, len(vocabulary))))
    _check_tags(source, where, complete, lines)
    tags = np.array(tagging, dtype=np.int64).reshape(-1, 3)
    table = _read_ratings(source, files, b"::", _MOVIELENS_COLUMNS)
    user_ids = np.unique(table["user"]).astype(np.int64)
    users, item_tags = _by_tags(tags, user_ids, item_ids, tag_components)
    items = join(items, item_tags)
    return _assemble(source, files, complete, table, item_ids, items, user_ids, users)


def load_lastfm(source: RatingSource, files: Files, tag_components: int, complete: bool) -> RatingSet:
    item_ids = [
        _whole(fields[0], "id", files.label("artists.dat"), line)
        for line, fields in _rows(files, "artists.dat", "\t", 4, b"id\tname\turl\tpictureURL")
    ]
    known = [
        _whole(fields[0], "tagID", files.label("tags.dat"), line)
        for line, fields in _rows(files, "tags.dat", "\t", 2, b"tagID\ttagValue")
    ]
    names = ("userID", "artistID", "tagID", "day", "month", "year")
    columns = [Column(name, "id" if name.endswith("ID") else "skip") for name in names]
    where = files.label("user_taggedartists.dat")
    with files.open("user_taggedartists.dat") as stream:
        tagged = read_numbers(stream, where, b"\t", columns, "\t".join(names).encode())
    strange = np.flatnonzero(~np.isin(tagged["tagID"], known))
    if len(strange):
        tag = tagged["tagID"][strange[0]]
        raise DataError(f"{where}, line {strange[0] + 2}: tag {tag} is not in {files.label('tags.dat')}")
    _check_tags(source, where, complete, len(tagged["tagID"]))
    tags = np.stack([tagged["userID"], tagged["artistID"], tagged["tagID"]], axis=1).astype(np.int64)
    table = _read_ratings(source, files, b"\t", (Column("user"), Column("item"), Column("rating")))
    user_ids = np.unique(table["user"]).astype(np.int64)
    users, items = _by_tags(tags, user_ids, item_ids, tag_components)
    return _assemble(source, files, complete, table, item_ids, items, user_ids, users)


# --- side files ------------------------------------------------------------------------------------------------------


def _rows(
    files: Files,
    name: str,
    separator: str,
    count: int,
    header: bytes | None = None,
    encoding: str = "latin-1",
    text: int | None = None,
) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of every line. text: the field that is free text, in which the separator may occur."""
    where = files.label(name)
    with files.open(name) as stream:
        for number, line in read_lines(stream, where, encoding, header):
            fields = line.split(separator)
            if text is not None and len(fields) > count:
                end = len(fields) - (count - text - 1)
                fields[text:end] = [separator.join(fields[text:end])]
            if len(fields) != count:
                raise DataError(f"{where}, line {number}: {len(fields)} fields, expected {count}")
            yield number, fields


def _films(files: Files, encoding: str) -> tuple[list[int], Features]:
    """movies.dat: id::title::genres, the genres parted by a bar."""
    item_ids, labels, years = [], [], []
    for line, (item, title, held) in _rows(files, "movies.dat", "::", 3, encoding=encoding, text=1):
        item_ids.append(_whole(item, "item", files.label("movies.dat"), line))
        years.append(_year(title))
        labels.append([genre for genre in held.split("|") if genre and genre != _GENRE_NONE])
    genres = sorted({genre for row in labels for genre in row})
    return item_ids, join(one_hot("genre", labels, genres), standardised("year", years))


def _people(files: Files, name: str, separator: str, order: tuple[str, ...]) -> tuple[np.ndarray, Features]:
    """The user file: id, age, gender and occupation in the given order, then a zip code that is not used."""
    where = files.label(name)
    user_ids, ages, genders, occupations = [], [], [], []
    for line, fields in _rows(files, name, separator, len(order) + 1):
        field = dict(zip(order, fields))
        user_ids.append(_whole(field["user"], "user", where, line))
        ages.append(_whole(field["age"], "age", where, line))
        if field["gender"] not in ("F", "M"):
            raise DataError(f"{where}, line {line}: gender {field['gender']!r}: must be F or M")
        genders.append([field["gender"]])
        occupations.append([field["occupation"]])
    known = sorted(
        {held[0] for held in occupations}, key=lambda text: (len(text), text) if text.isdigit() else (0, text)
    )
    features = join(
        standardised("age", ages), one_hot("gender", genders, ["F", "M"]), one_hot("occupation", occupations, known)
    )
    return np.array(user_ids, dtype=np.int64), features


def _by_tags(tags: np.ndarray, user_ids: np.ndarray, item_ids: list[int], components: int) -> tuple[Features, Features]:
    """Tag columns of users and of items from rows (user, item, tag); rows with a strange user or item do not count."""
    known_items = np.array(item_ids, dtype=np.int64)
    users, items = _index(user_ids, tags[:, 0]), _index(known_items, tags[:, 1])
    tags, users, items = (column[(users >= 0) & (items >= 0)] for column in (tags[:, 2], users, items))
    return (
        tag_columns(users, tags, len(user_ids), components),
        tag_columns(items, tags, len(known_items), components),
    )


def _whole(text: str, what: str, where: str, line: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise DataError(f"{where}, line {line}: {what} {text[:40]!r}: must be a whole number")
    return int(text)


def _year(*texts: str) -> float:
    """From a title that ends in a year in brackets, otherwise from a date that ends in one."""
    for text in texts:
        found = re.findall(r"\((\d{4})\)", text) or re.findall(r"-(\d{4})$", text)
        if found:
            return float(found[-1])
    return float("nan")


# --- the ratings -----------------------------------------------------------------------------------------------------


def _read_ratings(
    source: RatingSource, files: Files, separator: bytes, columns: Sequence[Column]
) -> dict[str, np.ndarray]:
    name = source.files[0]
    with files.open(name) as stream:
        return read_numbers(stream, files.label(name), separator, columns, source.header)


def _assemble(
    source: RatingSource,
    files: Files,
    complete: bool,
    table: dict[str, np.ndarray],
    item_ids: list[int],
    item_features: Features,
    user_ids: np.ndarray,
    user_features: Features,
) -> RatingSet:
    where, item_file, user_file = map(files.label, source.files[:3])
    first_line = 1 if source.header is None else 2

    def refuse(bad: np.ndarray, reason: Callable[[int], str]) -> None:
        rows = np.flatnonzero(bad)
        if len(rows):
            raise DataError(f"{where}, line {rows[0] + first_line}: {reason(int(rows[0]))}")

    values = table["rating"].astype(np.float32)
    _check_values(source, table["rating"], refuse)
    known_items = np.array(item_ids, dtype=np.int64)
    _check_unique(known_items, item_file, "item")
    _check_unique(user_ids, user_file, "user")
    items = _index(known_items, table["item"])
    refuse(items < 0, lambda row: f"item {table['item'][row]} is not in {item_file}")
    users = _index(user_ids, table["user"])
    refuse(users < 0, lambda row: f"user {table['user'][row]} is not in {user_file}")

    # rows by ascending id, and of users only those that rated
    item_order, items = _by_id(known_items, items)
    user_order, users = _by_id(user_ids, users)
    rated = np.bincount(users, minlength=len(user_order)) > 0
    users = (np.cumsum(rated) - 1)[users]
    user_order = user_order[rated]

    pair = users * len(known_items) + items
    order = np.argsort(pair, kind="stable")
    twice = np.flatnonzero(np.diff(pair[order]) == 0)
    if len(twice):
        row = int(order[twice + 1].min())
        raise DataError(
            f"{where}, line {row + first_line}: user {table['user'][row]} and item {table['item'][row]} a second time"
        )
    if complete:
        found = (len(values), len(user_order), len(known_items))
        for what, number, official in zip(("ratings", "users", "items"), found, source.counts):
            if number != official:
                raise DataError(
                    f"{where}: {number:,} {what}, the official files have {official:,}: cut short or changed; "
                    f"get {source.archive} anew"
                )
    return RatingSet(
        scale=source.scale,
        users=users[order].astype(np.int32),
        items=items[order].astype(np.int32),
        values=values[order],
        user_ids=user_ids[user_order],
        item_ids=known_items[item_order],
        user_features=user_features.rows(user_order),
        item_features=item_features.rows(item_order),
    )


def _check_values(source: RatingSource, raw: np.ndarray, refuse: Callable[..., None]) -> None:
    if source.holds_listens:
        refuse((raw < 1) | (raw > _MOST_LISTENS), lambda row: f"count {raw[row]}: must be 1 to {_MOST_LISTENS}")
        return
    lowest, highest, step = source.scale
    steps = (raw - np.float32(lowest)) / np.float32(step)
    refuse(
        (raw < lowest) | (raw > highest) | (steps != np.rint(steps)),
        lambda row: f"rating {raw[row]:g}: must be {lowest:g} to {highest:g} in steps of {step:g}",
    )


def _check_tags(source: RatingSource, where: str, complete: bool, found: int) -> None:
    if complete and found != source.counts.tags:
        raise DataError(
            f"{where}: {found:,} tags, the official file has {source.counts.tags:,}: cut short or changed; "
            f"get {source.archive} anew"
        )


def _check_unique(ids: np.ndarray, where: str, what: str) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise DataError(f"{where}: {what} {values[counts > 1][0]} occurs twice")


def _index(known: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The row of each id in `known`, -1 where it is not there."""
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], ids), len(known) - 1)
    rows = order[place]
    return np.where(known[rows] == ids, rows, -1)


def _by_id(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order that sorts the ids, and `rows` as rows of the sorted ones."""
    order = np.argsort(ids, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return order, place[rows]
