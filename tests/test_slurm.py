"""The scripts of launch/slurm: what they say without a cluster, and a real table on a real one where there is one."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUBMIT = ROOT / "launch" / "slurm" / "paper_table.sh"
SMALL = "--dataset digits --network cnn --rounds 2 --samples-per-party 20 --shrink 1"


def submit(*arguments, path=None, **extra):
    environment = os.environ | ({"PATH": path} if path else {}) | extra
    return subprocess.run(
        ["/bin/bash", SUBMIT, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


def test_without_a_table_it_says_how_to_be_called():
    said = submit()
    assert said.returncode == 2 and "paper_table.sh TABLE" in said.stderr


def test_without_slurm_it_says_what_to_do_instead(tmp_path):
    for tool in ("dirname", "sed"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    said = submit("II", "--seeds", "1", path=str(tmp_path))
    assert said.returncode == 2
    assert said.stderr.splitlines() == [
        "paper_table.sh: no sbatch on PATH; without SLURM: python -m benchmarks.paper_tables II --seeds 1"
    ]


def test_a_table_that_does_not_exist_is_refused_before_anything_is_submitted(tmp_path):
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    (tmp_path / "sbatch").chmod(0o755)
    said = submit("XI", path=f"{tmp_path}:{os.environ['PATH']}")
    assert said.returncode == 2 and "invalid choice: 'XI'" in said.stderr
    assert not (tmp_path / "submitted").exists()


def cluster() -> bool:
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return False
    return bool(subprocess.run(["sinfo", "--noheader", "--states=idle,mixed"], capture_output=True).stdout.strip())


@pytest.mark.launch
@pytest.mark.skipif(not cluster(), reason="no SLURM cluster answers here")
def test_a_table_on_a_cluster(tmp_path):
    cut = ["--columns", "cifar10-s5", "--rows", "CENTAUR", "--seeds", "1", "--ranks", "3", "--scale", "0.01"]
    said = submit("II", *cut, "--keep", str(tmp_path / "keep"), "--extra", SMALL, FEDMPI_CACHE=str(tmp_path / "cache"))
    assert said.returncode == 0 and said.stdout.startswith("2 runs in job "), said.stderr
    table = ROOT / said.stdout.split()[-1]
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (table.exists() and "\n  CENTAUR" in table.read_text()):
        time.sleep(2)
    row = next(line for line in table.read_text().splitlines() if line.startswith("  CENTAUR"))
    table.unlink()
    assert "53.92" in row and "simulated" in row, "the paper's figure, ours, and what epsilon is worth"
    assert len(list((tmp_path / "keep").glob("*.json"))) == 2
