"""A plain round at the size of MovieLens 10M: time, memory, and cost against the number of ratings.

    python -m benchmarks.recsys_scale [--ratings 1250000 2500000 5000000 10000054] [--ranks 21] [--json FILE]

Generated ratings of ml-10m's shape, 71,567 parties and 10,681 items. Every party's sparse rows are its own content of a message;
a rank adds nothing up. Q is downloaded once a rank and counted for every party in the logical column. Bars: a round within 15 s
on 2 cores, all ranks together within 8 GiB PSS, and cost linear in ratings.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import job

PARTIES, ITEMS = 71_567, 10_681


def main() -> None:
    parser = arguments("recsys_scale", __doc__)
    parser.add_argument("--ratings", type=int, nargs="+", default=[1_250_000, 2_500_000, 5_000_000, 10_000_054])
    parser.add_argument("--ranks", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--factors", type=int, default=20)
    parser.add_argument("--method", default="fedmf")
    options = parser.parse_args()
    facts = machine("mpi4py", "numpy", "scipy")
    show_machine(facts)
    print(
        f"\n{'ratings':>10} {'round [s]':>10} {'CPU/round [s]':>14} {'CPU us/rating':>14} {'peak PSS [GiB]':>15} {'up/party':>9}"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ratings in options.ratings:
            flags = f"--preset demo-recsys --method {options.method} --parties {PARTIES} --items {ITEMS} --ratings {ratings} "
            flags += f"--factors {options.factors} --item-reg 60 --rounds {options.rounds} --eval-every 0 "
            flags += "--aggregation plain --support own"
            run = job(Path(sys.executable).parent / "mpirun", options.ranks, flags.split(), f"{folder}/cache", folder)
            times = [row["seconds"] for row in run["round_rows"]]
            times[-1] -= run["seconds"]["evaluation"]["wall"]
            # Round 1 includes what every rank does once; the median over rounds is a round.
            row = {"ratings": ratings, "round_seconds": times, "peak_pss": run["peak_pss"]}
            phases = ("send model", "local work", "encode", "MPI", "wait for updates", "aggregate", "step")
            row["cpu_per_round"] = sum(run["seconds"].get(name, {"cpu": 0})["cpu"] for name in phases) / options.rounds
            row["bytes_up_logical"] = sum(run["bytes_up"]["logical"].values()) / PARTIES / options.rounds
            rows.append(row)
            print(
                f"{ratings:>10,} {statistics.median(times):>10.1f} {row['cpu_per_round']:>14.1f} "
                f"{1e6 * row['cpu_per_round'] / ratings:>14.2f} {run['peak_pss'] / 2**30:>15.2f} {row['bytes_up_logical']:>9,.0f}",
                flush=True,
            )
    save(options.json, facts, rows=rows)


if __name__ == "__main__":
    main()
