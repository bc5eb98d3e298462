"""What rating data sets there are, on which terms, and what their official files hold."""

from __future__ import annotations

from fedmpi.data.ratings.loaders import load_lastfm, load_ml_1m, load_ml_10m, load_ml_100k
from fedmpi.data.ratings.source import Counts, RatingSource, Scale
from fedmpi.errors import ConfigError

_GROUPLENS = "https://files.grouplens.org/datasets"
_MOVIELENS_TERMS = (
    "research use only, no redistribution, no commercial use without permission; cite Harper and Konstan 2015, "
    "The MovieLens Datasets: History and Context"
)
_STARS = Scale(1.0, 5.0, 1.0)

_SOURCES = (
    RatingSource(name="generated", scale=_STARS, terms="none: drawn at random"),
    RatingSource(
        name="ml-100k",
        scale=_STARS,
        terms=_MOVIELENS_TERMS,
        loader=load_ml_100k,
        files=("u.data", "u.item", "u.user", "u.genre"),
        folder="ml-100k",
        url=f"{_GROUPLENS}/movielens/ml-100k.zip",
        md5="0e33842e24a9c977be4e0107933c0723",
        counts=Counts(100_000, 943, 1_682, 0),
        opening=b"196\t242\t3\t881250949",
    ),
    RatingSource(
        name="ml-1m",
        scale=_STARS,
        terms=_MOVIELENS_TERMS,
        loader=load_ml_1m,
        files=("ratings.dat", "movies.dat", "users.dat"),
        folder="ml-1m",
        url=f"{_GROUPLENS}/movielens/ml-1m.zip",
        md5="c4d9eecfca2ab87c1945afe126590906",
        counts=Counts(1_000_209, 6_040, 3_883, 0),  # 3,706 of the films are rated
        opening=b"1::1193::5::978300760",
    ),
    RatingSource(
        name="ml-10m",
        scale=Scale(0.5, 5.0, 0.5),
        terms=_MOVIELENS_TERMS,
        loader=load_ml_10m,
        files=("ratings.dat", "movies.dat", "tags.dat"),
        folder="ml-10M100K",
        url=f"{_GROUPLENS}/movielens/ml-10m.zip",
        md5="ce571fd55effeba0271552578f2648bd",
        counts=Counts(10_000_054, 69_878, 10_681, 95_580),  # ids go up to 71,567; the others only applied tags
        opening=b"1::122::5::838985046",
        has_tags=True,
    ),
    RatingSource(
        name="lastfm",
        scale=_STARS,
        terms="non-commercial use, not for redistribution; cite Cantador, Brusilovsky and Kuflik 2011, HetRec",
        loader=load_lastfm,
        files=("user_artists.dat", "artists.dat", "user_taggedartists.dat", "tags.dat"),
        folder="hetrec2011-lastfm-2k",
        url=f"{_GROUPLENS}/hetrec2011/hetrec2011-lastfm-2k.zip",
        header=b"userID\tartistID\tweight",
        counts=Counts(92_834, 1_892, 17_632, 186_479),
        opening=b"2\t51\t13883",
        has_tags=True,
        holds_listens=True,
    ),
)
_BY_NAME = {source.name: source for source in _SOURCES}


def known() -> list[str]:
    return sorted(_BY_NAME)


RATING_SETS = tuple(known())


def get(name: str) -> RatingSource:
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        raise ConfigError(f"dataset = {name!r}: must be one of {', '.join(known())}") from None
