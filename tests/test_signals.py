"""A signal ends a run after its round, with a checkpoint and a code of its own; what goes on from there is the run that it was."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedmpi.cli import resolve
from fedmpi.main import _without_pmi
from fedmpi.runtime import checkpoint, job, signals

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
MPIRUN = shutil.which("mpirun", path=f"{BIN}:{os.environ.get('PATH', '')}")
TOY = (
    "--preset demo-20 --dataset none --support dense --metrics none --parties 2 --min-cohort 2 --aggregation plain "
    "--checkpoint-every 0 --rounds 8 --method"
).split()
LIMIT = 60  # seconds, far above what any of these needs


# ---- rank 0's word ----


@pytest.fixture
def asked():
    asked = signals._Asked()
    asked.moment = 0
    return asked


def test_before_the_first_round_a_signal_ends_it_at_once(asked):
    with pytest.raises(signals.Ended) as ended:
        asked(signal.SIGUSR1, None)
    assert ended.value.by == "SIGUSR1" and not ended.value.in_good_order


def test_the_first_signal_waits_for_the_round_and_the_second_does_not(asked, capfd):
    asked.round, asked.last = 3, 8
    asked(signal.SIGTERM, None)
    asked(signal.SIGTERM, None)  # the same one, come another way
    asked.at -= 2 * signals.ONCE
    asked(signal.SIGUSR1, None)  # a warning is none the stronger for being repeated
    assert capfd.readouterr().err.splitlines() == [
        "fedmpi: SIGTERM: ending after round 3 with a checkpoint; SIGTERM or Ctrl-C now end it at once"
    ]
    with pytest.raises(KeyboardInterrupt):
        asked(signal.SIGINT, None)


def test_in_the_last_round_there_is_nothing_to_end(asked, capfd):
    asked.round = asked.last = 8
    asked(signal.SIGINT, None)
    assert "round 8 is the last one, the run finishes" in capfd.readouterr().err


@pytest.mark.parametrize("entropy", ["seeded", "os"])
@pytest.mark.parametrize("every", [0, 2])
def test_a_run_that_a_signal_ended_goes_on_to_the_same_end(entropy, every, make_config, run_in_memory, monkeypatch):
    flags = f"--rounds 4 --checkpoint-every {every} --entropy {entropy} --metrics none"
    config = make_config(flags)
    for before in (3, 4):  # rounds 2 and 3 are the last ones before the signal
        with monkeypatch.context() as patched:
            patched.setattr(signals, "end_before", lambda round, last: round == before)  # noqa: B023
            with pytest.raises(signals.Ended) as ended:
                run_in_memory(config if before == 3 else resolve(["--resume", str(config.out)]), 3)
        assert ended.value.in_good_order and checkpoint.latest_round(config.out) == before - 1
        assert not (config.out / "summary.json").exists()
    summary = run_in_memory(resolve(["--resume", str(config.out)]), 2)
    whole = run_in_memory(make_config(flags), 3)
    assert summary["rounds"] == 4 and len((config.out / "rounds.jsonl").read_text().splitlines()) == 4
    if entropy == "seeded":
        assert summary["model_sha256"] == whole["model_sha256"]
    assert summary["epsilon_outside"] == whole["epsilon_outside"], "no round was released twice"


def test_a_run_that_was_ended_before_its_first_round_can_be_resumed(make_config, run_in_memory, monkeypatch):
    config = make_config()
    with monkeypatch.context() as patched:
        patched.setattr(signals, "end_before", lambda round, last: True)
        with pytest.raises(signals.Ended):
            run_in_memory(config, 3)
    begun = config.out / "checkpoint" / "1"  # or before a client's half of the first checkpoint was whole
    begun.mkdir(parents=True)
    (begun / ".parties-00000-00001.npz.17.tmp").touch()
    summary = run_in_memory(resolve(["--resume", str(config.out)]), 3)
    assert summary["model_sha256"] == run_in_memory(make_config(), 3)["model_sha256"]


# ---- what a script is told ----


def test_a_launch_script_learns_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMPI_JOB", str(tmp_path))
    job.note_rank0()
    job.note("done")
    assert (tmp_path / "rank0").read_text().split() == [str(os.getpid()), os.uname().nodename]
    assert (tmp_path / "done").read_text() == "\n" and len(list(tmp_path.iterdir())) == 2
    monkeypatch.setenv("FEDMPI_JOB", str(tmp_path / "elsewhere"))
    job.note("done")  # rank 0 is on a host that does not see the folder
    assert not (tmp_path / "elsewhere").exists()


def test_a_task_of_srun_without_a_pmi_is_known():
    assert _without_pmi({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"})
    assert not _without_pmi({"SLURM_STEP_NUM_TASKS": "3", "OMPI_COMM_WORLD_RANK": "0"}), "mpirun -n 1 inside a job"
    assert not _without_pmi({"SLURM_NTASKS": "3", "SLURM_PROCID": "0"}), "the batch script itself"
    assert not _without_pmi({})


# ---- as a user sends them ----

launched = [pytest.mark.launch, pytest.mark.slow, pytest.mark.skipif(MPIRUN is None, reason="no mpirun")]


def marks(test):
    for mark in launched:
        test = mark(test)
    return test


class Started:
    """A job under launch/local.sh."""

    def __init__(self, folder: Path, *arguments, ranks: int = 3):
        self.out, self.log = folder / "run", folder / "log"
        environ = os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'plugins'}",
            "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
            "TMPDIR": str(folder),
        }
        with open(self.log, "a") as log:
            self.script = subprocess.Popen(
                ["bash", "launch/local.sh", "-n", str(ranks), *map(str, arguments)],
                env=environ,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def reach(self, round: int) -> "Started":
        rows, deadline = self.out / "rounds.jsonl", time.monotonic() + LIMIT
        while not rows.exists() or len(rows.read_text().splitlines()) < round:
            assert time.monotonic() < deadline and self.script.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return self

    def mpirun(self) -> psutil.Process:
        (launcher,) = psutil.Process(self.script.pid).children()
        return launcher

    def end(self) -> tuple[int, list[str]]:
        """Its exit code, and what was said of the end."""
        code = self.script.wait(LIMIT)
        return code, [line for line in self.log.read_text().splitlines() if line.startswith(("fedmpi: ", "launch: "))]


@pytest.fixture
def start(tmp_path):
    jobs = []

    def begin(method="toy_parties:Slow"):
        jobs.append(Started(tmp_path, *TOY, method, "--out", tmp_path / "run"))
        return jobs[-1]

    yield begin
    for one in jobs:
        if one.script.poll() is None:
            for process in [*psutil.Process(one.script.pid).children(recursive=True), one.script]:
                process.kill()
    assert not list(tmp_path.glob("fedmpi-job.*")), "the script's folder is gone with it"


def hash_of(out: Path) -> str:
    return json.loads((out / "summary.json").read_text())["model_sha256"]


@marks
def test_a_signal_to_the_script_ends_the_run_with_a_checkpoint_and_it_goes_on(start, tmp_path):
    job = start().reach(1)
    job.script.send_signal(signal.SIGUSR1)
    resumes = f"./launch/local.sh -n 3 --resume {job.out}"
    code, said = job.end()
    assert code == signals.AGAIN and len(said) == 2, said
    assert said[0].startswith("fedmpi: SIGUSR1: ending after round") and said[1].endswith(f"to go on: {resumes}")
    for number in (signal.SIGTERM, signal.SIGINT):  # whoever resumes may be asked to end as well
        before = checkpoint.latest_round(job.out)
        again = Started(tmp_path, "--resume", job.out).reach(before + 1)
        again.script.send_signal(number)
        code, said = again.end()
        assert code == signals.AGAIN and number.name in said[-1] and checkpoint.latest_round(job.out) > before
    code, _ = Started(tmp_path, "--resume", job.out).end()
    whole = tmp_path / "whole"
    whole.mkdir()
    assert (code, Started(whole, *TOY, "toy_parties:Steady", "--out", whole / "run").end()[0]) == (0, 0)
    assert hash_of(job.out) == hash_of(whole / "run")


@marks
def test_a_second_ctrl_c_ends_it_at_once(start):
    job = start("toy_parties:Endless").reach(1)
    job.script.send_signal(signal.SIGINT)
    time.sleep(2 * signals.ONCE)
    assert job.script.poll() is None, "the round goes on for ever"
    job.script.send_signal(signal.SIGINT)
    sent = time.monotonic()
    code, said = job.end()
    assert code == 130 and time.monotonic() - sent < 10
    assert said[-1] == f"launch: exit code 130; to go on: ./launch/local.sh -n 3 --resume {job.out}"


@marks
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_whatever_becomes_of_the_launcher_exit_code_0_means_that_the_result_is_there(number, start):
    job = start().reach(1)
    ranks = job.mpirun().children(recursive=True)
    job.mpirun().send_signal(number)
    code, said = job.end()
    assert code != 0 and not (job.out / "summary.json").exists()
    assert said[-1].endswith(f"--resume {job.out}")
    assert not psutil.wait_procs(ranks, timeout=20)[1], "nobody lives on"


@marks
def test_exit_code_0_of_a_launcher_is_not_believed_without_a_result(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tmp_path)}
    said = subprocess.run(
        ["bash", "launch/local.sh", "-n", "3"], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    assert said.returncode == 1 and "launch: the job ended without its result" in said.stderr


@marks
def test_client_ranks_leave_signals_to_rank_0(start):
    job = start().reach(1)
    rank0, *clients = sorted(
        (one for one in job.mpirun().children(recursive=True) if "fedmpi.main" in one.cmdline()),
        key=lambda one: int(one.environ()["OMPI_COMM_WORLD_RANK" if "PMIX_RANK" in one.environ() else "PMI_RANK"]),
    )
    for client in clients:
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            client.send_signal(number)
    assert job.end() == (0, []) and (job.out / "summary.json").exists()
