"""Secure aggregation of many parties over real MPI: time, memory and bytes of a round, no training.

    python -m benchmarks.secagg_mpi [--json FILE] [--parties 1000] [--ranks 21] [--graph regular] [--dropout mask=0.02]

Every party sends 33,640 coordinates (the length of ml-100k's item factors at rank 20).
"""

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import job

COSTS = ("encode", "DH", "Shamir split", "AEAD", "PRG", "MPI", "aggregate", "Shamir combine")


def main() -> None:
    parser = arguments("secagg_mpi", __doc__)
    parser.add_argument("--parties", type=int, nargs="+", default=[1000])
    parser.add_argument("--ranks", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graph", nargs="+", default=["regular"], choices=["regular", "complete"])
    parser.add_argument("--dropout", default="mask=0.02,unmask=0.01")
    options = parser.parse_args()
    facts = machine("mpi4py", "numpy", "cryptography", "pycryptodome")
    show_machine(facts)
    print(f"dropout: {options.dropout}; CPU times over all ranks, per round")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for parties in options.parties:
            for graph in options.graph:
                toy = "--preset demo-20 --method benchmarks.toy:Method --dataset none --support dense --metrics none".split()
                sizes = ["--parties", str(parties), "--rounds", str(options.rounds), "--graph", graph]
                flags = [*toy, *sizes, "--epsilon", "8", "--dropout", options.dropout, "--checkpoint-every", "0"]
                run = job(Path(sys.executable).parent / "mpirun", options.ranks, flags, folder, folder)
                rows.append({"parties": parties, "graph": graph, **run})
                show(parties, graph, run, options.rounds)
    save(options.json, facts, runs=rows)


def show(parties: int, graph: str, run: dict, rounds: int) -> None:
    each = statistics.median(row["seconds"] for row in run["round_rows"])
    print(
        f"\n{parties} parties on {run['ranks']} ranks, {graph} graph, {run['dropouts']['planned']} dropped in {rounds} rounds"
    )
    print(f"  round            {each:8.1f} s (median), {run['dropouts']['failed_rounds']} failed")
    print(f"  peak memory      {run['peak_pss'] / 2**30:8.2f} GiB PSS over all ranks")
    for name, key in (("up", "bytes_up"), ("down", "bytes_down")):
        size = sum(run[key]["logical"].values()) / parties / rounds
        print(f"  bytes {name:<10} {size:8.0f} a party and round")
    for cost in COSTS:
        if cost in run["seconds"]:
            print(f"  {cost:<16} {run['seconds'][cost]['cpu'] / rounds:8.2f} s CPU")


if __name__ == "__main__":
    main()
