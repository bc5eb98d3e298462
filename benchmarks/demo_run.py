"""The default run: how long, how much memory, how long until its first model message, the same model on every placement.

    python -m benchmarks.demo_run [--json FILE] [--ranks 21 6 2] [--mpirun PATH ...]

Beside each other in one run: 21 bare processes that only `import torch, mpi4py` (the floor of any start), then the job. The
bar for the start is 1.25 times the floor. Memory is PSS, summed over all ranks once a second, and the largest sum is shown.
Each --mpirun adds another MPI to compare: give the mpirun of an environment of its own, its python stands beside it.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.common import arguments, machine, save, show_machine

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


class PeakMemory(threading.Thread):
    """The largest sum of PSS over a job's processes, looked at once a second."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid, self.peak, self.over = pid, 0, threading.Event()

    def run(self):
        while not self.over.wait(1):
            total = 0
            try:
                for process in psutil.Process(self.pid).children(recursive=True):
                    try:
                        total += process.memory_full_info().pss
                    except psutil.Error:
                        continue
            except psutil.Error:
                break
            self.peak = max(self.peak, total)


def job(mpirun: Path, ranks: int, cache: str, folder: str) -> dict:
    out = Path(folder) / f"run-{time.monotonic_ns()}"
    python = mpirun.parent / "python"
    command = [mpirun, "-n", str(ranks), python, "-m", "fedmpi.main", "--parties", "20", "--out", out]
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment(mpirun, cache), cwd=ROOT, stdout=subprocess.DEVNULL)
    memory = PeakMemory(process.pid)
    memory.start()
    code = process.wait()
    wall = time.monotonic() - start
    memory.over.set()
    if code:
        raise SystemExit(f"the run on {ranks} ranks ended with {code}")
    summary = json.loads((out / "summary.json").read_text())
    return {
        "mpi": summary["mpi"].split(",")[0],
        "ranks": ranks,
        "wall_seconds": wall,
        "startup_seconds": summary["startup_seconds"],
        "peak_pss": memory.peak,
        "accuracy": summary["accuracy"],
        "model_sha256": summary["model_sha256"],
    }


def bare_import(mpirun: Path, ranks: int, cache: str) -> float:
    command = [mpirun, "-n", str(ranks), mpirun.parent / "python", "-c", "import torch, mpi4py"]
    start = time.monotonic()
    subprocess.run(command, env=environment(mpirun, cache), check=True)
    return time.monotonic() - start


def main() -> None:
    parser = arguments("demo_run", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[21, 6, 2], help="placements of the 20 parties")
    parser.add_argument("--mpirun", type=Path, nargs="*", default=[], help="mpirun of further environments")
    options = parser.parse_args()
    launchers = [Path(sys.executable).parent / "mpirun", *(path.absolute() for path in options.mpirun)]
    facts = machine("torch", "mpi4py", "numpy")
    show_machine(facts)
    rows, floors = [], []
    with tempfile.TemporaryDirectory() as folder:
        cache = f"{folder}/cache"
        print(
            f"\n{'MPI':<18} {'ranks':>5} {'wall [s]':>9} {'first model [s]':>16} {'peak PSS [GiB]':>15}  model_sha256"
        )
        for mpirun in launchers:
            for ranks in options.ranks:
                floor = bare_import(mpirun, ranks, cache)
                row = job(mpirun, ranks, cache, folder)
                rows.append(row)
                floors.append({"mpi": row["mpi"], "ranks": ranks, "seconds": floor})
                print(
                    f"{row['mpi']:<18} {ranks:>5} {row['wall_seconds']:>9.1f} {row['startup_seconds']:>16.1f} "
                    f"{row['peak_pss'] / 2**30:>15.2f}  {row['model_sha256'][:16]}"
                )
                print(
                    f"{'':<18} {ranks:>5} bare import of torch and mpi4py {floor:.1f} s: "
                    f"ratio of the start {row['startup_seconds'] / floor:.2f}"
                )
    same = len({row["model_sha256"] for row in rows}) == 1
    print("the same model everywhere" if same else "DIFFERENT MODELS")
    save(options.json, facts, runs=rows, floors=floors, same_model=same)
    sys.exit(not same)


if __name__ == "__main__":
    main()
