"""Ranks that are killed and stopped, under a real mpirun with ULFM; benchmarks/chaos.py does it a hundred times and at random."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import SETTINGS, planned, sums

pytestmark = [pytest.mark.slow, pytest.mark.launch]
ROOT = Path(__file__).parent.parent


def job(out, faults, *flags, ranks=5, pace=0):
    """Through launch/local.sh, whose exit code is promised."""
    environ = os.environ | {"FEDMPI_FAULT": faults, "FEDMPI_PACE": str(pace)}
    command = ["bash", "launch/local.sh", "-n", ranks, *SETTINGS, "--aggregation", "secure", "--out", out, *flags]
    return subprocess.run([*map(str, command)], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120)


def check(tmp_path, done, *flags):
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    plan = summary["dropouts"]["lost"]["plan"]
    model, wanted = planned(tmp_path, plan, *flags)
    assert summary["model_sha256"] == model and sums(tmp_path / "run") == wanted
    return summary


@pytest.mark.parametrize(
    "faults, flags",
    [
        ("2:MaskedInput:3:kill", ("--on-loss", "drop")),
        ("1:Unmask:3:kill,4:Checkpoint:4:kill", ("--on-loss", "adopt")),
        ("3:Stop:0:kill", ()),
        ("2:Checkpoint:4:stop", ("--on-loss", "drop")),
    ],
)
def test_a_rank_that_fails_costs_its_parties_and_nothing_else(faults, flags, tmp_path):
    done = job(tmp_path / "run", faults, *flags, "--log", tmp_path / "log")
    summary = check(tmp_path, done)
    ranks = {int(fault.split(":")[0]) for fault in faults.split(",")}
    assert {loss["rank"] for loss in summary["dropouts"]["lost"]["ranks"]} == ranks
    for rank in ranks:
        assert (
            len(re.findall(f": rank {rank} (is gone|has not been heard of for 5 s); parties .* left out", done.stdout))
            == 1
        )


@pytest.mark.parametrize("faults", ["2:part:0:kill", "2:part:0:stop,3:part:0:kill"])
def test_a_rank_that_fails_after_its_last_word_costs_nothing(faults, tmp_path):
    """MPI_Finalize waited for one that was stopped there, for ever, and failed everybody over one that was killed."""
    done = job(tmp_path / "run", faults)
    lost = check(tmp_path, done)["dropouts"]["lost"]
    assert lost["plan"] == [] and "failed" not in done.stderr
    assert {loss["rank"] for loss in lost["ranks"]} <= {2, 3}, "noticed, if the others were still at it"


def test_the_log_says_who_did_what_and_who_was_waited_for(tmp_path):
    done = job(tmp_path / "run", "", "--rounds", "2", "--log", tmp_path / "log")
    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / "log" / f"rank-{rank:05d}.log").read_text() for rank in range(5)]
    assert re.search(r"^\d{4}-\d\d-\d\d .* round 1, MaskedInput: waiting for parties \(0, 1,", logs[0], re.M)
    assert (
        "handshake: waiting for Ready of ranks [1, 2, 3, 4]" in logs[0]
        and "from rank 1: MaskedInput, round 2" in logs[0]
    )
    for log in logs[1:]:
        assert "from rank 0: Train, round 1" in log and "to rank 0: MaskedInput, round 1, party" in log
    words = r"[\d:. -]+ (to rank|from rank|round \d|test figures|handshake|end of|checkpoint|has waited|rank \d)"
    assert all(re.match(words, line) for log in logs for line in log.splitlines()), "and nothing of what is in them"


def test_a_rank_that_is_stopped_for_a_while_comes_back(tmp_path):
    flags = "--on-loss", "adopt", "--rounds", "24", "--checkpoint-every", "4"
    done = job(tmp_path / "run", "2:work:3:8", *flags, pace=0.05)
    check(tmp_path, done, "--rounds", "24")
    assert "rank 2 is heard of again" in done.stdout and "back on rank 2" in done.stdout


def test_without_ulfm_the_launcher_ends_the_job_and_it_can_be_resumed(tmp_path):
    command = [Path(sys.executable).parent / "mpirun", "-n", "5", sys.executable, "-m", "fedmpi.main"]
    environ = os.environ | {"FEDMPI_FAULT": "2:MaskedInput:5:kill"}
    wanted, _ = planned(tmp_path, [])
    for flags in ([*SETTINGS, "--out", tmp_path / "run"], ["--resume", tmp_path / "run"]):
        done = subprocess.run(
            [*map(str, [*command, *flags])], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode == 0) == (tmp_path / "run" / "summary.json").exists()
        environ = os.environ
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["model_sha256"] == wanted
