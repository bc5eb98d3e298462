"""The recovery and the ranking attack, the indicator and its bound: hand-computed cases, then properties."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.attacks.indicator import (
    bound_in_words,
    hypotheses_of,
    indicator,
    sample_bound,
    smallest_gap,
    within_assumption,
)
from fedmpi.attacks.parties import layout, reduce_by_party, shares_by_bin
from fedmpi.attacks.ranking import hit_ratios, ranking_table
from fedmpi.attacks.recovery import recovery_hits, recovery_table
from fedmpi.errors import ConfigError, DataError


@st.composite
def many_parties(draw):
    """Ratings from 1 to 5 and masked ratings, a few parties, some without any rating."""
    counts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    ratings = rng.integers(1, 6, offsets[-1]).astype(float)
    # Rounded, so that masked ratings tie as well.
    masked = np.round(
        ratings * rng.choice([-1.0, 0.0, 0.3, 1.0]) + rng.normal(size=ratings.size), draw(st.integers(0, 3))
    )
    return offsets, masked, ratings


# --- the layout ---


def test_parties_without_ratings_are_skipped_over():
    offsets = np.array([0, 0, 2, 2, 3, 3])
    assert reduce_by_party(np.add, offsets, np.array([1.0, 2.0, 5.0]), 0.0).tolist() == [0.0, 3.0, 0.0, 5.0, 0.0]
    assert reduce_by_party(np.add, np.array([0, 0]), np.array([]), 0.0).tolist() == [0.0]


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 2, 1], [0, 4]])
def test_offsets_that_do_not_fit_are_refused(offsets):
    with pytest.raises(DataError):
        layout(np.array(offsets), np.zeros(2))


def test_a_rate_at_an_edge_belongs_to_the_bin_above_and_one_to_the_last():
    hits, counts = np.array([0, 1, 2, 3, 4, 5, 0]), np.array([5, 5, 5, 5, 5, 5, 0])
    assert shares_by_bin(hits, counts) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 6, 2 / 6])
    assert np.isnan(shares_by_bin(np.array([0]), np.array([0]))).all()


# --- recovery ---


def recover(masked, lowest, highest):
    """One party's ratings as the attack guesses them, value by value: linear, the middle where there is no slope."""
    low, high = masked.min(), masked.max()
    shares = (masked - low) / (high - low) if high > low else np.full(masked.size, 0.5)
    return lowest * (1 - shares) + highest * shares


def hits_of_one(masked, ratings, **options):
    return recovery_hits(np.array([0, len(ratings)]), np.array(masked), np.array(ratings), **options)[:, 0].tolist()


def test_being_off_by_exactly_the_level_is_a_miss():
    # Stretched to 1 ... 5 the masked ratings are 1, 3, 5, 4: off by 0, 1, 0 and 3.
    masked, ratings = [-2.0, 0.0, 2.0, 1.0], [1.0, 2.0, 5.0, 1.0]
    assert hits_of_one(masked, ratings) == [2, 3, 3, 4, 4]
    assert hits_of_one(masked, ratings, levels=(2, 3), step=0.5) == [2, 3]
    # 0.1 + 0.2 is a little more than 0.3, and three steps of 0.1 are that as well: a miss all the same
    assert hits_of_one([0.0, 0.1 + 0.2, 1.0], [0.0, 0.0, 1.0], levels=(3,), step=0.1) == [2]
    assert hits_of_one([], []) == [0] * 5


def test_the_recovery_table_by_hand():
    # Party 0 hides nothing; party 1 has a constant left: the guess is 3 for 1, 2, 5, 5, 5; party 2 rated nothing.
    offsets = np.array([0, 3, 8, 8])
    ratings = np.array([1.0, 3.0, 5.0, 1.0, 2.0, 5.0, 5.0, 5.0])
    masked = np.array([-2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert recovery_hits(offsets, masked, ratings).tolist() == [[3, 0, 0], [3, 1, 0], [3, 5, 0], [3, 5, 0], [3, 5, 0]]
    table = recovery_table(offsets, masked, ratings, levels=(1, 2, 3))
    assert table.tolist() == [[0.5, 0, 0, 0, 0.5], [0, 0.5, 0, 0, 0.5], [0, 0, 0, 0, 1.0]]


def test_a_step_must_be_positive():
    with pytest.raises(ConfigError, match="rating step"):
        recovery_table(np.array([0, 1]), np.ones(1), np.ones(1), step=0.0)


@given(many_parties())
def test_the_table_is_what_each_party_alone_gives(parties):
    offsets, masked, ratings = parties
    hits = recovery_hits(offsets, masked, ratings, levels=(1, 2, 5))
    for u, (first, last) in enumerate(zip(offsets, offsets[1:])):
        own = ratings[first:last]
        if own.size:
            guess = recover(masked[first:last], own.min(), own.max())
            assert guess.min() >= own.min() and guess.max() <= own.max()
            assert hits[:, u].tolist() == [np.count_nonzero(np.abs(guess - own) < g - 1e-9) for g in (1, 2, 5)]
    assert np.all(np.diff(hits, axis=0) >= 0)


@given(many_parties(), st.floats(0.1, 10.0), st.floats(-5.0, 5.0))
def test_a_mask_that_only_scales_and_shifts_hides_nothing(parties, slope, shift):
    offsets, _, ratings = parties
    spread = reduce_by_party(np.maximum, offsets, ratings, 0.0) > reduce_by_party(np.minimum, offsets, ratings, 0.0)
    hits = recovery_hits(offsets, slope * ratings + shift, ratings, levels=(0.01,))[0]
    assert np.array_equal(hits[spread], np.diff(offsets)[spread])


# --- ranking ---


def test_the_ranking_table_by_hand():
    # Five items, h = 0.4: two places. Marked are items 0 and 1. Truly high are item 0 (5), and items 1, 2, 3 tie at 4.
    offsets, ratings = np.array([0, 5]), np.array([5.0, 4.0, 4.0, 4.0, 1.0])
    masked = np.array([0.9, 0.5, 0.1, 0.0, -1.0])
    inclusive = hit_ratios(offsets, masked, ratings, tops=(0.4,))
    assert inclusive.hit[0, 0] == 1.0 and inclusive.chance[0, 0] == pytest.approx(4 / 5)
    shared = hit_ratios(offsets, masked, ratings, tops=(0.4,), ties="random")
    assert shared.hit[0, 0] == pytest.approx((1 + 1 / 3) / 2) and shared.chance[0, 0] == pytest.approx(2 / 5)
    # The marked set ties too: item 0 for sure, one of items 1 and 4 for the second place.
    shared = hit_ratios(offsets, np.array([0.9, 0.5, 0.1, 0.0, 0.5]), ratings, tops=(0.4,))
    assert shared.hit[0, 0] == pytest.approx((1 + 1 / 2) / 2)
    table = ranking_table(offsets, -ratings, ratings, tops=(0.2, 1.0))
    assert table.hit.tolist() == [[1.0, 0, 0, 0, 0], [0, 0, 0, 0, 1.0]]
    assert table.mean_hit.tolist() == [0.0, 1.0] and table.mean_chance.tolist() == [0.2, 1.0]


def test_a_top_proportion_is_counted_without_the_rounding_of_floats():
    # 0.1 * 30 is 3.0000000000000004 as floats: three places, not four.
    ratings = np.arange(30.0)
    assert hit_ratios(np.array([0, 30]), ratings, ratings, tops=(0.1,)).chance[0, 0] == pytest.approx(3 / 30)


@pytest.mark.parametrize("wrong", [{"ties": "first"}, {"tops": (0.0,)}, {"tops": (1.5,)}])
def test_a_ranking_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError):
        hit_ratios(np.array([0, 1]), np.ones(1), np.ones(1), **wrong)


@given(many_parties())
def test_hit_ratios_keep_their_bounds(parties):
    offsets, masked, ratings = parties
    inclusive, shared = (hit_ratios(offsets, masked, ratings, ties=ties) for ties in ("inclusive", "random"))
    some = np.diff(offsets) > 0
    assert np.isnan(inclusive.hit[:, ~some]).all()
    for ratios in (inclusive, shared):
        assert np.all((ratios.hit[:, some] >= 0) & (ratios.hit[:, some] <= 1 + 1e-12))
    assert np.all(inclusive.hit[:, some] >= shared.hit[:, some] - 1e-12)
    assert np.all(inclusive.chance[:, some] >= np.array([0.1, 0.3, 0.5, 0.7, 0.9])[:, None] - 1e-12)
    # The true order always hits, and a constant mask is a ranking that knows nothing.
    assert np.allclose(hit_ratios(offsets, 2 * ratings - 7, ratings).hit[:, some], 1.0)
    blind = hit_ratios(offsets, np.zeros_like(ratings), ratings)
    assert np.allclose(blind.hit[:, some], blind.chance[:, some])


def test_the_shared_rule_is_the_mean_over_random_tie_breaks():
    rng = np.random.default_rng(5)
    ratings, masked = rng.integers(1, 4, 11).astype(float), rng.integers(0, 3, 11).astype(float)
    expected = hit_ratios(np.array([0, 11]), masked, ratings, tops=(0.3,), ties="random").hit[0, 0]
    draws = []
    for _ in range(4000):
        marked = np.lexsort((rng.random(11), -masked))[:4]
        high = np.lexsort((rng.random(11), -ratings))[:4]
        draws.append(np.intersect1d(marked, high).size / 4)
    assert np.mean(draws) == pytest.approx(expected, abs=0.02)


def test_a_million_ratings_take_a_moment():
    # A tenth of the largest data set; the bound is loose, a loop over ratings would be far beyond it.
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(20, 260, 7000))])
    ratings = rng.integers(1, 11, offsets[-1]) / 2
    masked = 0.3 * ratings + rng.normal(size=ratings.size)
    start = time.process_time()
    recovery = recovery_table(offsets, masked, ratings, step=0.5)
    ranking = ranking_table(offsets, masked, ratings)
    assert time.process_time() - start < 5.0
    assert np.allclose(recovery.sum(axis=1), 1.0) and np.allclose(ranking.hit.sum(axis=1), 1.0)
    assert np.all(ranking.mean_hit > ranking.mean_chance)


# --- the indicator ---


def test_the_indicator_is_a_mean_square_on_the_unit_scale():
    offsets, masked = np.array([0, 2, 2, 3]), np.array([1.0, -2.0, 4.0])
    assert indicator(offsets, masked)[[0, 2]].tolist() == [2.5, 16.0]
    scaled = indicator(offsets, masked, scale_range=(1, 5))
    assert scaled[[0, 2]].tolist() == [2.5 / 16, 1.0] and np.isnan(scaled[1])
    assert within_assumption(np.array([3.9, -4.1]), (1, 5)) == 0.5
    with pytest.raises(ConfigError, match="rating scale"):
        indicator(offsets, masked, scale_range=(5, 1))


def test_the_bound_by_hand():
    # log(2 * 10 / 0.05) = 5.99
    bound = sample_bound(10, 0.05, 0.1)
    assert (bound.uniform, bound.best) == (300, 1199)
    with pytest.raises(ConfigError, match="gap"):
        sample_bound(10, 0.05, 0.0)
    for wrong in ((0, 0.05), (10, 0.0), (10, 1.0)):
        with pytest.raises(ConfigError):
            sample_bound(*wrong, 0.1)


@given(st.integers(1, 10**6), st.integers(1, 10**30), st.floats(1e-6, 0.5))
def test_the_smallest_gap_is_the_bound_turned_round(n, hypotheses, delta):
    gap = smallest_gap(n, hypotheses, delta)
    assert abs(sample_bound(hypotheses, delta, gap).best - n) <= 1
    # Putting gap / 2 into MMF (18) gives MMF (23) without the misprint.
    assert sample_bound(hypotheses, delta, gap / 2).uniform == sample_bound(hypotheses, delta, gap).best


@settings(max_examples=20)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=4), st.integers(0, 1000))
def test_the_bound_holds_where_it_can_be_checked(levels, seed):
    # A class of constant models for a coin: with as many tosses as the bound asks for, the fitted one is near the best.
    gap, delta = 0.2, 0.05
    n = sample_bound(len(levels), delta, gap).best
    rng = np.random.default_rng(seed)
    models = np.array(levels)
    true = 0.7 * (1 - models) ** 2 + 0.3 * models**2
    failed = 0
    for _ in range(50):
        ones = rng.binomial(n, 0.7) / n
        fitted = np.argmin(ones * (1 - models) ** 2 + (1 - ones) * models**2)
        failed += true[fitted] > true.min() + gap
    assert failed <= 0.05 * 50 + 5


def test_a_class_of_floats_makes_the_bound_say_nothing():
    assert hypotheses_of(2) == 2**64
    assert smallest_gap(106, hypotheses_of(20_000), 0.05) > 90
    words = bound_in_words(106, 40)
    assert "vacuous" in words and "gap" in words and "epsilon" not in words and "ε" not in words
    assert "vacuous" not in bound_in_words(10**6, 40)
    assert math.isinf(smallest_gap(0, 10, 0.05))
    with pytest.raises(ConfigError):
        hypotheses_of(-1)
