"""Loaders: official layouts, packed or not; every fault named by file and line; features from side information only."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile

import numpy as np
import pytest
from rating_files import (
    ARCHIVES,
    FOLDERS,
    ITEMS,
    RATINGS,
    USERS,
    contents,
    pairs,
    real_data,
    write_archive,
    write_files,
)

from fedmpi.data.ratings import catalog
from fedmpi.data.ratings.features import join, one_hot, standardised, tag_columns
from fedmpi.data.ratings.source import RatingSet
from fedmpi.errors import ConfigError, DataError

FILE_SETS = sorted(FOLDERS)


def load(name: str, data_dir, **settings) -> RatingSet:
    return catalog.get(name).load(None if data_dir is None else str(data_dir), **settings)


def refused(name: str, data_dir, **settings) -> str:
    with pytest.raises(DataError) as caught:
        load(name, data_dir, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_equal(a: RatingSet, b: RatingSet) -> None:
    for field in ("users", "items", "values", "user_ids", "item_ids"):
        assert np.array_equal(getattr(a, field), getattr(b, field))
    for field in ("user_features", "item_features"):
        assert getattr(a, field).names == getattr(b, field).names
        assert np.array_equal(getattr(a, field).values, getattr(b, field).values)


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILE_SETS)
def test_small_files_in_the_official_layout(name, tmp_path):
    write_files(name, tmp_path)
    data = load(name, tmp_path)
    assert len(data.users) == len(pairs())
    assert data.user_ids.tolist() == [*range(1, USERS + 1)], "a user without ratings is no party"
    assert data.item_ids.tolist() == [10 * i for i in range(1, ITEMS + 2)], "an item without ratings stays"
    got = set(zip(data.user_ids[data.users].tolist(), data.item_ids[data.items].tolist()))
    assert got == set(pairs())
    order = np.lexsort((data.items, data.users))
    assert np.array_equal(order, np.arange(len(order)))
    assert data.users.dtype == data.items.dtype == np.int32 and data.values.dtype == np.float32
    for user, item, value in zip(data.user_ids[data.users], data.item_ids[data.items], data.values):
        level = 1 + (user + item // 10) % 5
        assert value == {"lastfm": user * item, "ml-10m": level / 2}.get(name, level)
    for features, rows in ((data.user_features, USERS), (data.item_features, ITEMS + 1)):
        assert features.values.shape == (rows, len(features.names)) and features.values.dtype == np.float32
        assert np.isfinite(features.values).all()


@pytest.mark.parametrize("name", FILE_SETS)
def test_folder_above_folder_itself_archive_and_folder_with_the_archive(name, tmp_path):
    root = write_files(name, tmp_path / "unpacked")
    archive = write_archive(name, tmp_path / "packed")
    flat = write_archive(name, tmp_path / "flat", inside="")
    expected = load(name, root.parent)
    for place in (root, archive, archive.parent, flat):
        assert_equal(load(name, place), expected)
    assert sorted(path.name for path in archive.parent.iterdir()) == [archive.name], "something was unpacked"


@pytest.mark.parametrize("name", FILE_SETS)
def test_windows_line_ends(name, tmp_path):
    write_files(name, tmp_path / "unix")
    write_files(name, tmp_path / "dos", newline="\r\n")
    assert_equal(load(name, tmp_path / "dos"), load(name, tmp_path / "unix"))


@pytest.mark.parametrize("name", FILE_SETS)
def test_the_order_of_lines_does_not_matter(name, tmp_path):
    write_files(name, tmp_path / "a")
    lines = contents(name)[RATINGS[name]]
    head = 1 if name == "lastfm" else 0
    shuffled = [*lines[:head], *reversed(lines[head:])]
    write_files(name, tmp_path / "b", **{RATINGS[name].replace(".", "_"): shuffled})
    assert_equal(load(name, tmp_path / "b"), load(name, tmp_path / "a"))


@pytest.mark.parametrize("name", FILE_SETS)
def test_every_missing_file_is_named(name, tmp_path):
    message = refused(name, tmp_path / "nowhere")
    first = catalog.get(name).files[0]
    assert message.startswith(f"{name}: {tmp_path / 'nowhere' / FOLDERS[name] / first} is missing; expected in ")
    assert f"put https://files.grouplens.org/datasets/{'hetrec2011' if name == 'lastfm' else 'movielens'}/" in message
    root = write_files(name, tmp_path)
    for file in catalog.get(name).files[1:]:
        kept = (root / file).read_bytes()
        (root / file).unlink()
        assert f"{root / file} is missing" in refused(name, tmp_path)
        (root / file).write_bytes(kept)


def test_archives_that_cannot_be_read(tmp_path):
    path = tmp_path / "ml-100k.zip"
    path.write_bytes(b"<html>not found</html>")
    assert f"{path} cannot be read" in refused("ml-100k", tmp_path)
    # a file of another data set
    write_archive("ml-1m", tmp_path).rename(path)
    assert refused("ml-100k", path) == f"ml-100k: {path} holds no u.data: expected ml-100k.zip"
    # a byte of the packed ratings
    write_archive("ml-100k", tmp_path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("ml-100k/u.data").header_offset
    content[start + 60] ^= 0x10
    path.write_bytes(content)
    assert f"ml-100k/u.data in {path} cannot be read" in refused("ml-100k", path)


def test_a_fault_inside_an_archive_names_file_and_line(tmp_path):
    path = tmp_path / "ml-1m.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file, lines in contents("ml-1m").items():
            text = "\n".join(["1::10::9::978300760"] if file == "ratings.dat" else lines)
            archive.writestr(f"ml-1m/{file}", text.encode("latin-1"))
    assert refused("ml-1m", path) == f"ml-1m/ratings.dat in {path}, line 1: rating 9: must be 1 to 5 in steps of 1"


# --- faults ----------------------------------------------------------------------------------------------------------

BAD_RATINGS = [
    ("ml-100k", "1\t90\t6\t1", "rating 6: must be 1 to 5 in steps of 1"),
    ("ml-100k", "1\t90\t0\t1", "rating 0: must be 1 to 5 in steps of 1"),
    ("ml-100k", "1\t90\t3.5\t1", "rating 3.5: must be 1 to 5 in steps of 1"),
    ("ml-100k", "1\t90\tnan\t1", "rating 'nan': must be a number"),
    ("ml-100k", "1\t90\t3", "3 fields, expected 4"),
    ("ml-100k", "1\t95\t3\t1", "item 95 is not in {root}/u.item"),
    ("ml-100k", "77\t90\t3\t1", "user 77 is not in {root}/u.user"),
    ("ml-100k", "2\t90\t3\t1", "user 2 and item 90 a second time"),
    ("ml-1m", "1::95::3::1", "item 95 is not in {root}/movies.dat"),
    ("ml-1m", "77::90::3::1", "user 77 is not in {root}/users.dat"),
    ("ml-1m", "1:90::3::1", "3 fields, expected 4"),
    ("ml-10m", "1::90::5.5::1", "rating 5.5: must be 0.5 to 5 in steps of 0.5"),
    ("ml-10m", "1::90::0::1", "rating 0: must be 0.5 to 5 in steps of 0.5"),
    ("ml-10m", "1::90::3.25::1", "rating 3.25: must be 0.5 to 5 in steps of 0.5"),
    ("ml-10m", "1::95::3::1", "item 95 is not in {root}/movies.dat"),
    ("ml-10m", "2::90::3::1", "user 2 and item 90 a second time"),
    ("lastfm", "1\t90\t0", "count 0: must be 1 to 16777216"),
    ("lastfm", "1\t90\t16777217", "count 16777217: must be 1 to 16777216"),
    ("lastfm", "1\t90\t1.5", "rating '1.5': must be a whole number from 0 to 2147483647"),
    ("lastfm", "1\t95\t3", "item 95 is not in {root}/artists.dat"),
]


@pytest.mark.parametrize("name, line, reason", BAD_RATINGS)
def test_a_bad_rating_is_named_by_file_and_line(name, line, reason, tmp_path):
    lines = [*contents(name)[RATINGS[name]], line]
    root = write_files(name, tmp_path, **{RATINGS[name].replace(".", "_"): lines})
    assert refused(name, tmp_path) == f"{root / RATINGS[name]}, line {len(lines)}: {reason.format(root=root)}"


BAD_SIDE_LINES = [
    ("ml-100k", "u.item", "110|A|01-Jan-1990||x|0|0", "7 fields, expected 8"),
    ("ml-100k", "u.item", "x|A|01-Jan-1990||x|0|0|1", "item 'x': must be a whole number"),
    ("ml-100k", "u.item", "110|A|01-Jan-1990||x|0|0|2", "genre flags must be 0 or 1"),
    ("ml-100k", "u.user", "14|20|M|writer", "4 fields, expected 5"),
    ("ml-100k", "u.user", "14|20|X|writer|1", "gender 'X': must be F or M"),
    ("ml-100k", "u.user", "14|-1|M|writer|1", "age '-1': must be a whole number"),
    ("ml-1m", "movies.dat", "110::A (1990)", "2 fields, expected 3"),
    ("ml-1m", "movies.dat", "²::A (1990)::Drama", "item '²': must be a whole number"),
    ("ml-1m", "users.dat", "14::M::20::1", "4 fields, expected 5"),
    ("ml-10m", "tags.dat", "1::10::dark", "3 fields, expected 4"),
    ("ml-10m", "tags.dat", "1::y::dark::1", "item 'y': must be a whole number"),
    ("ml-10m", "tags.dat", "1::10::dark::soon", "timestamp 'soon': must be a whole number"),
    ("lastfm", "artists.dat", "110\tA\thttp://x", "3 fields, expected 4"),
    ("lastfm", "tags.dat", "5", "1 fields, expected 2"),
    ("lastfm", "user_taggedartists.dat", "1\t10\t1\t1\t4", "5 fields, expected 6"),
    ("lastfm", "user_taggedartists.dat", "1\t10\t77\t1\t4\t2009", "tag 77 is not in {root}/tags.dat"),
]


@pytest.mark.parametrize("name, file, line, reason", BAD_SIDE_LINES)
def test_a_bad_line_of_a_side_file_is_named(name, file, line, reason, tmp_path):
    lines = [*contents(name)[file], line]
    root = write_files(name, tmp_path, **{file.replace(".", "_"): lines})
    assert refused(name, tmp_path) == f"{root / file}, line {len(lines)}: {reason.format(root=root)}"


@pytest.mark.parametrize("name, file", [(name, file) for name in FILE_SETS for file in catalog.get(name).files])
def test_an_empty_file_is_named(name, file, tmp_path):
    root = write_files(name, tmp_path)
    (root / file).write_bytes(b"")
    assert str(root / file) in refused(name, tmp_path)


@pytest.mark.parametrize("name, file, what", [("ml-100k", "u.item", "item 10"), ("ml-1m", "users.dat", "user 1")])
def test_an_id_that_occurs_twice_in_a_side_file(name, file, what, tmp_path):
    lines = contents(name)[file]
    root = write_files(name, tmp_path, **{file.replace(".", "_"): [*lines, lines[0]]})
    assert refused(name, tmp_path) == f"{root / file}: {what} occurs twice"


def test_genres_out_of_order(tmp_path):
    root = write_files("ml-100k", tmp_path, u_genre=["unknown|0", "Comedy|2", "Action|1"])
    assert refused("ml-100k", tmp_path) == f"{root / 'u.genre'}, line 2: genre number '2', expected 1"


def test_a_header_that_is_missing(tmp_path):
    root = write_files("lastfm", tmp_path, user_artists_dat=contents("lastfm")["user_artists.dat"][1:])
    assert refused("lastfm", tmp_path).startswith(f"{root / 'user_artists.dat'}, line 1: the header is ")


@pytest.mark.parametrize("name", FILE_SETS)
def test_an_official_file_that_was_cut_short_is_noticed(name, tmp_path):
    source = catalog.get(name)
    lines = contents(name)[RATINGS[name]]
    head = 1 if name == "lastfm" else 0
    opening = source.opening.decode()
    user, item = opening.replace("::", "\t").split("\t")[:2]
    # the official first rating, which the other files of the test know nothing of
    root = write_files(name, tmp_path, **{RATINGS[name].replace(".", "_"): [*lines[:head], opening, *lines[head:]]})
    extra = {
        "ml-100k": {"u.item": f"{item}|A|||x|0|0|1", "u.user": f"{user}|20|M|writer|1"},
        "lastfm": {"artists.dat": f"{item}\tA\tx\ty"},
    }.get(name, {"movies.dat": f"{item}::A (1990)::Drama"})
    for file, line in extra.items():
        with open(root / file, "a") as stream:
            stream.write(line + "\n")
    message = refused(name, tmp_path)
    assert "cut short or changed; get " in message
    assert f"{source.counts.tags or source.counts.ratings:,}" in message
    # unless one says that this is meant
    load(name, tmp_path, complete=False)


def test_official_numbers_can_be_demanded(tmp_path):
    write_files("ml-100k", tmp_path)
    assert "ratings, the official files have 100,000: cut short" in refused("ml-100k", tmp_path, complete=True)


# --- features --------------------------------------------------------------------------------------------------------


def test_ml_100k_features(tmp_path):
    write_files("ml-100k", tmp_path)
    data = load("ml-100k", tmp_path)
    assert data.item_features.names == ("genre:unknown", "genre:Action", "genre:Comedy", "year")
    genres = data.item_features.values[:, :3]
    assert (
        np.array_equal(genres.argmax(axis=1), [i % 3 for i in range(1, ITEMS + 2)]) and (genres.sum(axis=1) == 1).all()
    )
    year = data.item_features.values[:, 3]
    assert year[-1] == 0, "a missing year is an average one"
    assert abs(year[:-1].mean()) < 1e-6 and abs(year[:-1].std() - 1) < 1e-6 and (np.diff(year[:-1]) > 0).all()
    assert data.user_features.names == ("age", "gender:F", "gender:M", "occupation:artist", "occupation:writer")
    assert data.user_features.values[0, 1:].tolist() == [0, 1, 1, 0]


def test_ml_1m_and_ml_10m_features(tmp_path):
    write_files("ml-1m", tmp_path)
    write_files("ml-10m", tmp_path)
    one, ten = load("ml-1m", tmp_path), load("ml-10m", tmp_path, tag_components=2)
    assert one.item_features.names == ("genre:Action", "genre:Comedy", "genre:Drama", "year")
    assert one.item_features.values[:2, :3].tolist() == [[0, 0, 1], [1, 1, 0]]
    assert one.item_features.values[-1].tolist() == [0, 0, 0, 0], "no genres listed, no year"
    assert one.user_features.names == ("age", "gender:F", "gender:M", "occupation:9", "occupation:10")
    assert ten.item_features.names == (*one.item_features.names, "tag:0", "tag:1")
    assert np.array_equal(ten.item_features.values[:, :4], one.item_features.values)
    assert ten.user_features.names == ("tag:0", "tag:1")


def test_tags_are_compared_without_case_and_space_and_may_hold_colons(tmp_path):
    def with_tags(folder, *tags):
        lines = [f"{1 + k}::{10 * (k + 1)}::{tag}::1" for k, tag in enumerate(tags)]
        write_files("ml-10m", tmp_path / folder, tags_dat=lines)
        return load("ml-10m", tmp_path / folder, tag_components=3).item_features.values

    assert np.array_equal(with_tags("a", "Dark", "dark ", "a::b"), with_tags("b", "x", "x", "y"))
    assert not np.array_equal(with_tags("c", "dark", "darker", "a::b"), with_tags("b", "x", "x", "y"))


def test_features_do_not_depend_on_ratings(tmp_path):
    for name in FILE_SETS:
        write_files(name, tmp_path / "a")
        lines = contents(name)[RATINGS[name]]
        # every user keeps a rating, everything else goes
        keep = [line for line in lines if line.startswith("userID") or "\t10\t" in line or "::10::" in line]
        keep += [line for line in lines if line not in keep and ("\t20\t" in line or "::20::" in line)]
        write_files(name, tmp_path / "b", **{RATINGS[name].replace(".", "_"): keep})
        before, after = load(name, tmp_path / "a"), load(name, tmp_path / "b")
        assert len(after.users) < len(before.users) and np.array_equal(after.user_ids, before.user_ids)
        for field in ("user_features", "item_features"):
            assert np.array_equal(getattr(after, field).values, getattr(before, field).values)


def test_tag_columns_are_the_principal_components():
    rng = np.random.default_rng(0)
    rows, tags = rng.integers(0, 40, 400), rng.integers(0, 15, 400) * 7
    got = tag_columns(rows, tags, 41, 5).values.astype(np.float64)
    from sklearn.feature_extraction.text import TfidfTransformer

    counts = np.zeros((41, 15))
    np.add.at(counts, (rows, tags // 7), 1)
    weights = TfidfTransformer().fit_transform(counts).toarray()
    centred = weights - weights.mean(axis=0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    assert np.allclose(np.abs(got), np.abs(u[:, :5] * s[:5]), atol=1e-4)
    # the order in which tags were applied and their numbers do not matter
    order = rng.permutation(400)
    assert np.array_equal(tag_columns(rows[order], tags[order] + 3, 41, 5).values, got.astype(np.float32))


def test_sparse_and_dense_solver_agree(monkeypatch):
    rng = np.random.default_rng(0)
    # a few tags that go together with the row, so that the components are well apart
    rows = rng.integers(0, 1500, 20_000)
    tags = np.where(rng.random(20_000) < 0.7, rows % 5 * (1 + rows % 3), rng.integers(0, 800, 20_000))
    from sklearn.decomposition import PCA

    used = []
    original = PCA.fit_transform
    monkeypatch.setattr(PCA, "fit_transform", lambda self, x: used.append(self.svd_solver) or original(self, x))
    sparse = tag_columns(rows, tags, 1500, 6).values
    monkeypatch.setattr("fedmpi.data.ratings.features._DENSE_CELLS", 10**9)
    dense = tag_columns(rows, tags, 1500, 6).values
    assert used == ["arpack", "full"]
    assert np.allclose(sparse, dense, atol=2e-4)


def test_fewer_directions_than_components_and_no_tags_at_all():
    few = tag_columns(np.array([0, 1, 1]), np.array([0, 0, 1]), 4, 6)
    assert few.values.shape == (4, 6) and not few.values[:, 2:].any() and few.values[:, 0].any()
    nothing = np.array([], dtype=np.int64)
    assert not tag_columns(nothing, nothing, 3, 2).values.any()
    assert tag_columns(np.array([0]), np.array([0]), 3, 0).values.shape == (3, 0)


def test_small_pieces():
    assert standardised("x", [3, 3, float("nan")]).values.ravel().tolist() == [0, 0, 0]
    assert standardised("x", [float("nan")] * 2).values.ravel().tolist() == [0, 0]
    joined = join(one_hot("a", [["q"], []], ["p", "q"]), standardised("y", [1, 3]))
    assert joined.names == ("a:p", "a:q", "y") and joined.values.tolist() == [[0, 1, -1], [0, 0, 1]]


# --- sources and downloads -------------------------------------------------------------------------------------------


def test_what_is_known():
    assert catalog.known() == ["generated", "lastfm", "ml-100k", "ml-10m", "ml-1m"]
    for name in FILE_SETS:
        source = catalog.get(name)
        assert source.archive == f"{ARCHIVES[name]}.zip" and source.terms and source.url in source.how_to_get
    for name in ("ml", None, ["ml-1m"]):
        with pytest.raises(ConfigError, match="must be one of generated, lastfm, ml-100k, ml-10m, ml-1m$"):
            catalog.get(name)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """ml-1m as if a small archive were the published one, and an empty cache."""
    archive = write_archive("ml-1m", tmp_path / "server")
    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path / "cache"))

    def publish(**changed):
        md5 = hashlib.md5(archive.read_bytes()).hexdigest()
        source = dataclasses.replace(catalog.get("ml-1m"), **{"url": archive.as_uri(), "md5": md5} | changed)
        monkeypatch.setitem(catalog._BY_NAME, "ml-1m", source)

    publish()
    return publish


def test_download_once(published, tmp_path, capsys):
    expected = load("ml-1m", tmp_path / "server")
    assert_equal(load("ml-1m", None), expected)
    assert "research use only" in capsys.readouterr().err
    # from now on from the cache
    (tmp_path / "server" / "ml-1m.zip").unlink()
    assert_equal(load("ml-1m", None), expected)
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in (tmp_path / "cache" / "downloads").iterdir()) == [".lock", "ml-1m.zip"]


def test_a_host_that_cannot_be_reached(published, tmp_path):
    published(url="http://127.0.0.1:9/datasets/ml-1m.zip")
    message = refused("ml-1m", None)
    assert message.startswith(f"ml-1m could not be downloaded into {tmp_path / 'cache' / 'downloads'} (")
    assert message.endswith(
        "download http://127.0.0.1:9/datasets/ml-1m.zip where you can, and give its folder as --data-dir"
    )


def test_a_download_that_is_not_the_published_one(published, tmp_path):
    published(md5="0" * 32)
    assert f"not the published {'0' * 32}" in refused("ml-1m", None)
    (tmp_path / "server" / "ml-1m.zip").write_bytes(b"<html>please log in</html>")
    published(md5=None)
    assert "what came is not a zip archive" in refused("ml-1m", None)
    assert [path.name for path in (tmp_path / "cache" / "downloads").iterdir()] == [".lock"]


# --- the official files ----------------------------------------------------------------------------------------------


def test_the_real_ml_100k():
    data = load("ml-100k", real_data("ml-100k"), complete=True)
    assert (len(data.values), len(data.user_ids), len(data.item_ids)) == (100_000, 943, 1_682)
    assert np.count_nonzero(np.bincount(data.items, minlength=1_682) == 1) == 141
    assert np.bincount(data.values.astype(int)).tolist() == [0, 6_110, 11_370, 27_145, 34_174, 21_201]
    assert data.item_features.values.shape == (1_682, 20) and data.user_features.values.shape == (943, 24)
    assert np.count_nonzero(data.item_features.values[:, -1] == 0) == 1, "one film has no year"
    assert data.item_features.values[0, :-1].sum() == 3  # Toy Story: Animation, Children's, Comedy


def test_the_real_lastfm():
    data = load("lastfm", real_data("lastfm"), complete=True)
    assert (len(data.values), len(data.user_ids), len(data.item_ids)) == (92_834, 1_892, 17_632)
    assert np.count_nonzero(np.bincount(data.items, minlength=17_632) == 1) == 10_679
    assert data.values.min() == 1 and data.values.max() == 352_698
    assert data.item_features.values.shape == (17_632, 20) and data.user_features.values.shape == (1_892, 20)
    spread = data.item_features.values.std(axis=0)
    assert (np.diff(spread) <= 1e-4).all() and spread[-1] > 0.01


@pytest.mark.parametrize("name, keep", [("ml-100k", 1_000_000), ("lastfm", 600_000)])
def test_a_real_file_that_was_cut_short(name, keep, tmp_path):
    source = catalog.get(name)
    root = tmp_path / FOLDERS[name]
    root.mkdir()
    for file in source.files:
        content = (source.find(real_data(name)).root / file).read_bytes()
        # at the end of a line, where nothing but the number of lines can tell
        cut = content.rindex(b"\n", 0, keep) + 1 if file == source.files[0] else len(content)
        (root / file).write_bytes(content[:cut])
    assert "cut short or changed" in refused(name, tmp_path)
