"""Where sharing begins to pay: accuracy over the number of parties, epsilon and the size of the support.

    python -m benchmarks.regime [--parties 20 100 500 2000] [--epsilons 0.5 1 2 8 inf] [--figure FILE] [--json FILE]
    python -m benchmarks.regime --sizes 500:1        the support's size at one place of the map
    python -m benchmarks.regime --dataset cifar10 --data-dir DIR --parties 100 --epsilons 1 2 8 inf

The embedded digits, 20 samples of all ten classes a party, 10 rounds, clipping bound 0.3; or CIFAR-10 at 16 x 16 pixels, 40 samples of
five classes a party, 30 rounds, clipping bound 1. The network is `cnn` for both. Each party draws its samples for itself, so that
there can be any number of parties. Beside every figure stands the best that a party has without sharing: its own training
for as many rounds, or a head on the extractor as it was drawn, whichever is better. Sharing pays where the lift over that is
positive.

The arithmetic beside it: over T rounds the noise of n coordinates has norm sigma C sqrt(T n) / N, and clipped updates carry T C at
most. R = sigma sqrt(n) / (N sqrt(T)) is the ratio. It knows nothing of the data, and needs no run; every run prints it before it
starts, and warns above the value that was read from the method's map (`pays_below`), which is drawn as a line.

Results are kept in --keep and not run again; --show prints what is there and runs nothing, so that a map can grow.
"""

import argparse
import itertools
import math
import statistics
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import KeptJobs
from fedmpi.algorithm import load_method
from fedmpi.privacy.accountant import calibrate
from fedmpi.privacy.mechanism import noise_to_signal

DELTA = 1e-5
COMMON = (
    f"--preset demo-20 --partition drawn --test-samples-per-party 40 --batch-size 10 --head-epochs 5 --ext-epochs 2 --delta {DELTA} "
    "--aggregation plain --local-epochs 0 --eval-every 0 --checkpoint-every 0"
)
ROUNDS = {"digits": 10, "cifar10": 30}
SETTINGS = {
    "digits": "--classes-per-party 10 --samples-per-party 20 --ext-lr 0.1 --clip 0.3",
    "cifar10": "--dataset cifar10 --shrink 2 --classes-per-party 5 --samples-per-party 40 --ext-lr 0.1 --clip 1",
}
ALONE = "--method local-only --support dense --epsilon inf"
METHODS = {
    "CENTAUR": "--method centaur --support dense",
    "DP-pFedDSU": "--method dp-pfeddsu --support shared",
    "DP-pFedHome": "--method dp-pfedhome --support dense",
}
DENSITIES = ("0.01", "0.05", "0.2", "0.5", "1")


class Map:
    def __init__(self, options):
        self.options = options
        self.jobs = KeptJobs(options.keep, options.ranks)
        self.rounds = ROUNDS[options.dataset]
        self.setting = f"{COMMON} {SETTINGS[options.dataset]} --rounds {self.rounds}"
        self.where = ["--data-dir", str(options.data_dir.absolute())] if options.data_dir else []

    def run(self, flags: str, parties: int, seed: int) -> dict | None:
        words = f"{self.setting} {flags} --parties {parties} --seed {seed}".split()
        named = f"{self.options.dataset} {flags} n {parties} s {seed}"
        name = "-".join(word.removeprefix("--") for word in named.split())
        if self.options.show and not self.jobs.has(name):
            return None
        return self.jobs.run(name, words, self.where)

    def cell(self, label: str, flags: str, parties: int, epsilon: str) -> dict | None:
        """Mean accuracy over seeds, and its lift over the best without sharing, seed by seed."""
        rows = []
        for seed in range(self.options.first_seed, self.options.first_seed + self.options.seeds):
            found = self.run(f"{flags} --epsilon {epsilon}", parties, seed)
            alone = self.run(ALONE, parties, seed)
            if found is None or alone is None:
                continue
            own, best = found["accuracy"], max(alone["accuracy"], alone["accuracy_untrained"])
            rows.append((100 * own, 100 * (own - best), found["coordinates"], 100 * alone["accuracy"]))
            rows[-1] += (100 * alone["accuracy_untrained"],)
        if not rows:
            return None
        accuracy, lift, sizes, alone, untrained = zip(*rows)
        sigma = calibrate(float(epsilon), DELTA, 1.0, self.rounds)
        return {
            "method": label,
            "parties": parties,
            "epsilon": float(epsilon) if epsilon != "inf" else None,
            "coordinates": sizes[0],
            "ratio": noise_to_signal(sigma, 1.0, parties, sizes[0], self.rounds),
            "accuracy": list(accuracy),
            "lift": list(lift),
            "alone": list(alone),
            "untrained": list(untrained),
        }


def show(rows: list[dict]) -> None:
    print(
        f"\n{'method':<16} {'parties':>7} {'epsilon':>8} {'shared':>7} {'R':>7} {'accuracy':>15} {'alone':>7} {'untrained':>9} {'lift':>7}"
    )
    for row in rows:
        sd = statistics.stdev(row["accuracy"]) if len(row["accuracy"]) > 1 else 0.0
        epsilon = "inf" if row["epsilon"] is None else f"{row['epsilon']:g}"
        print(
            f"{row['method']:<16} {row['parties']:>7} {epsilon:>8} {row['coordinates']:>7} {row['ratio']:>7.2f} "
            f"{statistics.mean(row['accuracy']):>7.2f} ± {sd:<5.2f} {statistics.mean(row['alone']):>7.2f} "
            f"{statistics.mean(row['untrained']):>9.2f} {statistics.mean(row['lift']):>+7.2f}"
        )


def draw(rows: list[dict], path: Path, dataset: str) -> None:
    """A panel a method: lift by parties and epsilon, and the line to whose right R says that sharing pays."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parties = sorted({row["parties"] for row in rows})
    budgets = sorted({row["epsilon"] or math.inf for row in rows})
    largest = 20.0  # points; beyond, the colour stays what it is
    labels = [label for label in METHODS if any(row["method"] == label for row in rows)]
    size = (4 * len(labels), 3.4)
    figure, panels = pyplot.subplots(1, len(labels), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, label in zip(panels[0], labels):
        own = [row for row in rows if row["method"] == label]
        for row in own:
            x, y, lift = (
                parties.index(row["parties"]),
                budgets.index(row["epsilon"] or math.inf),
                statistics.mean(row["lift"]),
            )
            axes.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), 1, 1, color=pyplot.cm.RdBu(0.5 + lift / largest / 2)))
            dark = abs(lift) > 0.7 * largest
            axes.text(x, y, f"{lift:+.1f}", ha="center", va="center", color="white" if dark else "black", fontsize=9)
        finite = [epsilon for epsilon in budgets if math.isfinite(epsilon)]
        rounds = ROUNDS[dataset]
        sigmas = [calibrate(epsilon, DELTA, 1.0, rounds) for epsilon in finite]
        line = load_method(METHODS[label].split()[1]).pays_below
        needed = [noise_to_signal(sigma, 1.0, 1, own[0]["coordinates"], rounds) / line for sigma in sigmas]
        if len(parties) > 1:  # with one there is no axis to be on
            axes.plot([_place(n, parties) for n in needed], range(len(finite)), "k--")
        axes.set(
            title=f"{label} (dashed: R = {line:g})",
            xlabel="parties",
            xlim=(-0.5, len(parties) - 0.5),
            ylim=(-0.5, len(budgets) - 0.5),
        )
        axes.set_xticks(range(len(parties)), parties)
        axes.set_yticks(range(len(budgets)), ["∞" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in budgets])
    panels[0][0].set_ylabel("ε")
    figure.suptitle(f"Accuracy in points over the best without sharing ({dataset})", fontsize=10)
    figure.savefig(path, dpi=130)


def _place(count: float, parties: list[int]) -> float:
    """Where a number of parties lies on the axis, whose ticks are evenly spaced: between its neighbours by their logarithms."""
    logs = [math.log(n) for n in parties]
    for index in range(len(logs) - 1):
        if math.log(count) <= logs[index + 1] or index == len(logs) - 2:
            return index + (math.log(count) - logs[index]) / (logs[index + 1] - logs[index])
    return 0.0


def place(text: str) -> tuple[int, str]:
    parties, _, epsilon = text.partition(":")
    if not parties.isdecimal() or not epsilon:
        raise argparse.ArgumentTypeError(f"{text}: must be PARTIES:EPSILON, as 500:1")
    return int(parties), epsilon


def main() -> None:
    parser = arguments("regime", __doc__)
    parser.add_argument("--dataset", choices=SETTINGS, default="digits")
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 lies; without it, it is downloaded")
    parser.add_argument("--parties", type=int, nargs="+", default=[20, 100, 500, 2000])
    parser.add_argument("--epsilons", nargs="+", default=["0.5", "1", "2", "8", "inf"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sizes", type=place, metavar="PARTIES:EPSILON", help="vary the support's size here instead")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--first-seed", type=int, default=2, help="0 and 1 are those that dp-pfedhome's settings were chosen on"
    )
    parser.add_argument("--ranks", type=int, default=3, help="a server and a rank for every core (default 3)")
    parser.add_argument("--keep", type=Path, default=Path("runs/regime"))
    parser.add_argument("--show", action="store_true", help="run nothing, print what is kept")
    parser.add_argument("--figure", type=Path, help="draw the map to this file (needs matplotlib)")
    options = parser.parse_args()
    facts, map_ = machine("torch", "mpi4py", "numpy"), Map(options)
    show_machine(facts)
    if options.sizes:
        wanted = [
            (
                f"S = {density}",
                f"--method dp-pfeddsu --support shared --sparse-layers 4 --density {density}",
                *options.sizes,
            )
            for density in DENSITIES
        ]
    else:
        wanted = [
            (label, METHODS[label], parties, epsilon)
            for parties, epsilon, label in itertools.product(options.parties, options.epsilons, options.methods)
        ]
    rows = [row for row in (map_.cell(*cell) for cell in wanted) if row]
    show(rows)
    map_.jobs.say_what_is_older()
    if options.figure and rows and not options.sizes:
        draw(rows, options.figure, options.dataset)
    save(options.json, facts, setting=map_.setting, rows=rows)


if __name__ == "__main__":
    main()
