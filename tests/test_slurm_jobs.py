"""launch/slurm/fedmpi.sbatch on a real SLURM, which the tests start themselves: run, time limit, checkpoint, requeue, resume."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import Cluster, Missing

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.slurm, pytest.mark.launch, pytest.mark.slow]
TOY = (
    "--preset demo-20 --dataset none --support dense --metrics none --parties 2 --min-cohort 2 --aggregation plain "
    "--checkpoint-every 0 --rounds 120"
).split()
# A round is half a second until the job is queued again; then nobody needs to wait for one.
SLOW = [*TOY, "--method", "toy_parties:SlowAtFirst"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    try:
        cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    except Missing as missing:
        pytest.skip(str(missing))
    cluster.environ |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'plugins'}",
        "PATH": f"{BIN}:{cluster.environ['PATH']}",
        "VIRTUAL_ENV": str(BIN.parent),
        "FEDMPI_RUNS": str(cluster.folder / "runs"),
    }
    yield cluster
    cluster.stop()


class Job:
    def __init__(self, cluster, *options, how: str, arguments):
        self.cluster = cluster
        script = ["launch/slurm/fedmpi.sbatch", *arguments]
        options = ["--parsable", "--ntasks=3", f"--output={cluster.folder}/%j.out", *options]
        said = cluster.run("sbatch", *options, *script, FEDMPI_START=how)
        assert said.returncode == 0, said.stderr
        self.number = said.stdout.strip()
        self.out = cluster.folder / "runs" / f"fedmpi-{self.number}"

    def said(self) -> str:
        path = self.cluster.folder / f"{self.number}.out"
        return path.read_text() if path.exists() else ""

    def facts(self) -> dict:
        said = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def rounds(self) -> int:
        path = self.out / "rounds.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait(self, there, what: str, patience: float = 90) -> None:
        deadline = time.monotonic() + patience
        while not there():
            assert time.monotonic() < deadline, f"{what}: {self.facts()}\n{self.said()}"
            time.sleep(0.3)

    def end(self) -> dict:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: self.facts().get("JobState") in over, "did not end")
        return self.facts()


def hash_of(out: Path) -> str:
    return json.loads((out / "summary.json").read_text())["model_sha256"]


@pytest.fixture(scope="module")
def limited(cluster):
    """A job that its time limit ends, begun first: SLURM looks at limits every half minute only."""
    return Job(cluster, "--time=1", "--signal=B:USR1@20", how="mpirun", arguments=SLOW)


@pytest.fixture(scope="module")
def wanted(cluster):
    """The model of a run that nobody interrupts."""
    out = cluster.folder / "plain"
    command = ["bash", "launch/local.sh", "-n", "3", *TOY, "--method", "toy_parties:Steady", "--out", out]
    said = cluster.run(*command)
    assert said.returncode == 0, said.stderr
    return hash_of(out)


def test_srun_with_the_wrong_mpi_is_said_once(cluster, limited):
    said = cluster.run("srun", "--mpi=none", "--ntasks=3", sys.executable, "-m", "fedmpi.main", *TOY)
    lines = [line for line in said.stderr.splitlines() if line.startswith("fedmpi: ")]
    assert said.returncode == 2 and len(lines) == 1 and "Traceback" not in said.stderr, said.stderr
    assert "srun --mpi=pmix" in lines[0] and "srun --mpi=pmi2" in lines[0] and "srun --mpi=list" in lines[0]


def test_a_job_started_by_srun_that_is_warned_is_queued_again_and_goes_on(cluster, limited, wanted):
    mpi = "pmi2" if "HYDRA" in subprocess.getoutput(f"{BIN}/mpirun --version").upper() else "pmix"
    if not cluster.has(mpi):
        pytest.skip(f"srun --mpi={mpi} does not work here (Debian: libpmix-dev)")
    job = Job(cluster, how=mpi, arguments=SLOW)
    job.wait(lambda: job.rounds() >= 2, "does not begin")
    assert cluster.run("scancel", "--signal=USR1", "--batch", job.number).returncode == 0
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "1"), job.said()
    assert f"srun --mpi={mpi} --kill-on-bad-exit=1 -n 3 python -m fedmpi.main --resume {job.out}" in job.said()
    assert hash_of(job.out) == wanted


def test_a_job_at_its_time_limit_checkpoints_is_queued_again_and_goes_on(limited, wanted):
    facts = limited.end()
    said = limited.said()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("COMPLETED", "0:0", "1"), said
    (kept,) = re.findall(r"^fedmpi: SIGUSR1: ending after round (\d+) with a checkpoint", said, re.M)
    assert 0 < int(kept) < 120 and f"$ scontrol requeue {limited.number}" in said
    assert "--resume" in said and hash_of(limited.out) == wanted


def test_a_job_that_fails_ends_with_its_exit_code(cluster):
    job = Job(cluster, how="mpirun", arguments=["--preset", "nope"])
    assert job.end()["ExitCode"] == "2:0" and "preset = nope" in job.said()


def test_an_array_has_a_run_for_each_seed(cluster):
    job = Job(cluster, "--array=3-4", how="mpirun", arguments=[*TOY, "--rounds", "2", "--method", "toy_parties:Steady"])
    outs = [job.out.with_name(f"{job.out.name}-s{seed}") for seed in (3, 4)]
    job.wait(lambda: all((out / "summary.json").exists() for out in outs), "did not end")
    assert [json.loads((out / "summary.json").read_text())["seed"] for out in outs] == [3, 4]
    assert hash_of(outs[0]) != hash_of(outs[1])
