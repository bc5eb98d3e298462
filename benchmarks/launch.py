"""Starts a job under mpirun as a user would, and watches its memory from outside."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from fedmpi.files import write_json

ROOT = Path(__file__).parent.parent


def environment(mpirun: Path, cache: str) -> dict:
    return os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
        "FEDMPI_CACHE": cache,
        "PATH": f"{mpirun.parent}:{os.environ['PATH']}",
    }


def ulfm(mpirun: Path, ranks: int) -> list[str]:
    """A job of so many ranks that lives on when one of them dies, as launch/local.sh starts it."""
    flags = ["--with-ft", "ulfm", "--bind-to", "none", "-n", str(ranks)]
    return [str(mpirun), *flags, sys.executable, "-m", "fedmpi.main"]


RANK_IS_IN = ("PMIX_RANK", "PMI_RANK")  # a process's environment: Open MPI, MPICH


class PeakMemory(threading.Thread):
    """The largest sum of PSS over a job's processes, and the largest of each rank, looked at once a second."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid, self.peak, self.over = pid, 0, threading.Event()
        self.by_rank: dict[int, int] = {}

    def run(self):
        while not self.over.wait(1):
            total = 0
            try:
                for process in psutil.Process(self.pid).children(recursive=True):
                    try:
                        total += (own := process.memory_full_info().pss)
                        self._note(process, own)
                    except psutil.Error:
                        continue
            except psutil.Error:
                break
            self.peak = max(self.peak, total)

    def _note(self, process: psutil.Process, own: int) -> None:
        environ = process.environ()
        rank = next((int(environ[name]) for name in RANK_IS_IN if name in environ), None)
        if rank is not None:
            self.by_rank[rank] = max(own, self.by_rank.get(rank, 0))


def job(
    mpirun: Path,
    ranks: int,
    arguments: list[str],
    cache: str,
    folder: str,
    out: Path | None = None,
    checkout: Path = ROOT,
) -> dict:
    """Run fedmpi on `ranks` ranks; its summary, with wall time, peak memory, in all and by rank, and rounds.jsonl.

    `out`: a place to resume from; `checkout`: whose fedmpi, this one's by default.
    """
    if "--resume" in arguments:
        out = Path(arguments[arguments.index("--resume") + 1])
    else:
        out = out or Path(folder) / f"run-{time.monotonic_ns()}"
        arguments = [*arguments, "--out", out]
    beside = mpirun.parent / "python"  # of the environment that this MPI was installed in, if it was
    command = [mpirun, "-n", str(ranks), beside if beside.exists() else sys.executable, "-m", "fedmpi.main", *arguments]
    start = time.monotonic()
    # `python -m` looks in its own folder first, before what is installed
    process = subprocess.Popen(command, env=environment(mpirun, cache), cwd=checkout, stdout=subprocess.DEVNULL)
    memory = PeakMemory(process.pid)
    memory.start()
    code = process.wait()
    wall = time.monotonic() - start
    memory.over.set()
    if code:
        raise SystemExit(f"the run on {ranks} ranks ended with {code}")
    summary = json.loads((out / "summary.json").read_text())
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    peaks = {"peak_pss": memory.peak, "peak_pss_by_rank": memory.by_rank}
    return summary | {"wall_seconds": wall, **peaks, "round_rows": rounds}


def peer(command: list[str | Path]) -> dict:
    """Another framework's side of a benchmark, under a Python of its own: the seconds of its rounds, which it prints last as a JSON
    list, and its peak memory."""
    settings = environment(Path(command[0]), "") | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=settings, cwd=ROOT)
    memory = PeakMemory(process.pid)
    memory.start()
    out, error = process.communicate()
    memory.over.set()
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}:\n{error[-2000:]}")
    return {"seconds": json.loads(out.splitlines()[-1]), "peak_pss": memory.peak}


def code() -> str:
    """A digest of fedmpi's source: results of another one may differ."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "fedmpi").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class KeptJobs:
    """Jobs whose results are kept in a folder: what is there is not run again, what was interrupted goes on. What was run with
    other arguments under the same name is refused; what another version of fedmpi left is used, and said to be."""

    def __init__(self, folder: Path, ranks: int):
        beside = Path(sys.executable).parent / "mpirun"
        self.mpirun = beside if beside.exists() else Path(shutil.which("mpirun") or beside)
        self.folder, self.ranks = folder.absolute(), ranks
        self.folder.mkdir(parents=True, exist_ok=True)
        self.code, self.older = code(), set()

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.json").exists()

    def run(self, name: str, arguments: list[str], where: list[str] | None = None) -> dict:
        """The job's result by its name, which stands for its arguments; `where` are those that do not change a result."""
        kept, place = self.folder / f"{name}.json", self.folder / "runs" / name
        if not kept.exists():
            command = [*arguments, *(where or [])]
            if (place / "checkpoint" / "latest").exists():
                command = ["--resume", str(place)]
            else:
                shutil.rmtree(place, ignore_errors=True)  # interrupted before its first checkpoint
            found = job(self.mpirun, self.ranks, command, str(self.folder / "cache"), "", place)
            write_json(kept, found | {"arguments": arguments, "code": self.code})
        found = json.loads(kept.read_text())
        if found.get("arguments", arguments) != arguments:
            raise SystemExit(f"{kept}: of a run with other settings; delete it, or choose another --keep")
        if found.get("code") != self.code:
            self.older.add(name)
        return found

    def say_what_is_older(self) -> None:
        if self.older:
            print(
                f"{len(self.older)} of these results are of another version of fedmpi; an empty --keep has them run again"
            )
