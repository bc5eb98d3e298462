"""Who holds which samples: what every split promises, for any labels, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.data.images import partition
from fedmpi.data.images.spec import PartitionSpec
from fedmpi.data.prepared import keyed_rng
from fedmpi.errors import ConfigError, DataError

fast = settings(max_examples=80, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


@st.composite
def class_settings(draw: st.DrawFn) -> tuple[int, int, int]:
    num_classes = draw(st.integers(1, 20))
    return draw(st.integers(1, 30)), draw(st.integers(1, num_classes)), num_classes


def assert_disjoint(parts: list[np.ndarray]) -> None:
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)


@fast
@given(class_settings(), seeds)
def test_every_party_has_exactly_s_classes_and_classes_are_used_evenly(setting, seed):
    parties, s, num_classes = setting
    assignment = partition.assign_classes(parties, s, num_classes, generator(seed))
    assert len(assignment) == parties
    for held in assignment:
        assert len(held) == len(set(held)) == s and held == tuple(sorted(held))
    use = np.bincount(np.concatenate(assignment), minlength=num_classes)
    assert len(use) == num_classes
    assert use.max() - use.min() <= 1
    assert parties * s < num_classes or use.min() >= 1
    assert assignment == partition.assign_classes(parties, s, num_classes, generator(seed))


@fast
@given(class_settings(), seeds, st.data())
def test_split_by_classes_is_even_and_covers_the_classes_held(setting, seed, data):
    parties, s, num_classes = setting
    assignment = partition.assign_classes(parties, s, num_classes, generator(seed))
    holders = np.bincount(np.concatenate(assignment), minlength=num_classes)
    sizes = [data.draw(st.integers(int(n), int(n) + 40)) for n in holders]
    labels = generator(seed).permutation(np.repeat(np.arange(num_classes), sizes))
    parts = partition.split_by_classes(labels, assignment, generator(seed + 1))
    assert_disjoint(parts)
    for held, part in zip(assignment, parts):
        assert tuple(np.unique(labels[part])) == held
    for c in range(num_classes):
        shares = [np.count_nonzero(labels[part] == c) for held, part in zip(assignment, parts) if c in held]
        if shares:
            assert max(shares) - min(shares) <= 1
            assert sum(shares) == sizes[c]
    again = partition.split_by_classes(labels, assignment, generator(seed + 1))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again))


def test_another_generator_deals_otherwise():
    assert partition.assign_classes(20, 2, 10, generator(0)) != partition.assign_classes(20, 2, 10, generator(1))


@pytest.mark.parametrize("s", [0, -1, 11])
def test_impossible_number_of_classes_per_party(s):
    with pytest.raises(ConfigError, match=f"^classes_per_party = {s}: must be 1 to 10, the number of classes$"):
        partition.assign_classes(5, s, 10, generator(0))


def test_no_parties():
    with pytest.raises(ConfigError, match="^parties = 0: must be at least 1$"):
        partition.assign_classes(0, 1, 10, generator(0))


def test_more_holders_than_samples_of_a_class():
    with pytest.raises(DataError, match="^class 1 has 2 samples for 3 parties: use fewer parties or a smaller"):
        partition.split_by_classes(np.array([0, 0, 0, 1, 1]), [(0, 1)] * 3, generator(0))


@fast
@given(st.integers(0, 5000), st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_apportion_adds_up_and_stays_within_one_of_the_share(total, weights):
    weights = np.array(weights) + np.eye(len(weights))[0] * 1e-3
    shares = weights / weights.sum()
    counts = partition.apportion(total, shares)
    assert counts.sum() == total
    assert np.all(np.abs(counts - total * shares) < 1 + 1e-6)
    assert np.all(counts[shares == 0] == 0)


@fast
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.05, 100), seeds)
def test_split_by_proportions_covers_everything_once(num_classes, parties, alpha, seed):
    labels = generator(seed).integers(0, num_classes, size=300)
    proportions = partition.dirichlet_proportions(num_classes, parties, alpha, generator(seed))
    assert proportions.shape == (num_classes, parties)
    assert np.allclose(proportions.sum(axis=1), 1)
    parts = partition.split_by_proportions(labels, proportions, generator(seed))
    assert len(parts) == parties
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(300))
    again = partition.split_by_proportions(labels, proportions, generator(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again))


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 10), seeds)
def test_drawn_proportions_keep_the_minimum_and_never_test_an_unknown_class(alpha, seed):
    labels = generator(seed).integers(0, 10, size=2000)
    test_labels = generator(seed + 1).integers(0, 10, size=400)
    proportions = partition.draw_proportions(labels, 10, 8, alpha, 10, generator(seed), test_labels)
    train = partition.split_by_proportions(labels, proportions, generator(seed))
    test = partition.split_by_proportions(test_labels, proportions, generator(seed))
    assert min(len(part) for part in train) >= 10
    assert min(len(part) for part in test) >= 1
    for ours, theirs in zip(train, test):
        assert set(test_labels[theirs]) <= set(labels[ours])
    assert sum(len(part) for part in test) == 400


def test_a_class_without_training_samples_gets_no_test_samples_however_many_there_are():
    labels, test_labels = generator(0).integers(0, 10, size=200), generator(1).integers(0, 10, size=20_000)
    proportions = partition.draw_proportions(labels, 10, 8, 0.5, 5, generator(2), test_labels)
    counts = partition.counts_by_proportions(np.bincount(labels), proportions)
    test_counts = partition.counts_by_proportions(np.bincount(test_labels), proportions)
    assert np.any(counts == 0) and counts.max() > 10, "the draw is meant to be uneven"
    assert np.array_equal(counts > 0, test_counts > 0)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_every_party_gets_one_of_the_few_test_samples(seed):
    labels, test_labels = np.repeat(np.arange(4), 100), np.repeat(np.arange(4), 4)
    proportions = partition.draw_proportions(labels, 4, 6, 1.0, 10, generator(seed), test_labels)
    parts = partition.split_by_proportions(test_labels, proportions, generator(seed))
    assert min(len(part) for part in parts) >= 1


def test_small_alpha_is_more_uneven_than_large():
    def spread(alpha):
        return partition.dirichlet_proportions(200, 10, alpha, generator(0)).std()

    assert spread(0.1) > 2 * spread(1) > 4 * spread(100)


def test_alpha_too_small_for_the_minimum_gives_up(monkeypatch):
    monkeypatch.setattr(partition, "MAX_TRIES", 5)
    labels = np.repeat(np.arange(2), 100)
    with pytest.raises(DataError, match="^alpha = 0.001 .* 20 parties below 5 samples .* use a larger alpha or fewer"):
        partition.draw_proportions(labels, 2, 20, 0.001, 5, generator(0))


def test_minimum_beyond_the_data_is_refused_before_drawing():
    with pytest.raises(DataError, match="^200 samples cannot give 30 parties 10 each: use at most 20 parties$"):
        partition.draw_proportions(np.repeat(np.arange(2), 100), 2, 30, 1.0, 10, generator(0))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_alpha(alpha):
    with pytest.raises(ConfigError, match="^alpha = .*: must be a finite number above 0$"):
        partition.dirichlet_proportions(10, 5, alpha, generator(0))


def test_a_class_that_nobody_has_a_share_of():
    with pytest.raises(DataError, match="^class 1 has 2 samples but no party has a share of it$"):
        partition.split_by_proportions(np.array([0, 1, 1]), np.array([[0.5, 0.5], [0, 0]]), generator(0))


@fast
@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.floats(0.01, 0.99), seeds)
def test_hold_out_leaves_both_sides_of_every_class_that_has_two(labels, fraction, seed):
    labels = np.array(labels)
    marked = partition.hold_out(labels, fraction, generator(seed))
    for c in np.unique(labels):
        total, held = np.count_nonzero(labels == c), np.count_nonzero(marked[labels == c])
        if total == 1:
            assert held == 0
        else:
            assert 1 <= held < total
            assert abs(held - fraction * total) <= 1


@fast
@given(st.lists(st.integers(0, 5), min_size=1, max_size=80), st.integers(1, 100), seeds)
def test_thin_out_keeps_the_number_and_the_classes(labels, keep, seed):
    labels = np.array(labels)
    kept = partition.thin_out(labels, keep, generator(seed))
    assert len(np.unique(kept)) == len(kept) == min(keep, len(labels))
    assert np.array_equal(kept, np.sort(kept))
    if keep >= len(np.unique(labels)):
        assert set(labels[kept]) == set(labels)
    assert np.array_equal(kept, partition.thin_out(labels, keep, generator(seed)))


def test_thin_out_keeps_the_proportions():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    kept = np.bincount(labels[partition.thin_out(labels, 100, generator(0))])
    assert np.all(np.abs(kept - [60, 30, 10]) <= 2)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"dataset": "imagenet"}, "dataset = 'imagenet': must be one of "),
        ({"parties": 0}, "parties = 0: must be at least 1"),
        ({"parties": 2.5}, "parties = 2.5: must be a whole number"),
        ({"seed": "x"}, "seed = 'x': must be a whole number"),
        ({"classes_per_party": 11}, "classes_per_party = 11: must be 1 to 10, the number of classes"),
        ({"classes_per_party": 0}, "classes_per_party = 0: must be 1 to 10"),
        ({"scheme": "iid"}, "scheme = 'iid': must be one of classes, drawn, dirichlet, writers"),
        ({"scheme": "writers"}, "partition = writers: digits does not say who wrote what"),
        ({"scheme": "dirichlet", "alpha": 0}, "alpha = 0: must be a finite number above 0"),
        ({"alpha": None}, "alpha = None: must be a number"),
        ({"test_fraction": 1.0}, "test_fraction = 1.0: must lie between 0 and 1"),
        ({"validation_fraction": 1}, "validation_fraction = 1: must be 0 (none) or lie below 1"),
        ({"validation_fraction": "x"}, "validation_fraction = 'x': must be a number"),
        ({"shrink": 0}, "shrink = 0: must be 1 (not at all) or more"),
        ({"samples_per_party": -1}, "samples_per_party = -1: must be 0 (all) or at least 2"),
        ({"test_samples_per_party": 1}, "test_samples_per_party = 1: must be 0 (in proportion) or at least 2"),
        ({"samples_per_party": 1}, "samples_per_party = 1: must be 0 (all) or at least 2"),
    ],
)
def test_impossible_settings_are_named(setting, message):
    with pytest.raises(ConfigError) as caught:
        PartitionSpec(**{"dataset": "digits", "parties": 5, **setting})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_draws_for_different_purposes_are_independent():
    draws = {keyed_rng(*key).integers(2**63) for key in [(0, "train"), (0, "test"), (1, "train"), (0, "train", 1)]}
    assert len(draws) == 4
    assert keyed_rng(0, "train").integers(2**63) == keyed_rng(0, "train").integers(2**63)
