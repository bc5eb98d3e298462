"""The gradient leak: parties of a factorisation that really runs, seen by a server that only looks."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.attacks.gradient_leak import (
    Leak,
    Observation,
    Undetermined,
    exactly_recovered,
    factor_direction,
    leak,
    place_on_grid,
)
from fedmpi.attacks.sums import exposure_by_raters, leak_from_sum
from fedmpi.errors import DataError

pytestmark = pytest.mark.slow

GRID = np.arange(1.0, 6.0)
LAMBDA = 0.05
K = 20
QUANTUM = 16 * 2.0**-20  # fixed point over [-8, 8] in 20 bits


@dataclass
class Run:
    """What the server saw, by party and by round, and apart from it the truth."""

    observed: list  # [party][round] -> Observation
    sums: list  # [round] -> Observation over all items
    items: list
    ratings: list
    masked: list
    counts: np.ndarray


def train(
    local="step", bias=False, quantum=QUANTUM, mask=None, rounds=2, before=3, parties=24, items=150, lonely=0, seed=0
):
    """Federated matrix factorisation, MMF (5) to (7), `before` rounds unobserved, with Adam on the server. `local` is
    one descent step, five, or an exact ridge solution. With `lonely`, party u alone rates as many more items."""
    rng = np.random.default_rng(seed)
    tastes, kinds = rng.normal(size=(parties, 3)), rng.normal(size=(items + lonely * parties, 3))
    own = []
    for u in range(parties):
        common = rng.choice(items, rng.integers(20, 50), replace=False)
        own.append(np.sort(np.concatenate([common, items + lonely * u + np.arange(lonely)])).astype(np.int64))
    items += lonely * parties
    ratings = [
        np.clip(np.rint(3.5 + 0.6 * kinds[i] @ tastes[u] + 0.6 * rng.normal(size=i.size)), 1, 5)
        for u, i in enumerate(own)
    ]
    used = [r - mask(i, r) for i, r in zip(own, ratings)] if mask else ratings
    q, p = 0.1 * rng.normal(size=(items, K)), 0.1 * rng.normal(size=(parties, K))
    if bias:
        p[:, 0] = 1.0
    free = slice(1, None) if bias else slice(None)
    first, second = np.zeros_like(q), np.zeros_like(q)
    observed, sums = [[] for _ in range(parties)], []
    for t in range(before + rounds):
        total = np.zeros_like(q)
        for u, (i, r) in enumerate(zip(own, used)):
            rows = q[i]
            if local == "ridge":
                rest = r - rows[:, 0] if bias else r
                gram = rows[:, free].T @ rows[:, free] + LAMBDA * np.eye(rows[:, free].shape[1])
                p[u, free] = np.linalg.solve(gram, rows[:, free].T @ rest)
            for _ in range({"step": 1, "steps": 5, "ridge": 0}[local]):
                slope = LAMBDA * p[u] - (r - rows @ p[u]) @ rows
                p[u, free] -= 0.05 * slope[free]
            eta = LAMBDA * rows - np.outer(r - rows @ p[u], p[u])
            if quantum:
                eta = np.rint(eta / quantum) * quantum
            total[i] += eta
            if t >= before:
                observed[u].append(Observation(rows.copy(), eta))
        if t >= before:
            sums.append(Observation(q.copy(), total.copy()))
        first, second = 0.9 * first + 0.1 * total, 0.99 * second + 0.01 * total**2
        q = q - 0.02 * (first / (1 - 0.9 ** (t + 1))) / (np.sqrt(second / (1 - 0.99 ** (t + 1))) + 1e-8)
    counts = np.bincount(np.concatenate(own), minlength=items)
    return Run(observed, sums, own, ratings, used, counts)


def share(run, truth, rounds=2, tolerance=0.5, **options):
    """Over all ratings of all parties; a party that is undetermined counts as not recovered."""
    found, total = 0.0, 0
    for observations, ratings in zip(run.observed, truth):
        total += ratings.size
        try:
            got = leak(observations[:rounds], LAMBDA, **{k: v for k, v in options.items() if k != "either_sign"})
        except Undetermined:
            continue
        found += ratings.size * exactly_recovered(got, ratings, tolerance, options.get("either_sign", False))
    return found / total


# --- one party, plain FedMF ---


@pytest.mark.parametrize("quantum", [0.0, QUANTUM, 16 * QUANTUM])
@pytest.mark.parametrize("local", ["step", "steps", "ridge"])
def test_two_rounds_give_every_rating_away(local, quantum):
    run = train(local, quantum=quantum)
    assert share(run, run.ratings) >= 0.95
    assert share(run, run.ratings, grid=GRID) >= 0.95


@pytest.mark.parametrize("local", ["step", "ridge"])
def test_one_round_is_enough_for_whoever_knows_the_scale_of_ratings(local):
    run = train(local)
    assert share(run, run.ratings, rounds=1, grid=GRID) >= 0.95


@pytest.mark.parametrize("local", ["step", "ridge"])
def test_a_run_that_has_come_to_rest_is_read_with_the_grid(local):
    # Predictions move by less than 1e-4 from one round to the next: for two rounds alone, rounding hides the scale.
    run = train(local, before=200, parties=8, items=60)
    assert share(run, run.ratings) < 0.9
    assert share(run, run.ratings, grid=GRID) >= 0.95
    assert share(run, run.ratings, rounds=1, grid=GRID) >= 0.95
    exact = train(local, before=200, parties=8, items=60, quantum=0.0)
    assert share(exact, exact.ratings) >= 0.95


def test_more_rounds_say_it_more_precisely():
    run = train("step", quantum=64 * QUANTUM, rounds=4, before=0)
    errors = [np.mean([leak(o[:rounds], LAMBDA).scale_error for o in run.observed]) for rounds in (2, 4)]
    assert errors[1] < errors[0]
    assert share(run, run.ratings, rounds=4) >= 0.95


def test_the_leak_also_finds_the_factors_and_says_how_sure_it_is():
    run = train("step", quantum=0.0)
    got = leak(run.observed[0], LAMBDA)
    assert isinstance(got, Leak) and got.factors.shape == (2, K) and not got.sign_known
    assert np.abs(got.ratings - run.ratings[0]).max() < 1e-6
    for seen, p in zip(run.observed[0], got.factors):
        assert np.allclose(
            LAMBDA * seen.q_rows - np.outer(run.ratings[0] - seen.q_rows @ p, p), seen.gradients, atol=1e-6
        )
    assert got.residual < 1e-6 and got.scale_error < 1e-6 and np.isnan(got.misfit)


# --- a bias column ---


def test_a_fixed_coordinate_gives_everything_in_one_round():
    for local in ("step", "ridge"):
        run = train(local, bias=True)
        assert share(run, run.ratings, rounds=1, fixed={0: 1.0}) == 1.0
        assert share(run, run.ratings, fixed={0: 1.0}) == 1.0


def test_a_fixed_coordinate_needs_no_other_rating():
    run = train("step", bias=True)
    for observations, ratings in zip(run.observed, run.ratings):
        one = [Observation(o.q_rows[:1], o.gradients[:1]) for o in observations[:1]]
        assert abs(leak(one, LAMBDA, fixed={0: 1.0}).ratings[0] - ratings[0]) < 0.5


def test_a_bias_of_the_party_hides_whole_steps_at_most():
    # Column 1 of Q is all ones and not trained: nobody sees a gradient of the party's own bias beside it.
    rng = np.random.default_rng(2)
    right = []
    for top in (5, 4):
        ratings = np.concatenate([rng.integers(1, top + 1, 30), [top]]).astype(float)
        q, p = rng.normal(size=(31, 6)), np.array([1.0, *rng.normal(size=5)])
        seen = Observation(q, np.rint((LAMBDA * q - np.outer(ratings - q @ p - 0.37, p)) / QUANTUM) * QUANTUM)
        found = leak([seen], LAMBDA, fixed={0: 1.0}).ratings
        assert np.allclose(found - found.mean(), ratings - ratings.mean(), atol=1e-3)
        right.append(place_on_grid(found, GRID) - ratings)
    assert np.allclose(right[0], 0.0, atol=1e-3) and np.allclose(right[1], 1.0, atol=1e-3)
    with pytest.raises(DataError, match="evenly"):
        place_on_grid(np.ones(3), np.array([1.0, 2.0, 4.0]))


# --- masked ratings ---


ATTRIBUTES = np.random.default_rng(99).normal(size=(1000, 15))


def private_model(items, ratings, shrink_constant=0.0):
    """A ridge regression on 15 made-up attributes of the items and a constant: fits, but not perfectly."""
    attributes = np.column_stack([np.ones(items.size), ATTRIBUTES[items]])
    penalty = np.diag([shrink_constant] + [0.1] * 15)
    return attributes @ np.linalg.solve(attributes.T @ attributes + penalty, attributes.T @ ratings)


@pytest.mark.parametrize("local", ["step", "ridge"])
def test_masked_gradients_give_the_masked_ratings_and_no_more(local):
    run = train(local, mask=private_model)
    # To a twentieth of a step, if the observer could tell the sign...
    assert share(run, run.masked, tolerance=0.05, either_sign=True) >= 0.95
    # ... which it cannot, and the ratings themselves stay where they were.
    assert 0.2 < share(run, run.masked, tolerance=0.05) < 0.8
    guess_of_the_mean = np.mean([np.mean(np.abs(r - r.mean()) < 0.5) for r in run.ratings])
    assert share(run, run.ratings) <= guess_of_the_mean
    assert share(run, run.ratings, grid=GRID) <= guess_of_the_mean + 0.05


def test_a_private_model_that_shrinks_its_constant_leaves_the_sign_behind():
    # What is left of positive ratings then has a positive mean, and that is the observer's guess.
    run = train("step", mask=lambda items, ratings: private_model(items, ratings, shrink_constant=1.0))
    assert share(run, run.masked, tolerance=0.05) >= 0.95


def test_a_bias_column_gives_the_sign_of_masked_ratings():
    run = train("step", bias=True, mask=private_model)
    assert share(run, run.masked, rounds=1, tolerance=0.05, fixed={0: 1.0}) >= 0.95


# --- what is not determined ---


def party(ratings, rounds=2, seed=0, k=4):
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(rounds):
        q, p = rng.normal(size=(len(ratings), k)), rng.normal(size=k)
        out.append(Observation(q, LAMBDA * q - np.outer(ratings - q @ p, p)))
    return out


def test_too_little_to_go_by_is_said():
    with pytest.raises(Undetermined, match="no round"):
        leak([], LAMBDA)
    with pytest.raises(Undetermined, match="2 ratings"):
        leak(party(np.array([3.0, 4.0])), LAMBDA)
    with pytest.raises(Undetermined, match="one round"):
        leak(party(np.arange(1.0, 6.0), rounds=1), LAMBDA)


def test_errors_of_zero_say_nothing():
    q = np.random.default_rng(0).normal(size=(6, 4))
    silent = Observation(q, LAMBDA * q)
    with pytest.raises(Undetermined, match="zero"):
        leak([silent, silent], LAMBDA)
    with pytest.raises(Undetermined, match="zero"):
        leak([silent], LAMBDA, fixed={0: 1.0})
    # A silent round is passed over, if another speaks.
    ratings = np.array([1.0, 2.0, 5.0, 4.0, 3.0, 4.0])
    found = leak([silent, *party(ratings)], LAMBDA)
    assert exactly_recovered(found, ratings) == 1.0
    assert np.isnan(found.factors[0]).all() and np.isfinite(found.factors[1:]).all()


def test_noise_is_not_taken_for_a_direction():
    rng = np.random.default_rng(0)
    for ratings, k in ((2, 20), (20, 20), (200, 5)):
        q = rng.normal(size=(ratings, k))
        rounded = np.rint(LAMBDA * q / QUANTUM) * QUANTUM
        with pytest.raises(Undetermined, match="noise"):
            factor_direction(Observation(q, rounded), LAMBDA)


def test_some_errors_of_zero_do_no_harm():
    rng = np.random.default_rng(3)
    p = rng.normal(size=4)
    ratings = np.array([1.0, 2.0, 5.0, 4.0, 3.0, 4.0])
    rounds = party(ratings)
    q = rounds[0].q_rows.copy()
    q[:2] = np.outer(ratings[:2] / (p @ p), p)
    rounds[0] = Observation(q, LAMBDA * q - np.outer(ratings - q @ p, p))
    assert exactly_recovered(leak(rounds, LAMBDA), ratings) == 1.0


def test_the_same_round_twice_is_one_round():
    once = party(np.arange(1.0, 6.0), rounds=1)[0]
    with pytest.raises(Undetermined, match="alike"):
        leak([once, once], LAMBDA)
    assert exactly_recovered(leak([once, once], LAMBDA, grid=GRID), np.arange(1.0, 6.0)) == 1.0


def test_a_party_without_ratings_is_not_a_crash():
    nothing = Observation(np.empty((0, 4)), np.empty((0, 4)))
    with pytest.raises(Undetermined):
        leak([nothing, nothing], LAMBDA)


def test_observations_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="do not go with"):
        factor_direction(Observation(np.ones((3, 2)), np.ones((2, 2))), LAMBDA)
    with pytest.raises(DataError, match="finite"):
        factor_direction(Observation(np.ones((3, 2)), np.full((3, 2), np.nan)), LAMBDA)
    with pytest.raises(DataError, match="same items"):
        leak([*party(np.ones(4)), *party(np.ones(5))], LAMBDA)
    with pytest.raises(DataError, match="compared"):
        exactly_recovered(np.ones(3), np.ones(4))


def test_the_direction_is_that_of_the_factors():
    rng = np.random.default_rng(1)
    q, p, ratings = rng.normal(size=(9, 5)), rng.normal(size=5), rng.integers(1, 6, 9)
    found = factor_direction(Observation(q, LAMBDA * q - np.outer(ratings - q @ p, p)), LAMBDA)
    assert abs(found.unit @ p) == pytest.approx(np.linalg.norm(p)) and found.purity == pytest.approx(1.0)
    assert np.allclose(np.outer(found.multiples, found.unit), np.outer(ratings - q @ p, p))


def test_each_column_may_have_its_own_regularisation():
    rng = np.random.default_rng(1)
    q, p, ratings = rng.normal(size=(9, 5)), rng.normal(size=5), rng.integers(1, 6, 9).astype(float)
    each = np.linspace(0.0, 0.2, 5)
    seen = Observation(q, each * q - np.outer(ratings - q @ p, p))
    assert np.allclose(leak([seen], each, fixed={2: p[2], 4: p[4]}).ratings, ratings)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(6, 40), st.integers(2, 12), st.floats(0.05, 5.0), st.floats(0.0, 0.5))
def test_any_ratings_come_back_from_two_rounds_of_any_factors(seed, ratings, k, size, regularisation):
    rng = np.random.default_rng(seed)
    truth = rng.uniform(-2.0, 5.0, ratings)
    rounds = []
    for _ in range(2):
        q, p = size * rng.normal(size=(ratings, k)), rng.normal(size=k)
        rounds.append(Observation(q, regularisation * q - np.outer(truth - q @ p, p)))
    got = leak(rounds, regularisation)
    assert min(np.abs(got.ratings - truth).max(), np.abs(got.ratings + truth).max()) < 1e-4
    # The sign of everything is no part of the gradients: p and the ratings turned round give the same.
    assert got.ratings.mean() >= 0.0


# --- sums ---


def test_exposure_is_counted_by_rater_count():
    table = exposure_by_raters(np.array([0, 1, 1, 2, 3, 5, 6, 10, 11, 400]))
    assert [(row.raters, row.items, row.ratings) for row in table] == [
        ("0", 1, 0),
        ("1", 2, 2),
        ("2", 1, 2),
        ("3-5", 2, 8),
        ("6-10", 2, 16),
        (">10", 2, 411),
    ]
    with pytest.raises(DataError):
        exposure_by_raters(np.array([-1]))


@given(st.lists(st.integers(0, 30)))
def test_exposure_forgets_nothing(counts):
    table = exposure_by_raters(np.array(counts, dtype=np.int64))
    assert (sum(row.items for row in table), sum(row.ratings for row in table)) == (len(counts), sum(counts))


def true_of(run, items):
    truth = np.full(run.counts.size, np.nan)
    for own, ratings in zip(run.items, run.ratings):
        truth[own] = ratings
    return truth[items]


@pytest.mark.parametrize("local", ["step", "ridge"])
def test_a_sum_gives_away_what_only_one_party_rated(local):
    run = train(local, lonely=5)
    single = int(np.sum(run.counts == 1))
    assert single >= 5 * 24
    got = leak_from_sum(run.sums, run.counts, LAMBDA, grid=GRID, noise=QUANTUM / np.sqrt(12))
    assert got.single_rater_items == single and got.items.size >= 0.95 * single
    assert np.all(run.counts[got.items] == 1) and np.unique(got.items).size == got.items.size
    assert exactly_recovered(got.ratings, true_of(run, got.items)) >= 0.95
    # Rows of one group are of one party.
    for group in range(len(got.leaks)):
        members = got.items[got.groups == group]
        assert any(np.isin(members, own).all() for own in run.items)


def test_with_a_bias_column_every_single_rater_item_is_read():
    run = train("step", bias=True, lonely=1)
    got = leak_from_sum(run.sums[:1], run.counts, LAMBDA, fixed={0: 1.0}, noise=QUANTUM / np.sqrt(12))
    assert got.items.size >= 0.95 * got.single_rater_items
    assert exactly_recovered(got.ratings, true_of(run, got.items)) == 1.0


def test_rows_that_are_not_sent_give_nothing_away():
    run = train("step", lonely=5)
    hidden = run.counts < 2
    sums = [Observation(o.q_rows, np.where(hidden[:, None], 0.0, o.gradients)) for o in run.sums]
    got = leak_from_sum(sums, run.counts, LAMBDA, grid=GRID)
    assert got.items.size == 0 and got.ratings.size == 0 and got.leaks == () and got.single_rater_items == 0


def test_a_sum_of_two_is_not_taken_for_one():
    # All rows of the sum are of two parties or more; the attack leaves them alone.
    run = train("step", lonely=0)
    got = leak_from_sum(run.sums, np.maximum(run.counts, 2), LAMBDA, grid=GRID)
    assert got.items.size == 0


def test_sums_that_do_not_fit_are_refused():
    run = train("step")
    with pytest.raises(DataError):
        leak_from_sum([], run.counts, LAMBDA)
    with pytest.raises(DataError):
        leak_from_sum(run.sums, run.counts[1:], LAMBDA)


def test_ratings_that_are_not_there_are_no_score_and_no_crash():
    assert np.isnan(exactly_recovered(np.empty(0), np.empty(0)))
    assert place_on_grid(np.empty(0), GRID).size == 0


def test_what_gives_no_scale_is_said():
    rng = np.random.default_rng(0)
    q_rows, errors = rng.normal(size=(5, 3)), rng.normal(size=5)
    factors = np.array([0.0, 1.0, 2.0])
    seen = Observation(q_rows, LAMBDA * q_rows - np.outer(errors, factors))
    with pytest.raises(Undetermined, match="they give no scale"):
        leak([seen], LAMBDA, fixed={0: 1.0})
    with pytest.raises(Undetermined, match="anywhere near the grid"):
        leak([seen], LAMBDA, grid=np.array([1e9, 2e9]))
    q_rows[:, 1:] = 0.0
    with pytest.raises(Undetermined, match="its predictions are all zero"):
        leak([Observation(q_rows, LAMBDA * q_rows - np.outer(errors, factors))], LAMBDA, grid=GRID)


def test_a_group_too_small_or_without_a_scale_is_left_alone():
    """Two rows of one party, and three of another whose predictions are all zero: neither gives a rating away."""
    rng = np.random.default_rng(1)
    q_rows = rng.normal(size=(5, 4))
    q_rows[2:, 2:] = 0.0
    factors = np.array([[1.0, 2.0, 0.5, 1.0]] * 2 + [[0.0, 0.0, 1.0, 2.0]] * 3)
    seen = Observation(q_rows, LAMBDA * q_rows - rng.normal(size=(5, 1)) * factors)
    found = leak_from_sum([seen], np.ones(5), LAMBDA, grid=GRID)
    assert found.single_rater_items == 5 and not found.items.size and not found.leaks
