"""The default run: how long, how much memory, how long until its first model message, the same model on every placement.

    python -m benchmarks.demo_run [--json FILE] [--preset demo] [--ranks 21 6 2] [--mpirun PATH ...]

Beside each other in one run: 21 bare processes that only `import torch, mpi4py` (the floor of any start), then the job. The
bar for the start is 1.25 times the floor. Memory is PSS, summed over all ranks once a second, and the largest sum is shown.
Each --mpirun adds another MPI to compare: give the mpirun of an environment of its own, its python stands beside it.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import environment, job


def bare_import(mpirun: Path, ranks: int, cache: str) -> float:
    command = [mpirun, "-n", str(ranks), mpirun.parent / "python", "-c", "import torch, mpi4py"]
    start = time.monotonic()
    subprocess.run(command, env=environment(mpirun, cache), check=True)
    return time.monotonic() - start


def main() -> None:
    parser = arguments("demo_run", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[21, 6, 2], help="placements of the parties")
    parser.add_argument("--preset", default="demo", help="demo, the default run, or demo-20")
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
                row = job(mpirun, ranks, ["--preset", options.preset], cache, folder)
                row["mpi"] = " ".join(row["mpi"].split(",")[0].split())
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
