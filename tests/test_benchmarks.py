"""Benchmarks are run by hand; here only that each still starts, and that what it would run is something that can be run."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from fedmpi.algorithm import folder_of
from fedmpi.cli import resolve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# One starts MPI by being imported and runs under mpirun; the others run under another Python, which has Surprise, Flower or APPFL.
ELSEWHERE = ("transport", "recsys_surprise", "rounds_flower", "overhead_flower", "overhead_appfl")
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
