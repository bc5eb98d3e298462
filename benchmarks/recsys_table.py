"""MMF table 4: all ten rating methods over seeds, beside the paper's figures; and what part of it is the optimiser.

    python -m benchmarks.recsys_table ml100k --data-dir DIR [--seeds 10] [--ablation] [--keep DIR] [--json FILE]

Every figure is a run of its own under mpirun with the preset's settings, plain aggregation (the sum is the same as the
secure one, bit for bit). Settings were chosen on a validation part of the training ratings; test ratings are looked at here
and nowhere else. With --keep, runs that are there already are not repeated, so that an interrupted table goes on.
"""

import math
import statistics
import zlib
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import KeptJobs

# Yang et al. 2021, table 4: RMSE, MAE.
PAPER = {
    "ml100k": {
        "fedmf": (0.9491, 0.7412),
        "local-lr": (1.0107, 0.8040),
        "fed-lr": (1.0796, 0.8844),
        "fedmmf-lr": (0.9340, 0.7340),
        "local-fm": (1.0083, 0.8054),
        "fed-fm": (1.0628, 0.8644),
        "fedmmf-fm": (0.9218, 0.7250),
        "local-nn": (1.0114, 0.8087),
        "fed-nn": (1.0945, 0.9176),
        "fedmmf-nn": (0.9319, 0.7317),
    },
    "ml10m": {
        "fedmf": (0.7753, 0.5827),
        "local-lr": (0.8818, 0.6766),
        "fed-lr": (0.9703, 0.7497),
        "fedmmf-lr": (0.7695, 0.5808),
        "local-fm": (0.8938, 0.6862),
        "fed-fm": (0.9639, 0.7445),
        "fedmmf-fm": (0.7720, 0.5827),
        "local-nn": (0.8819, 0.6816),
        "fed-nn": (0.9756, 0.7689),
        "fedmmf-nn": (0.7648, 0.5772),
    },
    "lastfm": {
        "fedmf": (1.2235, 0.8780),
        "local-lr": (1.1081, 0.8163),
        "fed-lr": (1.5448, 1.3538),
        "fedmmf-lr": (1.0886, 0.8066),
        "local-fm": (1.0845, 0.7988),
        "fed-fm": (1.5301, 1.3369),
        "fedmmf-fm": (1.0842, 0.7964),
        "local-nn": (1.1007, 0.8007),
        "fed-nn": (1.5461, 1.3598),
        "fedmmf-nn": (1.0860, 0.7933),
    },
}
METHODS = tuple(PAPER["ml100k"])

PRINTED = (
    "--party-solver steps --no-item-bias --item-reg 0.1 --party-reg 0.1 --factor-mean {mean} --clip 64 --rounds 200"
)
# What the optimiser does and what the mask does: each with raw ratings and with the one-order mask.
ABLATION = {
    "SGD, as printed": (f"{PRINTED} --optimizer sgd --server-lr {{rate}}", {"fedmf": "0.001", "fedmmf-lr": "0.004"}),
    "Adam on the server": (f"{PRINTED} --optimizer adam --server-lr 0.01", {}),
    "exact p_u, biases, Adam": ("--party-solver ridge --party-reg 5 --optimizer adam --server-lr 0.05 --rounds 80", {}),
    "exact p_u, biases, counted steps": ("--party-solver ridge --party-reg 5", {}),
    "and posterior gradients (preset)": ("", {}),
    "and item prior": ("--item-prior --bias-reg 5", {}),
}
STARTS = {"fedmf": "0.42", "fedmmf-lr": "0"}

# Two-sided 95 % points of Student's t, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 19: 2.09, 29: 2.05}


class Runner:
    def __init__(self, options):
        self.options = options
        self.jobs = KeptJobs(options.keep, options.ranks)

    def summary(self, method: str, seed: int, more: str = "") -> dict:
        """One run, or what is kept of it."""
        preset, data_dir = self.options.preset, self.options.data_dir
        flags = f"--preset {preset} --method {method} --seed {seed} --eval-every 0 --checkpoint-every 0 --aggregation plain "
        flags += f"--support own {more}"
        data = ["--data-dir", str(data_dir.absolute())] if data_dir else []
        name = f"{preset}-{method}-s{seed}" + (f"-{zlib.crc32(more.encode()):08x}" if more else "")
        return self.jobs.run(name, flags.split(), data)


def mean_sd(values: list[float]) -> str:
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {sd:.4f}"


def interval(differences: list[float]) -> tuple[float, float]:
    """(mean, half width of the 95 % confidence interval) of paired differences."""
    n = len(differences)
    if n < 2:
        return differences[0], math.inf
    freedom = max(key for key in STUDENT if key <= n - 1)
    return statistics.mean(differences), STUDENT[freedom] * statistics.stdev(differences) / math.sqrt(n)


def table(runner: Runner, preset: str, seeds: int, methods: list[str]) -> list[dict]:
    rows = []
    print(f"\n{'method':<12} {'RMSE':>17} {'paper':>8} {'MAE':>17} {'paper':>8}   over {seeds} seeds")
    for method in methods:
        runs = [runner.summary(method, seed) for seed in range(seeds)]
        paper = PAPER.get(preset, {}).get(method, (math.nan, math.nan))
        row = {"method": method, "rmse": [run["rmse"] for run in runs], "mae": [run["mae"] for run in runs]}
        row["seconds"] = [run["wall_seconds"] for run in runs]
        rows.append(row)
        print(f"{method:<12} {mean_sd(row['rmse']):>17} {paper[0]:>8.4f} {mean_sd(row['mae']):>17} {paper[1]:>8.4f}")
    return rows


def differences(rows: list[dict]) -> list[dict]:
    """FedMMF less FedMF, and less its own Local and Fed model, seed by seed."""
    rmse = {row["method"]: row["rmse"] for row in rows}
    found = []
    print("\npaired differences of RMSE, 95 % interval; below zero: the mask wins")
    for kind in ("lr", "fm", "nn"):
        for other in ("fedmf", f"local-{kind}", f"fed-{kind}"):
            if f"fedmmf-{kind}" in rmse and other in rmse:
                pairs = [a - b for a, b in zip(rmse[f"fedmmf-{kind}"], rmse[other])]
                middle, half = interval(pairs)
                found.append({"method": f"fedmmf-{kind}", "less": other, "mean": middle, "half_width": half})
                print(f"fedmmf-{kind} - {other:<9} {middle:+.4f} ± {half:.4f}")
    return found


def ablation(runner: Runner, seeds: int) -> list[dict]:
    rows = []
    print(f"\n{'optimiser':<34} {'raw ratings (FedMF)':>20} {'masked (FedMMF-lr)':>20} {'mask':>8}")
    for name, (flags, rates) in ABLATION.items():
        rmse = {}
        for method in ("fedmf", "fedmmf-lr"):
            chosen = flags.format(mean=STARTS[method], rate=rates.get(method, ""))
            rmse[method] = [runner.summary(method, seed, chosen)["rmse"] for seed in range(seeds)]
        gain = statistics.mean(a - b for a, b in zip(rmse["fedmmf-lr"], rmse["fedmf"]))
        rows.append({"optimiser": name, "flags": flags, "rmse": rmse})
        print(f"{name:<34} {mean_sd(rmse['fedmf']):>20} {mean_sd(rmse['fedmmf-lr']):>20} {gain:>+8.4f}")
    return rows


def main() -> None:
    parser = arguments("recsys_table", __doc__)
    parser.add_argument("preset", help="ml100k, ml1m, ml10m, lastfm or demo-recsys")
    parser.add_argument("--data-dir", type=Path, help="folder with the official files; without it they are downloaded")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--ablation", action="store_true", help="optimiser against mask as well")
    parser.add_argument("--keep", type=Path, default=Path("runs/recsys_table"), help="where finished runs are kept")
    options = parser.parse_args()
    facts = machine("mpi4py", "numpy", "scipy")
    show_machine(facts)
    runner = Runner(options)
    rows = table(runner, options.preset, options.seeds, options.methods)
    found = differences(rows)
    ablated = ablation(runner, options.seeds) if options.ablation else []
    runner.jobs.say_what_is_older()
    save(options.json, facts, preset=options.preset, table=rows, differences=found, ablation=ablated)


if __name__ == "__main__":
    main()
