"""Benchmarks are run by hand; here only that each still starts, and that what it would run is something that can be run."""

import importlib
import sys
from pathlib import Path

import pytest

from fedmpi.algorithm import folder_of
from fedmpi.cli import resolve

ROOT = Path(__file__).parent.parent
# One starts MPI by being imported and runs under mpirun; two run under another Python, which has Surprise or Flower.
ELSEWHERE = ("transport", "recsys_surprise", "rounds_flower")
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
