"""Secure aggregation of many parties over real MPI: time, memory and bytes of a round, no training.

    python -m benchmarks.secagg_mpi [--json FILE] [--parties 1000] [--ranks 21] [--graph regular] [--dropout mask=0.02]
                                    [--keys round batch:16] [--rounds 16]

Every party sends 33,640 coordinates (the length of ml-100k's item factors at rank 20). With several --keys the jobs take turns, and the last
column is the ratio to the first. Seconds and bytes are means over all rounds, so that keys of a batch count with their part.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import job

CLIENT = ("DH", "Shamir split", "AEAD", "PRG", "encode", "MPI")
MAKING = ("DH", "Shamir split", "AEAD")  # what keys cost a party, wherever in the round
SERVER = ("aggregate", "Shamir combine")


def main() -> None:
    parser = arguments("secagg_mpi", __doc__)
    parser.add_argument("--parties", type=int, nargs="+", default=[1000])
    parser.add_argument("--ranks", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graph", nargs="+", default=["regular"], choices=["regular", "complete"])
    parser.add_argument("--dropout", default="mask=0.02,unmask=0.01")
    parser.add_argument("--keys", nargs="+", default=["round"])
    options = parser.parse_args()
    facts = machine("mpi4py", "numpy", "cryptography", "pycryptodome")
    show_machine(facts)
    print(f"dropout: {options.dropout}; CPU of a party, and of rank 0, per round")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for parties in options.parties:
            for graph in options.graph:
                found = [job_of(parties, graph, keys, options, folder) for keys in options.keys]
                rows += found
                show(parties, graph, found)
    save(options.json, facts, runs=rows)


def job_of(parties: int, graph: str, keys: str, options, folder: str) -> dict:
    toy = "--preset demo-20 --method benchmarks.toy:Method --dataset none --support dense --metrics none".split()
    sizes = ["--parties", str(parties), "--rounds", str(options.rounds), "--graph", graph, "--keys", keys]
    flags = [*toy, *sizes, "--epsilon", "8", "--dropout", options.dropout, "--checkpoint-every", "0"]
    run = job(Path(sys.executable).parent / "mpirun", options.ranks, flags, folder, folder)
    return {
        "parties": parties,
        "graph": graph,
        "keys": keys,
        "rounds": options.rounds,
        **figures(run, options.rounds),
        **run,
    }


def figures(run: dict, rounds: int) -> dict[str, float]:
    """Of one round, in the mean; milliseconds of a party, seconds of rank 0 and by the clock."""
    each = run["parties"] * rounds
    cpu = {name: run["seconds"].get(name, {}).get("cpu", 0.0) for name in (*CLIENT, *SERVER)}
    return {
        "round [s]": statistics.fmean(row["seconds"] for row in run["round_rows"]),
        "a party, keys [ms]": 1000 * sum(cpu[name] for name in MAKING) / each,
        "a party, all [ms]": 1000 * sum(cpu[name] for name in CLIENT) / each,
        **{f"  {name} [ms]": 1000 * cpu[name] / each for name in CLIENT},
        **{f"rank 0, {name} [s]": cpu[name] / rounds for name in SERVER},
        "up [kB]": sum(run["bytes_up"]["logical"].values()) / each / 1000,
        "down [kB]": sum(run["bytes_down"]["logical"].values()) / each / 1000,
        "peak memory [GiB PSS]": run["peak_pss"] / 2**30,
    }


def show(parties: int, graph: str, found: list[dict]) -> None:
    first = found[0]
    print(
        f"\n{parties} parties on {first['ranks']} ranks, {graph} graph, {first['dropouts']['planned']} dropped in all"
    )
    print(f"  {'keys':<24}" + "".join(f"{run['keys']:>12}" for run in found) + (f"{'ratio':>9}" if found[1:] else ""))
    for name in figures(first, first["rounds"]):
        ratio = f"{found[-1][name] / first[name]:>9.2f}" if found[1:] and first[name] else ""
        print(f"  {name:<24}" + "".join(f"{run[name]:>12.2f}" for run in found) + ratio)
    print(f"  {'failed rounds':<24}" + "".join(f"{run['dropouts']['failed_rounds']:>12}" for run in found))


if __name__ == "__main__":
    main()
