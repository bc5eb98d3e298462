"""Which party trains on which rating, and the generated set whose best possible error is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rating_files import real_data

from fedmpi.data.ratings import catalog, generated
from fedmpi.data.ratings.features import Features
from fedmpi.data.ratings.source import RatingSet
from fedmpi.data.ratings.spec import RatingSpec, deal
from fedmpi.data.ratings.split import TEST, TRAIN, VALIDATION, bin_counts, split
from fedmpi.errors import ConfigError, DataError


def toy(counts: list[int], num_items: int = 50, name: str = "ml-1m", seed: int = 0) -> RatingSet:
    """Users with so many ratings each; every value tells which rating it is."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    items = np.concatenate([np.sort(rng.permutation(num_items)[:count]) for count in counts]).astype(np.int32)
    none = Features((), np.zeros((len(counts), 0), dtype=np.float32))
    values = np.arange(1, len(users) + 1, dtype=np.float32)
    ids = np.arange(len(counts), dtype=np.int64), np.arange(num_items, dtype=np.int64)
    scale = catalog.get(name).scale
    return RatingSet(scale, users, items, values, *ids, none, Features((), np.zeros((num_items, 0), np.float32)))


def of_user(shares, data: RatingSet) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """The items of each user on both sides of the split."""
    return tuple(
        {
            int(user): set(part.items[part.offsets[party] : part.offsets[party + 1]].tolist())
            for party, user in enumerate(shares.users)
        }
        for part in (shares.train, shares.test)
    )


# --- settings --------------------------------------------------------------------------------------------------------

BAD_SETTINGS = [
    (dict(dataset="ml-2m"), "dataset = 'ml-2m': must be one of generated, "),
    (dict(parties=-1), "parties = -1: must not be negative"),
    (dict(parties=2.0), "parties = 2.0: must be a whole number"),
    (dict(parties=True), "parties = True: must be a whole number"),
    (dict(seed="x"), "seed = 'x': must be a whole number"),
    (dict(test_fraction=0), "test_fraction = 0: must lie between 0 and 1"),
    (dict(test_fraction=1.0), "test_fraction = 1.0: must lie between 0 and 1"),
    (dict(test_fraction=float("nan")), "test_fraction = nan: must lie between 0 and 1"),
    (dict(test_fraction="0.2"), "test_fraction = '0.2': must be a number"),
    (dict(validation_fraction=1), "validation_fraction = 1: must be 0 (none) or lie below 1"),
    (dict(tag_components=-1), "tag_components = -1: must not be negative"),
    (dict(complete="yes"), "complete = 'yes': must be true, false or none"),
    (dict(dataset="generated", noise=-0.1), "noise = -0.1: must be at least 0"),
    (dict(dataset="generated", noise=float("inf")), "noise = inf: must be at least 0"),
    (dict(dataset="generated", items=4), "items = 4: must be at least 5"),
    (
        dict(dataset="generated", parties=10, ratings=49),
        "ratings = 49: must be 50 to 3000, 5 to 300 for each of 10 users",
    ),
    (dict(dataset="generated", parties=10, items=10, ratings=101), "ratings = 101: must be 50 to 100"),
]


@pytest.mark.parametrize("settings, message", BAD_SETTINGS)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ConfigError) as caught:
        RatingSpec(**{"dataset": "ml-1m"} | settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_settings_that_have_an_effect():
    spec = RatingSpec(dataset="ml-1m")
    same = dataclasses.replace(spec, items=7, noise=3.0, rank=1, ratings=3, data_seed=4, tag_components=3, data_dir="x")
    assert same.canonical() == spec.canonical()
    assert RatingSpec(dataset="ml-10m", tag_components=3).canonical() != RatingSpec(dataset="ml-10m").canonical()
    drawn = RatingSpec(dataset="generated")
    assert drawn.canonical() == RatingSpec(dataset="generated", parties=200, ratings=12_000).canonical()
    assert drawn.canonical() == dataclasses.replace(drawn, tag_components=3, data_dir="x").canonical()
    for other in (dict(items=301), dict(rank=5), dict(noise=0.4), dict(data_seed=1), dict(ratings=12_001)):
        assert dataclasses.replace(drawn, **other).canonical() != drawn.canonical()


# --- the split -------------------------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    test=st.floats(0.01, 0.99),
    validation=st.sampled_from([0.0, 0.1, 0.5, 0.95]),
    seed=st.integers(0, 2**32),
)
def test_every_rating_is_on_one_side_and_every_user_trains(counts, test, validation, seed):
    users = np.repeat(np.arange(len(counts)), counts)
    parts, rescued = split(users, len(counts), test, validation, seed)
    assert set(np.unique(parts)) <= {TRAIN, VALIDATION, TEST}
    assert (np.bincount(users[parts == TRAIN], minlength=len(counts)) >= 1).all()
    # the fractions hold exactly, but for the ratings that went back
    expected = round(test * len(users))
    assert expected - rescued.sum() <= np.count_nonzero(parts == TEST) <= expected
    if not validation:
        assert np.count_nonzero(parts == TEST) == expected - rescued.sum()
        assert (np.bincount(users[parts == TRAIN], minlength=len(counts))[rescued] == 1).all()
    again, _ = split(users, len(counts), test, validation, seed)
    assert np.array_equal(parts, again)
    # looking at validation ratings changes no test rating
    plain, _ = split(users, len(counts), test, 0.0, seed)
    assert np.array_equal(parts == TEST, plain == TEST)


def test_a_user_with_one_rating_keeps_it_for_training():
    parts, rescued = split(np.arange(200), 200, 0.5, 0.0, 0)
    assert (parts == TRAIN).all() and rescued.sum() == 100


def test_the_draw_is_uniform():
    users = np.repeat(np.arange(100), 100)
    hits = sum(split(users, 100, 0.2, 0.25, seed)[0][:, None] == np.arange(3) for seed in range(40)) / 40
    assert np.allclose(hits.mean(axis=0), [0.6, 0.2, 0.2], atol=1e-9)
    # each rating's own frequency over the seeds: as far from 0.2 as 40 coins are
    assert abs(hits[:, TEST].std() - np.sqrt(0.2 * 0.8 / 40)) < 0.003


@pytest.mark.parametrize("validation", [0.0, 0.1])
def test_a_rating_is_on_the_same_side_whatever_the_number_of_parties(validation):
    data = toy([1, 2, 3, 40, 20, 10, 5, 8, 13, 21] * 3)
    spec = RatingSpec(dataset="ml-1m", validation_fraction=validation, seed=3)
    full = deal(spec, data)
    full_train, full_test = of_user(full, data)
    chosen: set[int] = set()
    for parties in (2, 7, 29, 30):
        shares = deal(dataclasses.replace(spec, parties=parties), data)
        train, test = of_user(shares, data)
        assert len(shares.users) == parties and (np.diff(shares.users) > 0).all()
        assert all(train[user] == full_train[user] and test[user] == full_test[user] for user in train)
        assert chosen <= set(train), "a user of a smaller run is missing from a larger one"
        chosen = set(train)
        assert shares.rescued <= full.rescued
    assert set(full_train) == set(range(30))


def test_values_go_with_their_ratings():
    data = toy([4, 9, 30])
    value = {(u, i): v for u, i, v in zip(data.users.tolist(), data.items.tolist(), data.values.tolist())}
    shares = deal(RatingSpec(dataset="ml-1m", parties=2), data)
    for part in (shares.train, shares.test):
        for party, user in enumerate(shares.users.tolist()):
            for row in range(part.offsets[party], part.offsets[party + 1]):
                assert value[user, int(part.items[row])] == part.values[row]


def test_with_validation_the_test_ratings_are_nowhere():
    data = toy([30] * 20)
    tested = deal(RatingSpec(dataset="ml-1m"), data)
    tuned = deal(RatingSpec(dataset="ml-1m", validation_fraction=0.1), data)
    seen = set(tuned.train.values.tolist()) | set(tuned.test.values.tolist())
    assert seen == set(tested.train.values.tolist())
    assert len(tested.test.values) == 120 and len(tuned.test.values) == 48


def test_seeds_differ_in_split_and_users():
    data = toy([30] * 20)
    dealt = [deal(RatingSpec(dataset="ml-1m", parties=10, seed=seed), data) for seed in range(2)]
    assert set(dealt[0].users.tolist()) != set(dealt[1].users.tolist())
    assert set(dealt[0].test.values.tolist()) != set(dealt[1].test.values.tolist())


def test_more_parties_than_users_and_nothing_to_test():
    with pytest.raises(ConfigError, match="^parties = 4: ml-1m has 3 users with ratings$"):
        deal(RatingSpec(dataset="ml-1m", parties=4), toy([4, 9, 30]))
    with pytest.raises(DataError, match="^ml-1m: no test ratings for 3 parties: use more parties$"):
        deal(RatingSpec(dataset="ml-1m"), toy([1, 1, 1]))


# --- listening counts ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.data())
def test_bins_follow_their_rule(raw, data):
    counts = np.array(raw, dtype=np.float32)
    train = np.array(data.draw(st.lists(st.booleans(), min_size=len(raw), max_size=len(raw))))
    train[0] = True
    ratings, edges = bin_counts(counts, train)
    known = sorted(counts[train].tolist())
    for j, edge in enumerate(edges, 1):
        # the smallest training count that at least j fifths do not exceed
        assert edge == min(c for c in known if 5 * sum(k <= c for k in known) >= j * len(known))
    assert ratings.tolist() == [1 + sum(edge < count for edge in edges) for count in raw]
    # test counts have no say
    other = np.where(train, counts, 61 - counts)
    assert bin_counts(other, train)[1] == edges
    assert np.array_equal(bin_counts(other, train)[0][train], ratings[train])


def test_distinct_counts_fall_into_fifths():
    ratings, edges = bin_counts(np.arange(1, 101, dtype=np.float32), np.ones(100, dtype=bool))
    assert edges == [20, 40, 60, 80] and np.bincount(ratings.astype(int)).tolist() == [0, 20, 20, 20, 20, 20]


def test_lastfm_edges_come_from_training_ratings_of_all_users():
    data = toy([20] * 30, name="lastfm")
    shares = deal(RatingSpec(dataset="lastfm"), data)
    assert set(shares.train.values.tolist()) == set(shares.test.values.tolist()) == {1, 2, 3, 4, 5}
    few = deal(RatingSpec(dataset="lastfm", parties=3), data)
    assert few.edges == shares.edges
    # another count of a test rating: other test ratings, but the same edges and training ratings
    parts, _ = split(data.users, 30, 0.2, 0.0, 0)
    changed = dataclasses.replace(data, values=np.where(parts == TEST, 1e6, data.values).astype(np.float32))
    after = deal(RatingSpec(dataset="lastfm"), changed)
    assert after.edges == shares.edges and np.array_equal(after.train.values, shares.train.values)
    assert (after.test.values == 5).all()


def test_the_real_lastfm_bins():
    spec = RatingSpec(dataset="lastfm", data_dir=real_data("lastfm"), tag_components=0)
    shares = deal(spec, spec.load())
    share = np.bincount(shares.train.values.astype(int), minlength=6)[1:] / len(shares.train.values)
    assert np.allclose(share, 0.2, atol=0.005)
    # users differ strongly: a user's own mean beats the overall mean by far
    party = np.repeat(np.arange(1_892), np.diff(shares.train.offsets))
    mean = np.bincount(party, shares.train.values) / np.bincount(party)
    tested = np.repeat(np.arange(1_892), np.diff(shares.test.offsets))
    assert np.sqrt(np.mean((shares.test.values - mean[tested]) ** 2)) < 0.9 < 1.4 < shares.test.values.std()


# --- generated -------------------------------------------------------------------------------------------------------


def drawn(**settings) -> RatingSet:
    return RatingSpec(dataset="generated", **settings).load()


@pytest.mark.parametrize(
    "settings, total",
    [
        ({}, 12_000),
        (dict(parties=3, items=5), 15),
        (dict(parties=7, items=20, ratings=100), 100),
        (dict(parties=300, items=40, ratings=9_999), 9_999),
        (dict(parties=30, items=40, ratings=1_199), 1_199),
    ],
)
def test_generated_numbers_are_exact_and_no_pair_occurs_twice(settings, total):
    data = drawn(**settings)
    users, items = settings.get("parties", 200), settings.get("items", 300)
    counts = np.bincount(data.users, minlength=users)
    assert len(data.users) == len(data.items) == len(data.values) == total == counts.sum()
    assert len(counts) == users and counts.min() >= 5 and counts.max() <= items
    pair = data.users.astype(np.int64) * items + data.items
    assert (np.diff(pair) > 0).all()
    assert 0 <= data.items.min() and data.items.max() < items
    assert set(np.unique(data.values)) <= {1, 2, 3, 4, 5}
    assert data.user_features.values.shape[0] == users and data.item_features.values.shape[0] == items


def test_generated_users_and_items_have_long_tails():
    data = drawn(parties=1_000, items=500, ratings=60_000)
    by_user, by_item = np.sort(np.bincount(data.users)), np.sort(np.bincount(data.items, minlength=500))
    assert by_user[-10:].mean() > 4 * np.median(by_user)
    assert by_item[-10:].mean() > 4 * np.median(by_item)


def test_items_are_drawn_in_proportion_to_their_popularity():
    rng = np.random.default_rng(0)
    popularity = np.array([1.0, 2.0, 3.0, 4.0])
    first = [generated._choose(popularity, 1, rng)[0] for _ in range(20_000)]
    assert np.allclose(np.bincount(first) / 20_000, popularity / 10, atol=0.015)


def test_the_data_seed_draws_and_the_seed_splits():
    one, same, other = drawn(seed=0), drawn(seed=1), drawn(data_seed=1)
    for field in ("users", "items", "values", "expected"):
        assert np.array_equal(getattr(one, field), getattr(same, field))
    assert not np.array_equal(one.values, other.values)
    a, b = (deal(RatingSpec(dataset="generated", seed=seed), one) for seed in (0, 1))
    assert a.optimum_rmse != b.optimum_rmse


def test_the_best_possible_error_is_that_of_noise_and_rounding():
    # narrow noise, but wide against a step: rounding adds a uniform error, clipping hardly occurs in the middle
    spec = RatingSpec(dataset="generated", parties=2_000, items=400, ratings=120_000, noise=0.5)
    data = spec.load()
    middle = np.abs(data.expected - 3) < 0.5
    error = np.sqrt(np.mean((data.values - data.expected)[middle] ** 2))
    assert abs(error - np.sqrt(0.5**2 + 1 / 12)) < 0.01
    shares = deal(spec, data)
    # clipping at the ends makes ratings there easier
    assert 0.9 * error < shares.optimum_rmse < error
    # it is the mean: no shift or stretch of it predicts better
    centred, residual = data.expected - 3, data.values - data.expected
    assert abs(residual.mean()) < 0.005 and abs(np.mean(residual * centred)) < 0.005


def test_without_noise_the_expectation_is_the_rating():
    data = drawn(noise=0.0)
    assert np.array_equal(data.values, data.expected)
    assert deal(RatingSpec(dataset="generated", noise=0.0), data).optimum_rmse == 0


def test_there_is_something_to_learn():
    """Users' means, items' means and the genres each explain part of the ratings; the hidden factors the rest."""
    data = drawn(parties=500, items=200, ratings=40_000)
    spread = data.values.std()
    user_mean = np.bincount(data.users, data.values) / np.bincount(data.users)
    residual = data.values - user_mean[data.users]
    item_mean = np.bincount(data.items, residual) / np.bincount(data.items)
    both = (residual - item_mean[data.items]).std()
    best = (data.values - data.expected).std()
    assert best < 0.8 * both < 0.8 * residual.std() < 0.8 * spread


def test_rank_zero():
    assert len(drawn(rank=0).values) == 12_000
