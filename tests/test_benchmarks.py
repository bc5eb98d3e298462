"""Benchmarks are run by hand; here only that each still starts, and that what it would run is something that can be run."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fedmpi.algorithm import folder_of
from fedmpi.cli import resolve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# One starts MPI by being imported and runs under mpirun; the others run under another Python, which has Surprise or Flower.
ELSEWHERE = ("transport", "recsys_surprise", "rounds_flower", "overhead_flower")
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if "def main(" in path.read_text() and path.stem not in ELSEWHERE
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_says_what_it_does(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code in (0, None)
    assert "--json" in capsys.readouterr().out


def test_the_steps_that_are_compared_can_be_configured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.step_cost import KINDS

    for name, flags in KINDS.values():
        assert resolve(["--preset", "cifar10-s5", "--method", name, *flags.split()]).run.parties == 20


@pytest.mark.parametrize("table", ["II", "III", "IV", "V", "VI", "VII", "figure2"])
def test_every_run_of_the_papers_tables_can_be_configured(table, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.paper_tables import TABLES

    cells = TABLES[table]()
    for cell in cells:
        config = resolve(["--preset", cell.preset, *cell.flags.split()])
        assert folder_of(config.run.method) == "fedmpi.vision.methods"
    # the method stands in every column with the support of the paper, and with the one whose epsilon holds
    for column in {cell.column for cell in cells}:
        own = [cell.flags for cell in cells if cell.column == column and "dp-pfeddsu" in cell.flags]
        assert any("--support own" in flags for flags in own) and any("--support shared" in flags for flags in own)


def test_every_run_behind_the_demos_choice_can_be_configured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.demo_choice import CHOSEN, CHOSEN_ON, COMMON, CONFIRMED_ON, TRIED, alone, on_validation, settings

    def configured(flags):
        return resolve([*COMMON.split(), *flags.split()])

    for changed in TRIED:
        assert configured(on_validation(changed)).data.validation_fraction > 0, "not chosen on test samples"
    assert configured(settings(CHOSEN)) == configured(""), "what is confirmed is the preset"
    assert configured(alone(5)).data == configured("").data, "a party alone has the same samples"
    assert not set(CHOSEN_ON) & set(CONFIRMED_ON)


def paper_tables(monkeypatch, capsys, *words):
    """(exit code, what it printed)"""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.paper_tables import main

    monkeypatch.setattr(sys, "argv", ["paper_tables", *words])
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("table", ["II", "III", "IV", "V", "VI", "VII", "figure2"])
def test_no_two_tasks_of_an_array_are_the_same_run(table, monkeypatch, capsys, tmp_path):
    code, listing = paper_tables(monkeypatch, capsys, table, "--list", "--seeds", "2", "--keep", str(tmp_path))
    runs = [line.partition(" ")[2] for line in listing.splitlines()]
    assert code == 0 and len(set(runs)) == len(runs) >= 12


@pytest.mark.parametrize(
    "words, said",
    [
        ("--rows centaur", "--rows centaur: table II has DP-FedAvg-fb; PPSGD"),
        ("--columns cifar10", "--columns cifar10: table II has emnist-s5"),
        ("--cell -1", "there are 240 runs, 0 to 239"),
        ("--cell 240", "there are 240 runs, 0 to 239"),
        ("--seeds 0", "--seeds 0: must be 1 or more"),
        ("--scale 2", "--scale 2.0: must be above 0 and at most 1"),
    ],
)
def test_a_table_that_cannot_be_is_refused(words, said, monkeypatch, capsys, tmp_path):
    code, printed = paper_tables(monkeypatch, capsys, "II", "--keep", str(tmp_path), *words.split())
    assert code == 2 and said in printed


def test_what_is_kept_is_not_to_be_done_again_nor_are_its_data_looked_for(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    cut = ["IV", "--columns", "cifar10-s5", "--seeds", "1", "--keep", str(tmp_path), "--check"]
    with monkeypatch.context() as patch:
        patch.setattr("benchmarks.launch.KeptJobs.has", lambda jobs, name: "s0" in name)
        assert paper_tables(patch, capsys, *cut) == (0, "all 6 runs are kept\n")
    code, said = paper_tables(monkeypatch, capsys, *cut)
    assert "cifar10" in str(code) and "is missing; expected in" in str(code) and not said


def test_kept_results_are_those_of_their_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import launch

    ran = []
    monkeypatch.setattr(
        launch, "job", lambda mpirun, ranks, arguments, *rest: ran.append(arguments) or {"accuracy": 0.5}
    )
    jobs = launch.KeptJobs(tmp_path, 3)
    for _ in range(2):
        assert jobs.run("name", ["--rounds", "3"], ["--data-dir", "x"])["accuracy"] == 0.5
    assert ran == [["--rounds", "3", "--data-dir", "x"]] and not jobs.older
    with pytest.raises(SystemExit, match="other settings"):
        jobs.run("name", ["--rounds", "4"])
    monkeypatch.setattr(launch, "code", lambda: "another")
    later = launch.KeptJobs(tmp_path, 3)
    for _ in range(2):
        later.run("name", ["--rounds", "3"])
    later.say_what_is_older()
    assert "1 of these results are of another version" in capsys.readouterr().out


# ---- what a round costs ----


@pytest.fixture
def costs(monkeypatch):
    """Modules of benchmarks by name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


FEDMF = {
    "method": "fedmf",
    "support": "dense",
    "aggregation": "secure",
    "graph": "regular",
    "keys": "round",
    "download": "delta",
    "noise": "none",
}


def test_what_is_allowed_is_asked_of_the_configuration(costs, tmp_path):
    comm_cost = costs("comm_cost")
    assert comm_cost.AXES.keys() == FEDMF.keys()
    assert comm_cost.allowed(FEDMF, 8, str(tmp_path))
    for changed in ({"support": "own"}, {"noise": "ε=8"}, {"support": "shared"}):
        assert not comm_cost.allowed(FEDMF | changed, 8, str(tmp_path)), changed
    assert not comm_cost.allowed(FEDMF | {"aggregation": "hybrid"}, 3, str(tmp_path)), "one hidden party"


def test_the_quick_selection_has_every_value_of_every_axis(costs, tmp_path, monkeypatch):
    comm_cost = costs("comm_cost")
    monkeypatch.setattr(
        comm_cost, "allowed", lambda choice, *_: choice["support"] == "dense" or choice["noise"] == "none"
    )
    found = comm_cost.covering(8, str(tmp_path))
    for axis, values in comm_cost.AXES.items():
        assert {choice[axis] for choice in found} == set(values), axis
    assert len(found) < 60


def test_a_row_is_its_law_and_an_axis_that_changes_nothing_is_said_to(costs, tmp_path):
    comm_cost = costs("comm_cost")
    rows = [
        comm_cost.measure((FEDMF | {"aggregation": aggregation, "graph": graph}, 8, str(tmp_path)))
        for aggregation in ("plain", "secure")
        for graph in ("complete", "regular")
    ]
    assert not any(row["wrong"] for row in rows)
    assert [row["trips"] for row in rows] == [1, 1, 4, 4]
    assert rows[2]["up"]["sign"] == "" and rows[2]["up"]["counted"] == rows[2]["up"]["law"]
    assert rows[2]["up"]["bound"] == rows[2]["coordinates"] * rows[2]["bits"] / 8 < rows[2]["up"]["counted"]
    assert rows[0]["up"]["bound"] is None, "there is no law of what has no noise"
    assert [(row["aggregation"], row["graph"]) for row in comm_cost.merged(rows)] == [
        ("plain", "any"), ("secure", "complete"), ("secure", "regular"),
    ]  # fmt: skip


def test_a_message_that_breaks_its_law_is_named_and_fails_the_benchmark(costs, monkeypatch, capsys):
    comm_cost, counted = costs("comm_cost"), costs("counted")
    from fedmpi.bill import laws
    from fedmpi.secagg.messages import AdvertiseKeys, Unmask

    line = laws.Line(AdvertiseKeys, laws.UP, 64)
    kind = (str(line.phase), line.message, line.direction)

    def wrong(line, *counts):
        return [row["wrong"] for row in counted.compare([line], {kind: counted.Count(*counts)}, 8) if row["wrong"]]

    assert not wrong(line, 8, 512, 0.0)
    assert wrong(line, 8, 520, 0.0) == ["AdvertiseKeys up: 65 bytes, by the law 64"]
    assert wrong(line, 9, 576, 0.0) == ["AdvertiseKeys up: 9 messages, by the law 8"]
    assert not wrong(dataclasses.replace(line, sign=laws.MOST), 8, 500, 0.0)
    assert wrong(dataclasses.replace(line, sign=laws.MOST), 8, 520, 0.0)
    assert wrong(dataclasses.replace(line, payload=6400, sign=laws.EXPECTED), 8, 8 * 6600, 0.0)
    assert not wrong(dataclasses.replace(line, payload=6400, sign=laws.EXPECTED), 8, 8 * 6600, 300.0), "by chance"
    assert "that the law does not know" in wrong(laws.Line(Unmask, laws.UP, 4), 8, 512, 0.0)[1]
    monkeypatch.setattr(comm_cost, "run", lambda *_: [FEDMF | {"wrong": ["Train down: 3 bytes, by the law 4"]}])
    monkeypatch.setattr(sys, "argv", ["comm_cost"])
    assert comm_cost.main() == 1 and "WRONG: fedmf dense secure" in capsys.readouterr().out


def test_the_entropy_of_noise_is_the_bound_of_what_is_sent_in_the_clear(costs, make_config):
    entropy = costs("entropy")
    from fedmpi.bill import laws
    from fedmpi.bill.shape import Setting

    def bounds(flags):
        setting = Setting(make_config(f"--method benchmarks.toy:Method --dataset none --support dense {flags}"))
        bill = laws.price(setting, 4)
        return bill, entropy.bound(setting, bill)

    bill, (clear, down) = bounds("--aggregation plain")
    assert 0.5 < clear / (bill.coordinates * bill.bits / 8) < 1
    # a sum of four shares of the noise has twice the deviation of one: a bit more a coordinate
    assert down - clear == pytest.approx(bill.coordinates / 8)
    bill, (masked, same) = bounds("--aggregation secure")
    assert masked == bill.coordinates * bill.bits / 8 and same == down
    assert bounds("--aggregation plain --epsilon inf")[1] == (None, None)


def test_growth_is_fitted_and_bytes_far_away_are_the_laws(costs):
    scaling = costs("scaling")
    rows = [
        {"parties": n, "degree": k, "client_cpu": 0.01 + 0.002 * k, "server_cpu": n * (0.001 + 1e-5 * k)}
        | {"server_pss": 4e7 + 1e5 * n, "client_pss": 4e7 + 3e5 * n, "hosted": n, "up": 1.0, "down": 1.0}
        for n, k in ((20, 4), (50, 8), (100, 12), (200, 20))
    ]
    found = scaling.fits(rows)
    assert np.allclose(found["client_cpu"].coefficients, [0.01, 0.002]) and found["client_cpu"].residual < 1e-9
    assert scaling.slope(rows, "server_pss")[0] < 0.5 < 0.9 < scaling.slope(rows, "server_cpu")[0] < 1.1
    far = scaling.extrapolate(found, 10_000, 2)
    assert far["client_cpu"] == pytest.approx(0.01 + 0.002 * far["degree"])
    assert far["server_cpu"] == pytest.approx(10_000 * (0.001 + 1e-5 * far["degree"]))
    assert any(
        "measured up to 200 parties" in line for line in scaling.breaks(far, 200, resolve(scaling.flags(200, 2)))
    )


@pytest.mark.launch
def test_all_writes_a_table_and_a_figure(costs, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    every, comm_cost, scaling = costs("all"), costs("comm_cost"), costs("scaling")
    for setting in every.SETTINGS.values():
        assert resolve(every.flags_of(setting)).evaluation.eval_every == 0
    monkeypatch.setattr(every, "SETTINGS", {"FedMF": "--preset demo-recsys --parties 8 --rounds 2"})
    monkeypatch.setattr(comm_cost, "run", lambda *_, **__: [])
    monkeypatch.setattr(scaling, "QUICK", (4, 6, 8))
    monkeypatch.setattr(every, "overhead", lambda: None)
    table, figure = tmp_path / "costs.md", tmp_path / "costs.png"
    monkeypatch.setattr(sys, "argv", ["all", "--quick", "--table", str(table), "--figure", str(figure)])
    assert every.main() == 0
    assert "| FedMF | 8 |" in table.read_text() and "| **1,000,000** |" in table.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "what breaks: rank 0 computes" in capsys.readouterr().out


def test_what_a_round_costs_can_be_measured_without_other_frameworks(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import round_overhead

    monkeypatch.setenv(round_overhead.SIZE, "")  # which it sets
    small = "--parties 3 --parameters 1000 --rounds 2 --turns 1 --json".split()
    monkeypatch.setattr(sys, "argv", ["round_overhead", *small, str(tmp_path / "rows.json")])
    round_overhead.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["machine"]["parameters"] == 1000
    assert [*rows["seconds"]] == ["raw mpi4py", "endpoint", *round_overhead.WHOLE_ROUNDS]
    assert all(len(times) == 2 and min(times) > 0 for times in rows["seconds"].values())
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows["seconds"])
