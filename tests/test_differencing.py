"""What sums give away of a party that misses a round."""

import numpy as np
import pytest
from rich.console import Console

from fedmpi import audit
from fedmpi.attacks.differencing import items_from_counts, level_on_grid, missing_gradients, rated_rows
from fedmpi.cli import resolve
from fedmpi.errors import DataError
from fedmpi.runtime import build

GRID = np.arange(1.0, 6.0)


@pytest.fixture
def make(cache):
    def resolved(flags: str = ""):
        small = "--preset demo-recsys --parties 60 --items 80 --ratings 2400 --factors 4 --rounds 25"
        return resolve([*small.split(), "--cache-dir", str(cache), *flags.split()])

    return resolved


def test_counts_that_are_released_anew_give_a_whole_list_away(make):
    store = build.open_store(make())
    block = store.block(0, 60)
    for party in (0, 31, 59):
        own = block.train_items[block.train_offsets[party] : block.train_offsets[party + 1]]
        without = store.rater_counts - np.bincount(own, minlength=80)
        assert items_from_counts(store.rater_counts, without).tolist() == own.tolist()
    assert items_from_counts(0 * without, 0 * without).size == 0  # counted once, a later sum holds none
    with pytest.raises(DataError):
        items_from_counts(without, without[1:])


def moving_sums(rng, rounds=6, items=60, columns=4):
    """Sums that move in straight lines but for a little."""
    start, slope = rng.normal(size=(2, items, columns))
    return [start + 0.05 * t * slope + rng.normal(size=(items, columns)) * 1e-3 for t in range(rounds)]


def test_a_sum_without_a_party_less_its_neighbours_mean_is_the_partys_gradient():
    rng = np.random.default_rng(0)
    sums, own = moving_sums(rng), np.array([3, 8, 20, 41, 59])
    sent = rng.normal(size=(5, 4)) + 0.5
    answer = np.linspace(0, 0.6, 60)
    sums[4][own] -= sent
    sums[5][own] += answer[own, None] * sent
    found = missing_gradients(*sums[3:6], answer)
    assert np.allclose(found[own], sent, atol=1e-2)
    assert rated_rows(found, missing_gradients(*sums[1:4])).tolist() == own.tolist()
    with pytest.raises(DataError):
        missing_gradients(sums[0], sums[1][:5], sums[2])


def test_rows_that_were_not_sent_are_nobodys():
    nothing = np.zeros((9, 3))
    assert rated_rows(nothing, nothing).size == 0
    one = nothing.copy()
    one[4] = 1.0
    assert rated_rows(one, nothing).tolist() == [4]


@pytest.mark.parametrize(
    ("ratings", "off"),
    [([1, 3, 5, 2], 1.2), ([1, 3, 5, 2], -2.3), ([2, 3, 3, 4], 0.3), ([2, 3, 3, 4], -0.4), ([4, 4, 2, 3], 0.45)],
)
def test_a_badly_known_level_is_found_on_the_grid(ratings, off):
    noise = np.array([0.03, -0.02, 0.05, -0.04])
    assert np.rint(level_on_grid(np.array(ratings) + off + noise, GRID)).tolist() == ratings
    assert level_on_grid(np.empty(0), GRID).size == 0


@pytest.mark.parametrize("flags", ["", "--min-raters 3 --rater-margin 1", "--party-solver ridge"])
def test_a_party_that_misses_a_late_round_is_read_out_of_the_sums(flags, make):
    found = audit.audit(make(f"--method fedmf {flags}"), 1, missing=4)["differencing"]
    assert found["parties"] == 4 and found["round"] == 24 and found["opened"]
    assert found["items_recovered"] > 0.7 and found["ratings_recovered"] > 0.7
    assert found["wrong_items"] < 0.2 * found["ratings"]
    assert found["items_from_counts"] == 0


def test_of_masked_ratings_only_the_masked_ones_are_read(make):
    found = audit.audit(make("--method fedmmf-lr"), 1, missing=4)["differencing"]
    assert found["items_recovered"] > 0.7 and found["masked_ratings_recovered"] > 0.5
    assert found["ratings_recovered"] < 0.2


def test_min_raters_without_a_margin_leaves_no_sum_to_compare(make):
    found = audit.audit(make("--method fedmf --min-raters 3"), 1, missing=4)["differencing"]
    assert not found["opened"]
    assert found["items_from_counts"] == found["items_recovered"] == found["ratings_recovered"] == 0


def test_the_audit_finds_a_list_where_counts_are_released_anew(make, monkeypatch):
    from fedmpi.recsys.factorisation import Factorisation

    def counted_anew(self, rows, values):
        values[:, 0] = 1.0

    monkeypatch.setattr(Factorisation, "_hold_back", counted_anew)
    found = audit.audit(make("--method fedmf"), 1, missing=4)["differencing"]
    assert found["items_from_counts"] == 1.0


def test_what_was_differenced_is_shown(make, capsys):
    for flags, said in (("", "are not"), ("--min-raters 3", "such a round ends without a sum")):
        audit.show(audit.audit(make(f"--method fedmf {flags}"), 1, missing=1), Console(width=110))
        shown = capsys.readouterr().out
        assert (
            "when one party misses round 24" in shown
            and "items, from the counts of two rounds" in shown
            and said in shown
        )


@pytest.mark.parametrize(("flags", "missing"), [("--rounds 4", 3), ("--rounds 5 --min-raters 3", 3), ("", 0)])
def test_without_enough_rounds_nothing_is_differenced(flags, missing, make):
    assert "differencing" not in audit.audit(make(f"--method fedmf {flags}"), 1, missing)
