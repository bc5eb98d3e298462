"""One object says what is done to an update; nothing that was not declared leaves a party."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.errors import ConfigError, ProtocolError
from fedmpi.privacy.encoding import Encoding
from fedmpi.privacy.mechanism import (
    Bounded,
    BoundedVector,
    ClippedVector,
    Cut,
    ExactRows,
    Noised,
    Wanted,
    choose_mechanism,
)
from fedmpi.randomness.words import SeededWords

ENCODING = Encoding(1.0, 1 << 12, 24, 50)


def wanted(**changed):
    settings = {
        "epsilon": 1.0,
        "clip": 0.5,
        "multiplier": 4.0,
        "margin": 0.0,
        "parties": 10,
        "rounds": 3,
        "bits": 0,
        "steps": 0,
        "own_coordinates": False,
    }
    return Wanted(**(settings | changed))


def draw(purpose):
    return SeededWords(3, purpose, 1, 2)


def test_a_method_gets_the_mechanism_that_it_declared():
    free = wanted(epsilon=math.inf, multiplier=0.0)
    noised = choose_mechanism(ClippedVector(), wanted(margin=0.2, own_coordinates=True), 50, "mine")
    assert isinstance(noised, Noised) and noised.noisy and noised.shortens and noised.own_coordinates
    assert (noised.encoding.clip, noised.multiplier, noised.margin) == (0.5, 4.0, 0.2)
    bounded = choose_mechanism(BoundedVector(64.0), free, 50, "mine")
    assert isinstance(bounded, Bounded) and bounded.encoding.clip == 64.0 and not bounded.noisy
    rows = choose_mechanism(ExactRows(5), free, 50, "mine")
    assert isinstance(rows, Cut) and rows.width == 5 and not rows.noisy


@pytest.mark.parametrize("declared", [BoundedVector(64.0), ExactRows(5)])
def test_what_has_no_noise_cannot_be_given_an_epsilon(declared):
    with pytest.raises(ConfigError, match="epsilon = 1: mine adds no noise and promises no epsilon; take inf"):
        choose_mechanism(declared, wanted(), 50, "mine")
    with pytest.raises(ValueError, match="adds no noise"):
        declared.kind(ENCODING, multiplier=1.0)


@given(st.floats(0.1, 50), st.integers(1, 400), st.floats(0, 0.9))
def test_the_shares_of_a_whole_cohort_make_the_noise_that_was_asked_for(sigma, cohort, margin):
    mechanism = Noised(ENCODING, multiplier=sigma, margin=margin)
    left = cohort * (1 - margin)
    assert mechanism.share(cohort) * math.sqrt(left) == pytest.approx(sigma * ENCODING.sensitivity)
    assert mechanism.summed == pytest.approx(mechanism.share(cohort) * math.sqrt(cohort) / ENCODING.sensitivity)


def test_an_update_that_may_not_be_shortened_ends_the_run():
    with pytest.raises(ProtocolError, match="did training diverge"):
        Bounded(ENCODING).encode(np.full(50, 1.0), 4, draw, 1)
    short = Bounded(ENCODING).encode(np.full(50, 0.01), 4, draw, 1)
    assert np.allclose(ENCODING.decode(ENCODING.unwrap(short)), 0.01, atol=1 / ENCODING.scale)


def test_noise_is_added_where_it_is_promised_and_nowhere_else():
    zeros = np.zeros(50)
    assert not Bounded(ENCODING).encode(zeros, 4, draw, 1).any()
    assert not Noised(ENCODING).encode(zeros, 4, draw, 1).any()
    values = ENCODING.unwrap(Noised(ENCODING, multiplier=4.0).encode(zeros, 4, draw, 1))
    assert np.std(values) == pytest.approx(4.0 * ENCODING.sensitivity / 2, rel=0.3)


# ---- methods of a user's own ----


@pytest.fixture
def run(make_config, run_in_memory, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))

    def run(method, flags):
        flags = f"--method {method} --dataset none --support dense --clip 8 {flags}"
        return run_in_memory(make_config(flags), 3)

    return run


def test_a_method_that_sends_exact_rows_cannot_claim_an_epsilon(run):
    assert run("toy_rows:Rows", "--epsilon inf")["epsilon_kind"] == "none"
    with pytest.raises(ConfigError, match="toy_rows:Rows adds no noise and promises no epsilon"):
        run("toy_rows:Rows", "--epsilon 1 --entropy os")


def test_nor_by_declaring_a_vector_and_sending_rows(run):
    with pytest.raises(ProtocolError, match="declared that it sends ClippedVector, and gave RowUpdates"):
        run("toy_rows:Claims", "--epsilon 1 --entropy os")


@pytest.mark.parametrize(
    "method, said",
    [
        ("Unasked", "party 5, local work: the method worked for it unasked, or twice"),
        ("Twice", "party [02], local work: the method worked for it unasked, or twice"),
        ("Lazy", "party 1, local work: the method gave no update of it"),
    ],
)
def test_work_is_for_those_who_were_asked_once_each(method, said, run):
    """What nobody was asked for is in no log, and would count for nothing."""
    with pytest.raises(ProtocolError, match=said):
        run(f"toy_parties:{method}", "--epsilon 1 --entropy os")


def test_nor_by_declaring_rows_and_sending_a_vector(run):
    with pytest.raises(ProtocolError, match="declared that it sends ExactRows, and gave LocalUpdate"):
        run("toy_rows:Vectors", "--epsilon inf")


@pytest.mark.parametrize(
    "method, said",
    [
        ("Repeated", "rows that do not ascend within a party"),
        ("Negative", "rows that do not ascend within a party, or are not between 0 and 3"),
        ("Beyond", "are not between 0 and 3"),
        ("Uncounted", r"8 rows, and counts that add up to 7, for 2 parties"),
        ("Narrow", r"values of shape \(8, 1\), expected \(8, 2\)"),
    ],
)
@pytest.mark.parametrize("aggregation", ["plain --min-cohort 1", "secure"])
def test_rows_that_cannot_be_are_refused_where_they_would_leave(method, said, aggregation, run):
    """Secure aggregation would add some of them up, and to other places than plain does."""
    with pytest.raises(ProtocolError, match=said):
        run(f"toy_rows:{method}", f"--epsilon inf --aggregation {aggregation}")


def test_a_union_that_outgrows_what_was_declared_would_wrap(run):
    with pytest.raises(ProtocolError, match="16 coordinates are sent, and the method declared 3 at most"):
        run("toy_parties:Grows", "--support union --epsilon 1")


@pytest.mark.parametrize("metrics", ["party", "securesum --aggregation secure"])
@pytest.mark.parametrize(
    "method, said", [("NoNumber", "not a finite number"), ("FewRows", r"shape \(1, 2\), expected \(2, 2\)")]
)
def test_test_figures_that_cannot_be_are_one_line(method, said, metrics, run):
    with pytest.raises(ProtocolError, match=said):
        run(f"toy_parties:{method}", f"--epsilon 1 --metrics {metrics}")


def test_test_figures_that_could_wrap_are_not_added_up(run):
    with pytest.raises(ProtocolError, match="larger than the .* that can be added up"):
        run("toy_parties:Huge", "--epsilon 1 --metrics securesum --aggregation secure")
