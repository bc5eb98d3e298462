"""The accountant against reference vectors, against dp-accounting, against exact laws, and its own properties."""

import json
import math
import subprocess
import sys
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedmpi.errors import ConfigError
from fedmpi.privacy import accountant
from fedmpi.privacy.accountant import (
    ORDERS_FULL,
    ORDERS_SAMPLED,
    Accountant,
    CohortView,
    calibrate,
    gaussian_delta,
    gaussian_epsilon,
    rdp_epsilon,
)

pytestmark = pytest.mark.slow

VECTORS = json.loads((Path(__file__).parent / "vectors" / "accountant.json").read_text())
T, DELTA = VECTORS["rounds"], VECTORS["delta"]


def spent(kind, *rounds):
    made = Accountant(kind)
    for multiplier, q, count in rounds:
        made.spend(multiplier, q, count)
    return made


# --- reference vectors ---


@pytest.mark.parametrize("row", VECTORS["sigma_for_epsilon"], ids=lambda r: f"q{r['q']}-eps{r['epsilon']}")
def test_calibration_gives_the_reference_sigma(row):
    sigma = calibrate(row["epsilon"], DELTA, row["q"], T, "rdp")
    assert sigma == pytest.approx(row["rdp"], rel=1e-3)
    # The target is met, and by no more than the search's precision.
    assert spent("rdp", (sigma, row["q"], T)).epsilon(DELTA) <= row["epsilon"] * (1 + 1e-12)
    assert spent("rdp", (sigma * (1 - 1e-6), row["q"], T)).epsilon(DELTA) > row["epsilon"]
    if row["q"] == 1.0:
        exact = calibrate(row["epsilon"], DELTA, 1.0, T, "pld")
        assert exact == pytest.approx(row["exact"], abs=1e-6)
        assert exact == pytest.approx(row["pld"], rel=1e-5)


def test_pld_calibration_below_q_1():
    row = next(r for r in VECTORS["sigma_for_epsilon"] if r["q"] == 0.2 and r["epsilon"] == 1.0)
    sigma = calibrate(1.0, DELTA, 0.2, T, "pld")
    assert sigma == pytest.approx(row["pld"], rel=1e-5)
    assert spent("pld", (sigma, 0.2, T)).epsilon(DELTA) <= 1.0


@pytest.mark.parametrize("row", VECTORS["epsilon_for_sigma"], ids=lambda r: f"q{r['q']}-sigma{r['sigma']}")
def test_composition_gives_the_reference_epsilon(row):
    rounds = (row["sigma"], row["q"], T)
    assert spent("rdp", rounds).epsilon(DELTA) == pytest.approx(row["rdp"], rel=1e-3)
    exact = spent("pld", rounds)
    assert exact.epsilon(DELTA) == pytest.approx(row["pld"], rel=1e-5)
    if row["q"] < 1.0:
        assert exact.epsilon(DELTA, quick=True) == spent("rdp", rounds).epsilon(DELTA)


# --- agreement with dp-accounting ---


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0, 40.0, 1e3, 1e7])
def test_the_closed_form_is_dp_accountings_own(sigma, delta):
    theirs = rdp.RdpAccountant(ORDERS_FULL)
    theirs.compose(dp_accounting.GaussianDpEvent(sigma), 100)
    ours = spent("rdp", (sigma, 1.0, 100)).epsilon(delta)
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=1e-9, abs=1e-12)
    # Their own grid of orders is coarser, so never better.
    coarse = rdp.RdpAccountant().compose(dp_accounting.GaussianDpEvent(sigma), 100)
    assert ours <= coarse.get_epsilon(delta) * (1 + 1e-5)


@pytest.mark.parametrize(("sigma", "q", "rounds"), [(0.8, 0.01, 50), (2.0, 0.2, 10), (30.0, 0.9, 300)])
def test_sampled_rounds_are_dp_accountings_own(sigma, q, rounds):
    theirs = rdp.RdpAccountant(ORDERS_SAMPLED)
    theirs.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), rounds)
    assert spent("rdp", (sigma, q, rounds)).epsilon(DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-9)


def test_mixed_rounds_are_dp_accountings_own():
    theirs = rdp.RdpAccountant(ORDERS_SAMPLED)
    theirs.compose(dp_accounting.PoissonSampledDpEvent(0.3, dp_accounting.GaussianDpEvent(6.0)), 20)
    theirs.compose(dp_accounting.GaussianDpEvent(9.0), 3)
    ours = spent("rdp", (6.0, 0.3, 20), (9.0, 1.0, 3))
    assert ours.epsilon(DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-9)
    both = pld.PLDAccountant()
    both.compose(dp_accounting.PoissonSampledDpEvent(0.3, dp_accounting.GaussianDpEvent(6.0)), 20)
    both.compose(dp_accounting.GaussianDpEvent(9.0), 3)
    tight = spent("pld", (6.0, 0.3, 20), (9.0, 1.0, 3)).epsilon(DELTA)
    assert tight == pytest.approx(both.get_epsilon(DELTA), rel=1e-6)
    assert tight < ours.epsilon(DELTA)


def test_a_pld_figure_is_that_of_all_rounds_so_far():
    growing = spent("pld", (6.0, 0.3, 20))
    before = growing.epsilon(DELTA)
    growing.spend(6.0, 0.3)
    assert growing.epsilon(DELTA) > before
    assert growing.epsilon(DELTA) == spent("pld", (6.0, 0.3, 21)).epsilon(DELTA)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.5, 3.0, 40.0, 800.0])
def test_the_analytic_gaussian(sigma, epsilon):
    # Balle and Wang's formula with scipy's log-space tails; terms may underflow only where delta does.
    upper = stats.norm.logcdf(0.5 / sigma - epsilon * sigma)
    lower = epsilon + stats.norm.logcdf(-0.5 / sigma - epsilon * sigma)
    expected = math.exp(upper) * -math.expm1(lower - upper)
    assert gaussian_delta(sigma, epsilon) == pytest.approx(expected, rel=1e-9, abs=1e-300)
    if 1e-200 < expected < 0.5 and epsilon > 0.0:
        found = gaussian_epsilon(sigma, expected)
        assert found == pytest.approx(epsilon, rel=1e-6)
        assert gaussian_delta(sigma, found) <= expected


@pytest.mark.parametrize("x", [-40.0, 0.0, 3.0, 24.9, 25.0, 25.1, 100.0, 1e5])
def test_the_tail_of_the_normal_law(x):
    assert accountant._log_tail(x) == pytest.approx(stats.norm.logsf(x), rel=1e-13, abs=1e-300)


def test_the_order_grid_loses_nothing_worth_having():
    orders = 1.0 + np.geomspace(0.02, 1e5, 200_000)
    for rho in np.geomspace(1e-7, 100.0, 30):
        best = rdp_epsilon(orders, rho * orders, DELTA)
        assert rdp_epsilon(ORDERS_FULL, rho * ORDERS_FULL, DELTA) <= best * (1 + 1e-5)
    assert np.array_equal(ORDERS_SAMPLED, ORDERS_SAMPLED.astype(int)) and ORDERS_SAMPLED[0] == 2


# --- the integer mechanism ---


@pytest.mark.parametrize("shift", [1, 2, 5])
@pytest.mark.parametrize("q", [0.05, 0.3])
def test_sampled_integer_noise_keeps_the_bound_at_every_integer_order(shift, q):
    # The exact Renyi divergences of a Poisson-sampled discrete Gaussian, both directions, from its probabilities.
    sigma = 1.5
    y = np.arange(-400, 401)

    def log_pmf(center):
        log_p = -((y - center) ** 2) / (2.0 * sigma**2)
        return log_p - np.logaddexp.reduce(log_p)

    without, with_it = log_pmf(0), log_pmf(shift)
    mixed = np.logaddexp(math.log1p(-q) + without, math.log(q) + with_it)
    bound = accountant._sampled_rdp(sigma / shift, q)

    def divergence(p, r, order):
        return np.logaddexp.reduce(order * p - (order - 1.0) * r) / (order - 1.0)

    for order, allowed in zip(ORDERS_SAMPLED[:20], bound[:20], strict=True):
        added, removed = divergence(mixed, without, order), divergence(without, mixed, order)
        assert removed <= added * (1 + 1e-9)
        assert added <= allowed * (1 + 1e-9)
        if order == 2 and shift == 1:
            assert added > 0.5 * allowed  # the bound is not idle


# --- properties ---

multipliers = st.floats(0.3, 500.0)
deltas = st.floats(1e-9, 1e-2)
kinds = st.sampled_from(accountant.KINDS)


@given(multipliers, deltas, kinds, st.integers(1, 500), st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_more_rounds_cost_more(multiplier, delta, kind, few, more):
    less = spent(kind, (multiplier, 1.0, few)).epsilon(delta)
    assert less <= spent(kind, (multiplier, 1.0, few), (multiplier, 1.0, more)).epsilon(delta)
    if less > 0.0:
        assert less < spent(kind, (multiplier, 1.0, few + more)).epsilon(delta)


@given(multipliers, st.floats(1.01, 10.0), deltas, kinds, st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_more_noise_costs_less(multiplier, factor, delta, kind, rounds):
    noisy = spent(kind, (multiplier * factor, 1.0, rounds)).epsilon(delta)
    assert noisy <= spent(kind, (multiplier, 1.0, rounds)).epsilon(delta)
    assert noisy < spent(kind, (multiplier, 1.0, rounds)).epsilon(delta) or noisy == 0.0


@given(multipliers, deltas, st.integers(1, 500))
@settings(max_examples=100, deadline=None)
def test_rdp_is_never_below_the_exact_figure(multiplier, delta, rounds):
    round_ = (multiplier, 1.0, rounds)
    assert spent("rdp", round_).epsilon(delta) >= spent("pld", round_).epsilon(delta) * (1 - 1e-9)


@given(st.floats(0.05, 50.0), deltas, kinds, st.integers(1, 2000))
@settings(max_examples=100, deadline=None)
def test_calibration_meets_its_target_from_below(epsilon, delta, kind, rounds):
    sigma = calibrate(epsilon, delta, 1.0, rounds, kind)
    assert epsilon * (1 - 1e-6) < spent(kind, (sigma, 1.0, rounds)).epsilon(delta) <= epsilon


@given(st.lists(st.tuples(st.floats(0.5, 50.0), st.sampled_from([0.1, 0.5, 1.0])), min_size=1, max_size=3), st.data())
@settings(max_examples=15, deadline=None)
def test_order_and_grouping_do_not_matter(rounds, data):
    one_by_one = Accountant()
    for multiplier, q in rounds + rounds:
        one_by_one.spend(multiplier, q)
    grouped = spent("rdp", *((m, q, 2) for m, q in data.draw(st.permutations(rounds))))
    assert one_by_one.rounds == grouped.rounds == 2 * len(rounds)
    assert one_by_one.epsilon(DELTA) == pytest.approx(grouped.epsilon(DELTA), rel=1e-12)


@given(st.floats(0.5, 50.0), st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.integers(1, 300))
@settings(max_examples=15, deadline=None)
def test_sampling_less_costs_less(multiplier, one, other, rounds):
    low, high = sorted((one, other))
    costs = [spent("rdp", (multiplier, q, rounds)).epsilon(DELTA) for q in (low, high, 1.0)]
    assert costs == sorted(costs)


def test_unequal_rounds_lie_between_the_equal_ones():
    def many(m):
        return spent("rdp", (m, 0.2, 10)).epsilon(DELTA)

    mixed = spent("rdp", (4.0, 0.2, 5), (8.0, 0.2, 5)).epsilon(DELTA)
    assert many(8.0) < mixed < many(4.0)
    # At q = 1 only the sum of 1/sigma**2 counts: 3 and 4 compose to 2.4.
    for kind in accountant.KINDS:
        both = spent(kind, (3.0, 1.0, 1), (4.0, 1.0, 1)).epsilon(DELTA)
        assert both == pytest.approx(spent(kind, (2.4, 1.0, 1)).epsilon(DELTA), rel=1e-12)


# --- edges ---


@pytest.mark.parametrize("kind", accountant.KINDS)
def test_edges(kind):
    assert calibrate(math.inf, DELTA, 1.0, 10, kind) == 0.0
    assert calibrate(1.0, DELTA, 0.0, 10, kind) == 0.0
    assert Accountant(kind).epsilon(DELTA) == 0.0
    # A single round without noise ends it, sampled or not, whatever the others had.
    for q in (1.0, 0.2):
        assert spent(kind, (50.0, q, 5), (0.0, q, 1)).epsilon(DELTA) == math.inf
    assert spent(kind, (1e-200, 1.0, 1)).epsilon(DELTA) == math.inf
    # What releases nothing costs nothing, and is still a round.
    idle = spent(kind, (math.inf, 1.0, 3), (0.0, 0.0, 2))
    assert idle.epsilon(DELTA) == 0.0 and idle.rounds == 5
    # So much noise that the total variation is below delta.
    assert spent(kind, (1e9, 1.0, 1)).epsilon(DELTA) == 0.0


def test_a_huge_epsilon_is_not_worse_sampled_than_unsampled():
    sampled, full = spent("rdp", (0.1, 0.99, 1)).epsilon(DELTA), spent("rdp", (0.1, 1.0, 1)).epsilon(DELTA)
    assert sampled <= full
    assert calibrate(1000.0, DELTA, 0.9, 100) <= calibrate(1000.0, DELTA, 1.0, 100)


@pytest.mark.parametrize(
    "call",
    [
        lambda: calibrate(0.0, DELTA, 1.0, 10),
        lambda: calibrate(-1.0, DELTA, 1.0, 10),
        lambda: calibrate(math.nan, DELTA, 1.0, 10),
        lambda: calibrate(1.0, 0.0, 1.0, 10),
        lambda: calibrate(1.0, 1.0, 1.0, 10),
        lambda: calibrate(1.0, DELTA, 1.5, 10),
        lambda: calibrate(1.0, DELTA, math.nan, 10),
        lambda: calibrate(1.0, DELTA, 1.0, 0),
        lambda: calibrate(1.0, DELTA, 1.0, 10, "moments"),
        lambda: Accountant("moments"),
        lambda: Accountant().spend(-1.0, 1.0),
        lambda: Accountant().spend(math.nan, 1.0),
        lambda: Accountant().spend(1.0, -0.1),
        lambda: Accountant().spend(1.0, 1.0, 0),
        lambda: Accountant().epsilon(0.0),
        lambda: CohortView(3).join(0, -1.0),
        lambda: CohortView(3).epsilon(1.0),
    ],
)
def test_impossible_settings_are_named(call):
    with pytest.raises(ConfigError, match=r"(epsilon|delta|q|rounds|accountant|multiplier) .*must be"):
        call()


def test_a_run_without_sampling_does_not_wait_for_dp_accounting():
    code = (
        "import sys\n"
        "from fedmpi.privacy import accountant, noise, statement; from fedmpi.randomness import words\n"
        "a = accountant.Accountant('pld')\n"
        "a.spend(accountant.calibrate(1.0, 1e-5, 1.0, 100), 1.0)\n"
        "a.epsilon(1e-5)\n"
        "print([m for m in ('dp_accounting', 'scipy', 'absl') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "[]\n"


# --- towards the server ---


def test_the_server_sees_the_worst_party_without_amplification():
    view = CohortView(4)
    for party in (0, 1, 1, 1, 3):
        view.join(party, 20.0)
    assert view.worst() == (1, 3)
    assert view.epsilon(DELTA) == spent("rdp", (20.0, 1.0, 3)).epsilon(DELTA)
    # More rounds are not always the larger epsilon: less noise counts too.
    view.join(3, 5.0)
    assert view.worst() == (3, 2)
    assert view.epsilon(DELTA) == spent("rdp", (20.0, 1.0, 1), (5.0, 1.0, 1)).epsilon(DELTA)


@pytest.mark.parametrize("kind", accountant.KINDS)
def test_plain_aggregation_is_the_local_figure(kind):
    # sigma C / sqrt(n) of its own noise against 2C: for sigma = 40 and 16 parties a multiplier of 5.
    view = CohortView(16, kind)
    for _ in range(7):
        view.join(np.arange(16), 40.0 / math.sqrt(16), adjacency=2.0)
    assert view.epsilon(DELTA) == pytest.approx(spent(kind, (5.0, 1.0, 7)).epsilon(DELTA), rel=1e-12)


def test_hybrid_counts_each_party_by_the_way_it_went():
    view = CohortView(3)
    view.join(np.array([0, 1]), 40.0)
    view.join(2, 10.0, adjacency=2.0)
    assert view.worst() == (2, 1)
    assert view.epsilon(DELTA) == spent("rdp", (5.0, 1.0, 1)).epsilon(DELTA)


def test_edges_of_the_view():
    view = CohortView(3)
    assert view.epsilon(DELTA) == 0.0 and view.worst() == (0, 0)
    assert CohortView(0).epsilon(DELTA) == 0.0
    view.join(1, 3.3)
    view.join(2, 0.0)
    assert view.epsilon(DELTA) == math.inf and view.worst() == (2, 1)
    assert view.joined() == [0, 1, 1]
