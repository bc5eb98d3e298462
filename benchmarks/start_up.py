"""What it takes to start a job: CPU and wall seconds of one round on 21 ranks, where starting is nearly all there is.

    python -m benchmarks.start_up [--times 3] [--ranks 21] [--jobs toy image] [--json FILE]
    python -m benchmarks.against REV --times 8 -- start_up --times 1

`toy` has no data and imports no torch, `image` is the default run cut to one round. CPU is that of all ranks and the launcher, and says
more than the wall clock of a machine with fewer cores than ranks. `startup` is rank 0's way from its first instruction to the first model
that it sends. The first job of each kind is not counted: it prepares the data.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import job

JOBS = {
    "toy": "--method benchmarks.toy:Method --dataset none --support dense --metrics none --rounds 1 --preset demo-20",
    "image": "--rounds 1 --local-epochs 0 --metrics none",
}


def start(mpirun: Path, ranks: int, flags: str, folder: str) -> dict[str, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    summary = job(mpirun, ranks, flags.split(), f"{folder}/cache", folder)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": cpu, "wall": wall, "startup": summary["startup_seconds"]}


def main() -> None:
    parser = arguments("start_up", __doc__)
    parser.add_argument("--times", type=int, default=3, help="jobs of each kind that are counted")
    parser.add_argument("--ranks", type=int, default=21)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    options = parser.parse_args()
    mpirun = Path(sys.executable).parent / "mpirun"
    facts = machine("mpi4py")
    show_machine(facts)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.jobs:
            runs = [start(mpirun, options.ranks, JOBS[name], folder) for _ in range(options.times + 1)][1:]
            row = {figure: median(run[figure] for run in runs) for figure in runs[0]}
            rows.append({"job": name, "ranks": options.ranks, **row, "runs": runs if options.times > 1 else []})
            print(name, "  ".join(f"{figure} {value:.2f} s" for figure, value in row.items()), flush=True)
    save(options.json, facts, rows=rows)


if __name__ == "__main__":
    main()
