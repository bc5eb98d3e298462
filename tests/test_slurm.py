"""The scripts of launch/slurm: what they say without a cluster, and a real table on a real one where there is one."""

import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SUBMIT = ROOT / "launch" / "slurm" / "paper_table.sh"
SMALL = "--dataset digits --network cnn --rounds 2 --samples-per-party 20 --shrink 1"


def submit(*arguments, path=None, stdin=subprocess.DEVNULL, **extra):
    environment = os.environ | ({"PATH": path} if path else {}) | extra
    return subprocess.run(
        ["/bin/bash", SUBMIT, *arguments], env=environment, stdin=stdin, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def stand_in(tmp_path):
    """Submits to an sbatch that only writes down what it was asked: `answer` is typed at a terminal, None: there is none."""
    bin, queued = tmp_path / "bin", tmp_path / "queued"
    bin.mkdir()
    (bin / "sbatch").write_text(f'#!/bin/sh\necho "$@" >> {queued}\necho 17\n')
    (bin / "sbatch").chmod(0o755)
    path = f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    cut = ["II", "--columns", "cifar10-s5", "--rows", "CENTAUR", "--seeds", "3", "--keep", str(tmp_path / "keep")]

    def run(*arguments, answer=None):
        if answer is None:
            said = submit(*cut, *arguments, path=path)
        else:
            ours, theirs = pty.openpty()
            os.write(ours, answer.encode())
            said = submit(*cut, *arguments, path=path, stdin=theirs)
            os.close(ours)
            os.close(theirs)
        return said, queued.read_text().splitlines() if queued.exists() else []

    return run


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


def test_a_table_whose_data_is_not_there_is_not_queued(stand_in, tmp_path):
    for where, hint in ((tmp_path / "nowhere", ""), (None, ", or give --data-dir")):
        said, queued = stand_in("--yes", *(["--data-dir", str(where)] if where else []))
        folder = where or tmp_path / "keep" / "cache" / "downloads"
        assert said.returncode == 2 and not queued
        (line,) = said.stderr.splitlines()
        assert line.startswith(
            f"paper_tables: cifar10: {folder}/cifar-10-batches-py/data_batch_1 is missing; expected in"
        )
        assert line.endswith(f"there (or cifar-10-binary.tar.gz){hint}")


def test_a_table_is_queued_once_it_is_said_how_long_it_is_and_somebody_agrees(stand_in):
    for answer in ("n\n", "\n"):
        said, queued = stand_in("--extra", SMALL, answer=answer)
        assert said.returncode == 1 and said.stderr.endswith("nothing queued\n") and not queued
    said, queued = stand_in("--extra", SMALL, "--ranks", "3", answer="y\n")
    assert said.returncode == 0, said.stderr
    plan = "table II: 6 of 6 runs to do, of 2 rounds with 20 parties on 3 ranks; the limit of a run is 12:00:00"
    assert said.stderr.splitlines()[0] == plan and "queue it? [y/N]" in said.stderr
    assert len(queued) == 2 and "--ntasks=3 --array=0-5" in queued[0] and "--dependency=afterany:17" in queued[1]
    assert said.stdout.startswith("6 runs in job 17; the table comes with job 17")


def test_without_a_terminal_it_needs_to_be_told(stand_in):
    said, queued = stand_in("--extra", SMALL)
    assert said.returncode == 2 and not queued
    assert said.stderr.splitlines()[1:] == [
        "paper_table.sh: nothing queued: there is no terminal to ask at; --yes queues it"
    ]
    said, queued = stand_in("--yes", "--extra", SMALL)
    assert said.returncode == 0 and len(queued) == 2
    assert not any("--yes" in line for line in queued), "a word for the script, not for the runs"


def cluster() -> bool:
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return False
    return bool(subprocess.run(["sinfo", "--noheader", "--states=idle,mixed"], capture_output=True).stdout.strip())


@pytest.mark.launch
@pytest.mark.skipif(not cluster(), reason="no SLURM cluster answers here")
def test_a_table_on_a_cluster(tmp_path):
    cut = ["--columns", "cifar10-s5", "--rows", "CENTAUR", "--seeds", "1", "--ranks", "3", "--scale", "0.01"]
    said = submit(
        "II", "--yes", *cut, "--keep", str(tmp_path / "keep"), "--extra", SMALL, FEDMPI_CACHE=str(tmp_path / "cache")
    )
    assert said.returncode == 0 and said.stdout.startswith("2 runs in job "), said.stderr
    table = ROOT / said.stdout.split()[-1]
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (table.exists() and "\n  CENTAUR" in table.read_text()):
        time.sleep(2)
    row = next(line for line in table.read_text().splitlines() if line.startswith("  CENTAUR"))
    table.unlink()
    assert "53.92" in row and "simulated" in row, "the paper's figure, ours, and what epsilon is worth"
    assert len(list((tmp_path / "keep").glob("*.json"))) == 2
