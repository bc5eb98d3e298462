"""How the rating presets' settings were found: one setting after the other, on ratings that are not test ratings.

    python -m benchmarks.recsys_tune ml100k --data-dir DIR --method fedmmf-lr --vary mask-reg 10 20 40 [--seeds 3]

A tenth of the training ratings is evaluated on in place of the test ratings (--validation-fraction 0.1); the test part of the
split is in none of the files that such a run reads.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import job


def main() -> None:
    parser = arguments("recsys_tune", __doc__)
    parser.add_argument("preset")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--method", nargs="+", default=["fedmf"])
    parser.add_argument("--vary", nargs="+", default=[], metavar=("NAME", "VALUE"), help="a setting and its values")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings that stay")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    facts = machine("mpi4py", "numpy")
    show_machine(facts)
    name, values = (options.vary[0], options.vary[1:]) if options.vary else ("", [""])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in options.method:
            for value in values:
                flags = [
                    "--preset",
                    options.preset,
                    "--method",
                    method,
                    "--validation-fraction",
                    "0.1",
                    "--eval-every",
                    "0",
                ]
                flags += ["--aggregation", "plain", "--support", "own", "--checkpoint-every", "0"]
                flags += [f"--{name}", value] if name else []
                flags += [part for pair in options.set for part in (f"--{pair.split('=')[0]}", pair.split("=")[1])]
                flags += ["--data-dir", str(options.data_dir.absolute())] if options.data_dir else []
                mpirun = Path(sys.executable).parent / "mpirun"
                rmse = [
                    job(mpirun, options.ranks, [*flags, "--seed", str(seed)], f"{folder}/cache", folder)["rmse"]
                    for seed in range(options.seeds)
                ]
                rows.append({"method": method, "setting": name, "value": value, "rmse": rmse})
                print(f"{method:<12} {name} {value:<8} validation RMSE {statistics.mean(rmse):.4f}", flush=True)
    save(options.json, facts, rows=rows)


if __name__ == "__main__":
    main()
