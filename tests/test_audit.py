"""What the messages of rating runs give away, attacked on the messages themselves."""

import json

import numpy as np
import pytest
from fitting import fitting, method_of

from fedmpi import audit
from fedmpi.attacks.exact_solver import leak_from_errors
from fedmpi.attacks.gradient_leak import Undetermined
from fedmpi.cli import resolve
from fedmpi.runtime import build

PRINTED = "--party-solver steps --no-item-bias --item-reg 0.1 --party-reg 0.1 --factor-mean 0.6 --optimizer adam --server-lr 0.02"


@pytest.fixture
def make(cache):
    def resolved(flags: str = ""):
        small = "--preset demo-recsys --parties 40 --items 80 --ratings 1600 --aggregation plain --support own "
        small += fitting(method_of(flags) or "fedmf", "--factors 6")
        return resolve([*small.split(), "--cache-dir", str(cache), *flags.split()])

    return resolved


@pytest.mark.parametrize("flags", [PRINTED, "", "--party-solver ridge"], ids=["as printed", "preset", "ridge"])
def test_plain_fedmf_gives_its_ratings_away(flags, make):
    found = audit.audit(make(f"--method fedmf {flags}"), 40)["gradients"]
    assert found["ratings"] == build.open_store(make()).train_offsets[-1]
    assert found["ratings_recovered"] >= 0.95


@pytest.mark.parametrize("kind", ["lr", "fm", "nn"])
def test_plain_fedmmf_gives_only_masked_ratings_away(kind, make):
    found = audit.audit(make(f"--method fedmmf-{kind}"), 40)["gradients"]
    assert found["masked_ratings_recovered"] >= 0.95
    assert found["ratings_recovered"] < 0.2  # an offset of the private model's prediction is rarely within half a step


def test_secure_sums_give_away_items_of_one_rater_and_min_raters_stops_it(make):
    # Few ratings on many items, so that some are rated by one party alone, and by the same party often enough.
    sparse = f"--items 400 --ratings 1600 --method fedmf {PRINTED}"
    open_, held = (audit.audit(make(f"{sparse} {flags}"), 1)["sums"] for flags in ("", "--min-raters 3"))
    counts = build.open_store(make(sparse)).rater_counts
    alone = int(np.sum(counts == 1))
    assert open_["rows_of_one_rater"] == alone > 20
    assert 0 < open_["ratings_read"] <= alone  # never of an item with two raters or more
    assert held["rows_of_one_rater"] == held["ratings_read"] == 0
    by_raters = {row["raters"]: row["items"] for row in held["exposure"]}
    assert by_raters["1"] == by_raters["2"] == 0 and by_raters["3-5"] > 0


def test_the_mask_figures_are_about_the_runs_own_masks(make):
    config = make("--method fedmmf-lr --mask-reg 1000000 --mask-offset-reg 0")
    found = audit.audit(config, 1)["mask"]
    method = build.algorithm(config)
    method.host(tuple(range(40)))
    # A mask that is a constant hides no order at all.
    assert np.allclose(found["ranking_mean"], 1.0)
    assert [sum(row) for row in found["recovery"]] == pytest.approx([1.0] * 5)
    width = method.store.scale.highest - method.store.scale.lowest
    offsets = method.block.train_offsets
    j = [np.mean(np.square(method.targets[a:b] / width)) for a, b in zip(offsets, offsets[1:])]
    assert found["indicator_train"] == pytest.approx(np.quantile(j, (0.25, 0.5, 0.75)).tolist())
    assert "vacuous" in found["bound"]


def test_errors_of_an_exact_minimiser_show_every_rating():
    rng = np.random.default_rng(0)
    rows = np.column_stack((np.ones(9), rng.normal(size=(9, 4))))
    bias, ratings, penalties = rng.normal(size=9), rng.integers(1, 6, 9).astype(float), np.array([2.0, 1, 1, 1, 1])
    factors = np.linalg.solve(rows.T @ rows + np.diag(penalties), rows.T @ (ratings - bias))
    errors = ratings - bias - rows @ factors
    assert np.allclose(leak_from_errors(rows, bias, errors, penalties), ratings)
    with pytest.raises(Undetermined):
        leak_from_errors(rows, bias, errors, 0 * penalties)


def test_the_command_prints_tables_and_writes_figures(make, run_in_memory, tmp_path, capsys):
    config = make(f"--method fedmmf-lr --rounds 1 --out {tmp_path / 'run'}")
    run_in_memory(config, 3)
    capsys.readouterr()
    assert audit.main([str(tmp_path / "run"), "--json", str(tmp_path / "figures.json"), "--parties", "5"]) == 0
    said = capsys.readouterr().out
    for words in ("MMF table 2", "MMF table 3", "MMF 2.2.2", "by chance", "secure sums", "the run is too short"):
        assert words in said
    assert json.loads((tmp_path / "figures.json").read_text())["gradients"]["parties"] == 5


@pytest.mark.parametrize(
    ("flags", "said"),
    [("--method local-lr", "only factorisation methods"), (None, "no run there")],
)
def test_what_cannot_be_audited_is_said_in_one_line(flags, said, make, run_in_memory, tmp_path, capsys):
    if flags:
        run_in_memory(make(f"{flags} --out {tmp_path / 'run'}"), 3)
    assert audit.main([str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
