"""What .ci/run relies on: a test that it requires does not pass by being skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = """
import pytest

@pytest.mark.slurm
def test_of_a_cluster():
    pytest.skip("no sbatch here")

def test_of_something_else():
    pytest.skip("not today")
"""


@pytest.mark.parametrize(
    "required, outcome", [("", "2 skipped"), ("netns", "2 skipped"), ("slurm,netns", "1 failed, 1 skipped")]
)
def test_what_is_required_may_not_be_skipped(required, outcome, tmp_path):
    (tmp_path / "test_it.py").write_text(SKIPPED)
    said = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env=os.environ | {"FEDMPI_REQUIRE": required, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert outcome in said.stdout.splitlines()[-1], said.stdout
    assert said.returncode == ("failed" in outcome) and ("no sbatch here" in said.stdout) == ("failed" in outcome)
