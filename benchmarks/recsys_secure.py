"""943 users as parties of the protocol: a secure round of FedMMF on ml-100k, regular graph and complete graph beside it.

    python -m benchmarks.recsys_secure --data-dir DIR [--graphs regular complete] [--keys round batch:16] [--rounds 2] [--json FILE]

Also the same model by model_sha256 on 21, 6 and 2 ranks, plain, and secure on 21 ranks.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import job


def main() -> None:
    parser = arguments("recsys_secure", __doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["regular", "complete"], choices=("regular", "complete"))
    parser.add_argument("--keys", nargs="+", default=["round"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[21, 6, 2], help="placements of the plain run")
    options = parser.parse_args()
    facts = machine("mpi4py", "numpy", "cryptography", "pycryptodome")
    show_machine(facts)
    data = ["--data-dir", str(options.data_dir.absolute())] if options.data_dir else []
    mpirun, rows = Path(sys.executable).parent / "mpirun", []
    print(
        f"\n{'aggregation':<30} {'ranks':>5} {'round [s]':>10} {'CPU/round [s]':>14} {'up/user':>10} {'down/user':>10}  model_sha256"
    )
    with tempfile.TemporaryDirectory() as folder:
        placements = [("plain", "own", ranks, "") for ranks in options.ranks] + [
            (graph, "dense", 21, keys) for graph in options.graphs for keys in options.keys
        ]
        for kind, support, ranks, keys in placements:
            secure = ["--aggregation", "secure", "--graph", kind, "--keys", keys]
            way = ["--aggregation", "plain"] if kind == "plain" else secure
            flags = ["--preset", "ml100k", "--rounds", str(options.rounds), "--eval-every", "0", "--support", support]
            run = job(mpirun, ranks, [*flags, *way, *data], f"{folder}/cache", folder)
            times = [row["seconds"] for row in run["round_rows"]]
            times[-1] -= run["seconds"]["evaluation"]["wall"]
            cpu = sum(values["cpu"] for phase, values in run["seconds"].items() if phase not in ("setup", "evaluation"))
            each = run["parties"] * options.rounds
            up, down = (sum(run[way]["logical"].values()) / each for way in ("bytes_up", "bytes_down"))
            name = kind if kind == "plain" else f"secure, {kind}, keys {keys}"
            rows.append(
                {"aggregation": name, "ranks": ranks, "round_seconds": times, "cpu_per_round": cpu / options.rounds}
            )
            rows[-1] |= {"up": up, "down": down, "model_sha256": run["model_sha256"], "seconds": run["seconds"]}
            print(
                f"{name:<30} {ranks:>5} {statistics.fmean(times):>10.1f} {cpu / options.rounds:>14.1f} {up:>10,.0f} "
                f"{down:>10,.0f}  {run['model_sha256'][:16]}",
                flush=True,
            )
    same = len({row["model_sha256"] for row in rows}) == 1
    print("the same model everywhere" if same else "DIFFERENT MODELS")
    save(options.json, facts, rows=rows, same_model=same)
    sys.exit(not same)


if __name__ == "__main__":
    main()
