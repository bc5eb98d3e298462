"""The graph of a secure-aggregation round, and the degree and threshold that keep it private and recoverable."""

import dataclasses
import itertools
import math
import time
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedmpi.crypto.prg import KeyStream
from fedmpi.errors import ConfigError, ProtocolError
from fedmpi.randomness.words import SeededWords
from fedmpi.secagg import graph as graphs
from fedmpi.secagg.graph import (
    Graph,
    check_threshold,
    complete,
    default_threshold,
    regular,
    regular_parameters,
)

pytestmark = pytest.mark.slow


def words(seed=0, round=0):
    return SeededWords(seed, "graph", 0, round)


def majority(holders):
    return holders // 2 + 1


def is_connected(graph, kept):
    kept = set(kept)
    reached, frontier = set(), [min(kept)] if kept else []
    while frontier:
        party = frontier.pop()
        if party not in reached:
            reached.add(party)
            frontier.extend(kept.intersection(graph.neighbours(party)) - reached)
    return reached == kept


# Party numbers are those of the population, so a cohort has holes and does not start at 0.
cohorts = st.lists(st.integers(0, 10**6), min_size=2, max_size=40, unique=True)


@st.composite
def regular_graphs(draw):
    cohort = draw(cohorts)
    degree = 2 * draw(st.integers(1, 22))
    holders = min(degree, len(cohort) - 1) + 1
    threshold = draw(st.integers(majority(holders), holders))
    return cohort, degree, threshold, draw(st.integers(0, 2**32))


# --- the shape ---


@given(regular_graphs())
@settings(max_examples=150, deadline=None)
def test_a_regular_graph_is_regular_symmetric_and_connected(case):
    cohort, degree, threshold, seed = case
    graph = regular(cohort, degree, threshold, words(seed))
    n = len(cohort)
    assert graph.parties == tuple(sorted(cohort))
    assert graph.degree == min(degree, n - 1) and graph.threshold == threshold
    for party in graph.parties:
        neighbours = graph.neighbours(party)
        assert party not in neighbours
        assert len(set(neighbours)) == len(neighbours) == graph.degree
        assert neighbours == tuple(sorted(neighbours)) and set(neighbours) <= set(cohort)
        assert graph.holders(party) == tuple(sorted((*neighbours, party)))
        assert all(party in graph.neighbours(other) for other in neighbours)
    assert is_connected(graph, graph.parties)


@given(regular_graphs(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_source_and_the_set_of_parties_decide_the_graph(case, random):
    cohort, degree, threshold, seed = case
    shuffled = list(cohort)
    random.shuffle(shuffled)
    assert regular(cohort, degree, threshold, words(seed)) == regular(shuffled, degree, threshold, words(seed))


def test_every_round_draws_its_own_graph():
    rounds = [regular(range(50), 8, 6, words(round=r)) for r in range(20)]
    assert len({graph.neighbours(0) for graph in rounds}) > 15
    assert regular(range(50), 8, 6, KeyStream(bytes(32), b"graph/1")) == regular(
        range(50), 8, 6, KeyStream(bytes(32), b"graph/1")
    )


def test_every_order_is_equally_likely():
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    source = words()
    for _ in range(24 * 200):
        counts[tuple(graphs._permutation(4, source))] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_a_draw_with_equal_keys_is_thrown_away():
    draws = [[5, 5, 1, 2], [9, 3, 7, 1]]

    class Played:
        def words(self, n):
            return np.array(draws.pop(0), dtype=np.uint64)

    assert graphs._permutation(4, Played()) == [3, 1, 2, 0]


@given(cohorts)
@settings(max_examples=40, deadline=None)
def test_a_complete_graph_joins_everyone(cohort):
    graph = complete(cohort)
    n = len(cohort)
    assert graph.is_complete and graph.degree == n - 1
    assert graph.threshold == math.ceil(Fraction(2 * n, 3)) == default_threshold(n)
    for party in cohort:
        assert graph.holders(party) == graph.parties
        assert len(graph.neighbours(party)) == n - 1


@pytest.mark.parametrize("degree", [5, 6, 7, 100])
def test_a_degree_that_reaches_everybody_is_the_complete_graph(degree):
    class Untouched:
        def words(self, n):
            raise AssertionError("nothing is to be drawn")

    assert regular(range(6), degree, 4, Untouched()) == complete(range(6), 4)


def test_a_graph_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        complete(range(4)).threshold = 1
    assert "circle" not in repr(complete(range(4)))


def test_ten_thousand_parties_take_a_moment():
    start = time.process_time()
    graph = regular(range(10_000), 40, 21, words())
    assert sum(len(graph.holders(party)) for party in graph.parties) == 410_000
    assert time.process_time() - start < 5


# --- what is refused ---


@pytest.mark.parametrize("holders", [2, 3, 4, 7, 20])
def test_a_threshold_is_more_than_half_and_at_most_all(holders):
    allowed = set(range(majority(holders), holders + 1))
    for threshold in range(-1, holders + 3):
        if threshold in allowed:
            check_threshold(threshold, holders)
            # two disjoint groups of holders never reconstruct two secrets
            assert 2 * threshold > holders
        else:
            with pytest.raises(ConfigError, match=f"threshold = {threshold}: .*{majority(holders)} to {holders}"):
                check_threshold(threshold, holders)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: complete(range(10), 5), "threshold = 5: .* 10 holders.*6 to 10"),
        (lambda: complete(range(10), 11), "threshold = 11: .* 10 holders.*6 to 10"),
        (lambda: regular(range(30), 8, 4, words()), "threshold = 4: .* 9 holders.*5 to 9"),
        (lambda: regular(range(30), 8, 10, words()), "threshold = 10: .* 9 holders.*5 to 9"),
        (lambda: regular(range(10), 40, 21, words()), "threshold = 21: .* 10 holders.*6 to 10"),
        (lambda: regular(range(30), 7, 5, words()), "degree 7 for 30 parties: must be even"),
        (lambda: regular(range(30), 0, 1, words()), "degree 0 for 30 parties"),
        (lambda: complete([3]), "a cohort of 1"),
        (lambda: complete([]), "a cohort of 0"),
        (lambda: complete([3, 4, 3]), "party 3 is in the cohort twice"),
        (lambda: regular_parameters(1, 0.1, 0.1), "a cohort of 1"),
        (lambda: regular_parameters(100, -0.1, 0.1), "corrupt rate -0.1"),
        (lambda: regular_parameters(100, 0.1, 1.0), "dropout rate 1.0"),
        (lambda: regular_parameters(100, float("nan"), 0.1), "corrupt rate nan"),
        (lambda: regular_parameters(100, 0.1, 0.1, 0), "security bits 0"),
        (lambda: regular_parameters(100, 0.1, 0.1, 40, -1), "failure bits -1"),
        (lambda: regular_parameters(100, 0.1, 0.5), "10 and 50.*above 50 .*that the 50 left"),
        (lambda: regular_parameters(100, 0.7, 0.3), "70 and 30.*above 70 .*that the 70 left"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_is_allowed(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_stranger_is_named():
    graph = regular(range(0, 60, 2), 4, 3, words())
    for call in (graph.neighbours, graph.holders):
        with pytest.raises(ProtocolError, match="party 7: not among the 30 parties of this round"):
            call(7)


# --- the bounds ---


class Bounds(NamedTuple):
    """log2 of the three bounds of the module's text for one round."""

    exposed: float
    disconnected: float
    lost: float

    @property
    def privacy(self):
        return np.logaddexp2(self.exposed, self.disconnected)


def failure_bounds(n, degree, threshold, corrupt, dropout):
    """What a degree and a threshold are worth at the given rates."""
    exposed, disconnected, lost = graphs._log_bounds(n, degree, *graphs._worst_counts(n, corrupt, dropout))
    return Bounds(*(log / math.log(2) for log in (exposed[threshold], disconnected, lost[threshold])))


@given(st.integers(1, 60), st.data())
@settings(max_examples=100, deadline=None)
def test_tails_are_those_of_the_hypergeometric_law(population, data):
    marked = data.draw(st.integers(0, population))
    draws = data.draw(st.integers(0, population))
    tails = graphs._log_upper_tails(population, marked, draws)
    assert len(tails) == draws + 2
    for x, log in enumerate(tails):
        ways = sum(math.comb(marked, y) * math.comb(population - marked, draws - y) for y in range(x, draws + 1))
        assert math.exp(log) == pytest.approx(ways / math.comb(population, draws), rel=1e-12)


def test_tails_stay_exact_far_below_the_smallest_float():
    # ln P[X = 400] with 400 of 10^6 marked and 400 drawn: one way in C(10^6, 400), about 1e-1532
    exact = -math.log(math.comb(10**6, 400))
    assert graphs._log_upper_tails(10**6, 400, 400)[400] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("n, degree", [(7, 2), (8, 2), (9, 2), (8, 4), (9, 4), (10, 4), (11, 6), (10, 8)])
def test_no_set_of_losses_disconnects_more_often_than_bounded(n, degree):
    """All sets of removed places at once: the circle's order is uniform, so this is the exact probability."""
    graph = Graph(tuple(range(n)), degree, degree + 1)
    for removed in range(n - 1):
        sets = list(itertools.combinations(range(n), removed))
        broken = sum(not is_connected(graph, set(range(n)).difference(gone)) for gone in sets)
        bound = math.exp(graphs._log_disconnected(n, degree, removed))
        assert broken / len(sets) <= bound * (1 + 1e-12)
        if removed == degree:
            # The fewest that can do it, and only as two runs: the bound is the probability itself.
            assert broken / len(sets) == pytest.approx(bound)


def play(n, degree, threshold, corrupt, dropped, rounds, seed):
    """(exposed parties, lost parties, whether the honest rest fell apart) in each of many rounds. The corrupt are the
    first parties and the dropped the last: the graph is drawn without looking at them."""
    honest = range(corrupt, n)
    gone = set(range(n - dropped, n))
    for r in range(rounds):
        graph = regular(range(n), degree, threshold, words(seed, r))
        holders = [graph.holders(party) for party in range(n)]
        exposed = sum(sum(h < corrupt for h in holders[party]) >= threshold for party in honest)
        lost = sum(sum(h not in gone for h in holders[party]) < threshold for party in range(n))
        yield exposed, lost, not is_connected(graph, set(honest) - gone)


def test_expected_failures_are_the_bounds_themselves():
    """The unions of 1 and 3 are over events of exactly these probabilities, so their sums are exact expectations."""
    n, degree, threshold, corrupt, dropped = 30, 6, 5, 7, 4
    outcome = np.array(list(play(n, degree, threshold, corrupt, dropped, 3000, seed=1)), dtype=float)
    bounds = failure_bounds(n, degree, threshold, corrupt / n, dropped / n)
    for observed, log2 in ((outcome[:, 0], bounds.exposed), (outcome[:, 1], bounds.lost)):
        error = observed.std() / math.sqrt(len(observed))
        assert 0.01 < 2**log2 < 1
        assert abs(observed.mean() - 2**log2) < 4.5 * error
    assert 0 < outcome[:, 2].mean() < 2**bounds.disconnected


@pytest.mark.parametrize("n, corrupt, dropped, bits", [(60, 6, 6, 5), (60, 18, 3, 5), (80, 4, 24, 6)])
def test_found_parameters_fail_no_more_often_than_promised(n, corrupt, dropped, bits):
    degree, threshold = regular_parameters(n, corrupt / n, dropped / n, bits, bits)
    assert degree < n - 1
    outcome = list(play(n, degree, threshold, corrupt, dropped, 1000, seed=2))
    leaks = sum(bool(exposed or apart) for exposed, _, apart in outcome)
    losses = sum(bool(lost) for _, lost, _ in outcome)
    # A rate at the very bound would exceed this number once in a million tests.
    most = stats.binom.isf(1e-6, len(outcome), 2.0**-bits)
    assert leaks <= most and losses <= most


# --- the degree and threshold that are found ---

RATES = [(0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.05, 0.3), (1 / 3, 0.1), (0.33, 0.33)]


@pytest.mark.parametrize("corrupt, dropout", RATES)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 20, 37, 100, 500, 1000, 10_000])
def test_found_parameters_hold_the_bounds_and_make_a_graph(n, corrupt, dropout):
    try:
        degree, threshold = regular_parameters(n, corrupt, dropout)
    except ConfigError:
        c, d = math.ceil(corrupt * n - 1e-9), math.ceil(dropout * n - 1e-9)
        assert max(c, n // 2) + 1 > n - d  # really no threshold, not even in the complete graph
        return
    bounds = failure_bounds(n, degree, threshold, corrupt, dropout)
    assert bounds.privacy <= -40 and bounds.lost <= -40
    assert regular(range(n), degree, threshold, words()).degree == degree


@pytest.mark.parametrize("n, corrupt, dropout", [(60, 0.1, 0.1), (100, 1 / 3, 0.1), (500, 0.05, 0.05)])
def test_no_smaller_degree_would_do(n, corrupt, dropout):
    found, _ = regular_parameters(n, corrupt, dropout)
    for degree in range(2, found, 2):
        for threshold in range(majority(degree + 1), degree + 2):
            bounds = failure_bounds(n, degree, threshold, corrupt, dropout)
            assert bounds.privacy > -40 or bounds.lost > -40


@pytest.mark.parametrize("n, corrupt, dropout", [(30, 0.1, 0.1), (100, 0.33, 0.0), (100, 0.2, 0.01)])
def test_the_threshold_is_the_middle_of_those_that_hold(n, corrupt, dropout):
    degree, threshold = regular_parameters(n, corrupt, dropout)
    hold = [
        t
        for t in range(majority(degree + 1), degree + 2)
        if (bounds := failure_bounds(n, degree, t, corrupt, dropout)).privacy <= -40 and bounds.lost <= -40
    ]
    assert len(hold) > 1 and threshold == hold[(len(hold) - 1) // 2]


def test_a_rate_counts_whole_parties_and_never_too_few():
    assert graphs._worst_counts(10, 0.01, 0.0) == (1, 0)
    assert graphs._worst_counts(100, 0.07, 0.29) == (7, 29)  # 0.07 * 100 is above 7 in floats
    assert graphs._worst_counts(100, 1 / 3, 0.101) == (34, 11)


def test_the_degree_grows_like_the_logarithm_of_the_cohort():
    degrees = [regular_parameters(10**e, 0.05, 0.05)[0] for e in range(2, 8)]
    assert degrees == sorted(degrees)
    assert degrees[-1] < 50  # 10^7 parties, little more than 10^3 need
    steps = np.diff(degrees[2:])
    assert max(steps) <= 6  # a tenfold cohort costs a few neighbours


@pytest.mark.parametrize("n", [200, 1000, 10_000])
def test_the_degree_grows_with_every_demand(n):
    def degree(corrupt=0.1, dropout=0.1, security=40, failure=40):
        return regular_parameters(n, corrupt, dropout, security, failure)[0]

    assert degree(corrupt=0.05) <= degree() < degree(corrupt=0.3) < degree(corrupt=0.45)
    assert degree(dropout=0.05) < degree() < degree(dropout=0.2) < degree(dropout=0.35)
    assert degree(security=20, failure=20) < degree() < degree(security=60, failure=60)


@pytest.mark.parametrize(
    "corrupt, dropout, n, degree, threshold",
    [
        (0.33, 0.33, 1000, 286, 150),
        (0.33, 0.33, 10**4, 422, 221),
        (0.33, 0.33, 10**5, 480, 251),
        (0.33, 0.33, 10**6, 518, 270),
        (0.33, 0.05, 1000, 78, 60),
        (0.33, 0.05, 10**4, 92, 70),
        (0.33, 0.05, 10**5, 102, 77),
        (0.33, 0.05, 10**6, 110, 83),
        (0.05, 0.05, 10**4, 34, 20),
        (0.05, 0.05, 10**5, 36, 21),
        (0.05, 0.05, 10**6, 38, 22),
        (0.45, 0.45, 1000, 822, 417),
    ],
)
def test_parameters_are_close_to_those_of_google_federated_compute(corrupt, dropout, n, degree, threshold):
    """Values of graph_parameter_finder_test.cc, honest-but-curious server, where a majority threshold costs nothing
    extra. It asks for 41 bits against each of two leaks and 20 against loss, gives a party no share of its own secret
    and draws a party's neighbours from all n; both make it ask for a little more than the bounds here."""
    found, t = regular_parameters(n, corrupt, dropout, 41, 20)
    assert 0.94 * degree <= found <= degree
    assert t <= threshold and t / found == pytest.approx(threshold / degree, abs=0.02)


@pytest.mark.parametrize("n, corrupt, dropout, expected", [(1000, 0.33, 0.05, (78, 60)), (10**4, 0.05, 0.05, (34, 20))])
def test_its_formula_on_these_tails_gives_its_values(n, corrupt, dropout, expected):
    """Without the own share and with draws from all n, the same tails give the published numbers exactly."""
    c, d = round(corrupt * n), round(dropout * n)
    for degree in range(2, n, 2):
        exposed = graphs._log_upper_tails(n, c, degree) + math.log(n)
        lost = graphs._log_upper_tails(n, d, degree) + math.log(n)  # by dropped neighbours: fewer than t are left
        t = int(np.argmax(exposed <= -41 * math.log(2)))
        if t <= degree and lost[degree + 1 - t] <= -20 * math.log(2):
            break
    assert (degree, t) == expected


def test_the_published_claims_of_bell_hold():
    """Their abstract: 3 % of 10^4 clients suffice with 5 % corrupt and 5 % dropouts, and that is against a stronger
    server; a billion clients cost no more than a thousand did in a complete graph."""
    degree, threshold = regular_parameters(10**4, 0.05, 0.05)
    assert (degree, threshold) == (40, 21)
    assert degree <= 0.03 * 10**4
    assert regular_parameters(10**9, 1 / 3, 1 / 3)[0] < 999


def test_small_cohorts_under_large_rates_get_the_complete_graph():
    degree, threshold = regular_parameters(10, 0.4, 0.4)
    assert degree == 9 and threshold == 6
    assert regular(range(10), degree, threshold, words()).is_complete


def test_the_search_is_quick_enough_for_every_round():
    start = time.process_time()
    for n in range(9_900, 9_950):  # a sampled cohort has another size every round
        regular_parameters(n, 0.1, 0.1)
    assert time.process_time() - start < 5
