"""Small data sets in the official layouts, written by the tests: the official files may not be passed on."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

FOLDERS = {"ml-100k": "ml-100k", "ml-1m": "ml-1m", "ml-10m": "ml-10M100K", "lastfm": "hetrec2011-lastfm-2k"}
ARCHIVES = {"ml-100k": "ml-100k", "ml-1m": "ml-1m", "ml-10m": "ml-10m", "lastfm": "hetrec2011-lastfm-2k"}
RATINGS = {"ml-100k": "u.data", "ml-1m": "ratings.dat", "ml-10m": "ratings.dat", "lastfm": "user_artists.dat"}

USERS, ITEMS = 12, 9
ENCODING = {"ml-100k": "latin-1", "ml-1m": "latin-1", "ml-10m": "utf-8", "lastfm": "utf-8"}


def pairs() -> list[tuple[int, int]]:
    """Users 1 to 12 each rate two thirds of the items 10, 20, ..., 90; out of order, as the official files are."""
    return [(u, 10 * i) for i in range(ITEMS, 0, -1) for u in range(1, USERS + 1) if (u + i) % 3]


def contents(name: str) -> dict[str, list[str]]:
    """Lines of every file. User 13 has no rating, item 100 no rater, and some tags name an item that is not there."""
    items, users = [*range(10, 101, 10)], range(1, USERS + 2)
    if name == "ml-100k":
        genres = ["unknown", "Action", "Comedy"]
        dates = [f"01-Jan-{1990 + i // 10}" for i in items[:-1]] + [""]
        return {
            "u.data": [f"{u}\t{i}\t{1 + (u + i // 10) % 5}\t88125094{u % 10}" for u, i in pairs()],
            "u.item": [
                f"{i}|Fílm {i}|{date}||http://x/{i}|{'|'.join(str(int(i // 10 % 3 == g)) for g in range(3))}"
                for i, date in zip(items, dates)
            ],
            "u.user": [f"{u}|{20 + u}|{'FM'[u % 2]}|{['writer', 'artist'][u % 2]}|55105" for u in users],
            "u.genre": [f"{genre}|{number}" for number, genre in enumerate(genres)] + [""],
        }
    if name == "lastfm":
        return {
            "user_artists.dat": ["userID\tartistID\tweight", *(f"{u}\t{i}\t{u * i}" for u, i in pairs())],
            "artists.dat": ["id\tname\turl\tpictureURL", *(f"{i}\tÄrtist {i}\thttp://x\thttp://y" for i in items)],
            "user_taggedartists.dat": [
                "userID\tartistID\ttagID\tday\tmonth\tyear",
                *(f"{u}\t{i}\t{1 + (u + i) % 4}\t1\t4\t2009" for u, i in pairs()),
                "1\t999\t2\t1\t4\t2009",
                "99\t10\t2\t1\t4\t2009",
            ],
            "tags.dat": ["tagID\ttagValue", *(f"{t}\ttag {t}" for t in range(1, 5))],
        }
    step = 1.0 if name == "ml-1m" else 0.5
    films = [f"{i}::Fílm: {i} ({1990 + i // 10})::{['Action|Comedy', 'Drama'][i // 10 % 2]}" for i in items[:-1]]
    out = {
        "ratings.dat": [f"{u}::{i}::{step * (1 + (u + i // 10) % 5):g}::97830076{u % 10}" for u, i in pairs()],
        "movies.dat": [*films, "100::Untitled::(no genres listed)"],
    }
    if name == "ml-1m":
        out["users.dat"] = [f"{u}::{'FM'[u % 2]}::{[1, 25, 56][u % 3]}::{9 + u % 2}::48067" for u in users]
    else:
        out["tags.dat"] = [f"{u}::{i}::{['Dark', 'dark ', 'a::b', 'slow'][(u + i) % 4]}::121518463" for u, i in pairs()]
        out["tags.dat"] += ["99::10::funny::1215184630", "1::999::funny::1215184630", "1::10:: ::1215184630"]
    return out


def write_files(name: str, folder: Path, newline: str = "\n", **replaced: list[str]) -> Path:
    """The official folder under `folder`. `replaced`: other lines for a file, with its dot written as _."""
    root = folder / FOLDERS[name]
    root.mkdir(parents=True, exist_ok=True)
    for file, lines in contents(name).items():
        lines = replaced.get(file.replace(".", "_"), lines)
        (root / file).write_bytes("".join(line + newline for line in lines).encode(ENCODING[name]))
    return root


def write_archive(name: str, folder: Path, inside: str | None = None) -> Path:
    """The official archive in `folder`, its files in the folder `inside`."""
    inside = FOLDERS[name] + "/" if inside is None else inside
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{ARCHIVES[name]}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, lines in contents(name).items():
            archive.writestr(f"{inside}{file}", "".join(line + "\n" for line in lines).encode(ENCODING[name]))
            archive.writestr(f"__MACOSX/{inside}._{file}", "not this one")
    return path


def real_data(name: str) -> str:
    """The folder with the official files, or the test is skipped."""
    root = os.environ.get("FEDMPI_TEST_DATA", "")
    if not root or not Path(root, FOLDERS[name]).is_dir():
        pytest.skip(f"FEDMPI_TEST_DATA does not hold {FOLDERS[name]}")
    return root
