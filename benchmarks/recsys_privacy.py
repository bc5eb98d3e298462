"""What masks hide and what hiding costs: MMF figure 4 with the attacks beside it, min_raters, and the hybrid.

    python -m benchmarks.recsys_privacy ml100k --data-dir DIR [--seeds 3] [--figure FILE.png] [--json FILE]

The sweep changes the private models' penalty and nothing else. For each value: RMSE of the run, the parties' median indicator J
on their own ratings, how many ratings the recovery attack finds to less than one step, and how much of the true top tenth the
ranking attack finds, beside what knowing only the range, or guessing, would.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import job
from fedmpi.attacks.indicator import indicator
from fedmpi.attacks.ranking import hit_ratios
from fedmpi.attacks.recovery import recovery_hits
from fedmpi.cli import resolve
from fedmpi.runtime import build

PENALTIES = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 1000)
MIN_RATERS = (0, 2, 3, 5, 10)


class Bench:
    def __init__(self, options, folder: str):
        self.options, self.folder = options, folder
        self.mpirun = Path(sys.executable).parent / "mpirun"
        self.data = ["--data-dir", str(options.data_dir.absolute())] if options.data_dir else []

    def flags(self, *more: str) -> list[str]:
        return ["--preset", self.options.preset, "--eval-every", "0", "--checkpoint-every", "0", *self.data, *more]

    def run(self, *more: str) -> dict:
        return job(self.mpirun, self.options.ranks, self.flags(*more), f"{self.folder}/cache", self.folder)

    def rmse(self, *more: str) -> float:
        plain = ("--aggregation", "plain", "--support", "own")
        return statistics.mean(
            self.run(*plain, *more, "--seed", str(seed))["rmse"] for seed in range(self.options.seeds)
        )

    def masks(self, *more: str) -> dict[str, float]:
        """What attacks find in the masked ratings of seed 0."""
        config = resolve(self.flags("--cache-dir", f"{self.folder}/cache", *more))
        method = build.algorithm(config)
        method.host(tuple(range(config.run.parties)))
        offsets, ratings, scale = (
            method.block.train_offsets,
            method.block.train_values.astype(float),
            method.store.scale,
        )
        ranked = hit_ratios(offsets, method.targets, ratings, tops=(0.1,))
        counts = np.diff(offsets)

        def recovered(masked):
            return float(np.mean(recovery_hits(offsets, masked, ratings, (1,), scale.step)[0] / counts))

        return {
            "indicator": float(np.median(indicator(offsets, method.targets, (scale.lowest, scale.highest)))),
            "recovered": recovered(method.targets),
            "recovered_by_range_alone": recovered(0 * method.targets),
            "ranked": float(np.mean(ranked.hit[0])),
            "ranked_by_chance": float(np.mean(ranked.chance[0])),
        }


def sweep(bench: Bench) -> list[dict]:
    print("\npenalty of the private models (two-order mask), nothing else changed")
    print(
        f"{'penalty':>8} {'RMSE':>8} {'J':>8} {'recovered < 1 step':>19} {'range alone':>12} {'top tenth':>10} {'chance':>7}"
    )
    rows = []
    for penalty in PENALTIES:
        more = ("--method", "fedmmf-fm", "--mask-reg", f"{penalty:g}", "--mask-inner-reg", f"{penalty:g}")
        row = {"penalty": penalty, "rmse": bench.rmse(*more), **bench.masks(*more)}
        rows.append(row)
        print(
            f"{penalty:>8g} {row['rmse']:>8.4f} {row['indicator']:>8.4f} {row['recovered']:>19.3f} "
            f"{row['recovered_by_range_alone']:>12.3f} {row['ranked']:>10.3f} {row['ranked_by_chance']:>7.3f}",
            flush=True,
        )
    return rows


def few_raters(bench: Bench) -> list[dict]:
    print("\nitems with few raters left out of training (FedMF)")
    print(f"{'min_raters':>10} {'RMSE':>8} {'items left out':>15} {'rows of one rater':>18}")
    counts = build.open_store(resolve(bench.flags("--cache-dir", f"{bench.folder}/cache"))).rater_counts
    rows = []
    for least in MIN_RATERS:
        rmse = bench.rmse("--method", "fedmf", "--min-raters", str(least))
        out, alone = int(np.sum((counts > 0) & (counts < least))), int(np.sum(counts == 1)) if least < 2 else 0
        rows.append({"min_raters": least, "rmse": rmse, "items_left_out": out, "rows_of_one_rater": alone})
        print(f"{least:>10} {rmse:>8.4f} {out:>15} {alone:>18}", flush=True)
    return rows


def hybrid(bench: Bench, rules: list[str]) -> list[dict]:
    print("\nhybrid, two-order mask with penalty 0.1, two rounds: who shares in the clear, and what it saves")
    rows = []
    for rule in rules:
        summary = bench.run(
            *("--method", "fedmmf-fm", "--mask-reg", "0.1", "--mask-inner-reg", "0.1", "--rounds", "2"),
            *("--aggregation", "hybrid", "--support", "dense", "--clear-rule", rule),
        )
        saved = summary["hybrid"]
        rows.append({"rule": rule, **saved})
        print(
            f"{rule:<42} {saved['clear']:>5} clear {saved['hidden']:>5} hidden  saved {saved['bytes_saved_up'] or 0:>12,} B up "
            f"{saved['bytes_saved_down'] or 0:>12,} B down {saved['cpu_seconds_saved'] or 0:>8.1f} CPU s",
            flush=True,
        )
    return rows


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    penalties = [row["penalty"] for row in rows]
    left.plot(penalties, [row["rmse"] for row in rows], "o-", color="C0", label="RMSE (left scale)")
    left.set(xscale="log", xlabel="penalty of the private models", ylabel="RMSE")
    twin = left.twinx()
    twin.plot(penalties, [row["indicator"] for row in rows], "s--", color="C1", label="indicator J (right scale)")
    twin.set_ylabel("median J")
    left.legend(handles=[*left.get_lines(), *twin.get_lines()], loc="center right", frameon=False)
    left.set_title("accuracy and indicator (MMF figure 4)", fontsize=10)
    for name, label, color in (("recovered", "recovered to < 1 step", "C2"), ("ranked", "top tenth found", "C3")):
        right.plot(penalties, [row[name] for row in rows], "o-", color=color, label=label)
    for name, label, color in (
        ("recovered_by_range_alone", "knowing the range alone", "C2"),
        ("ranked_by_chance", "by chance", "C3"),
    ):
        right.plot(penalties, [row[name] for row in rows], ":", color=color, label=label)
    right.set(xscale="log", xlabel="penalty of the private models", ylabel="share of ratings", ylim=(0, 1.05))
    right.legend(frameon=False, fontsize=8)
    right.set_title("what attacks find in masked ratings", fontsize=10)
    for axes in (left, right):
        axes.spines[["top"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = arguments("recsys_privacy", __doc__)
    parser.add_argument("preset")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="draw the sweep to this file (needs matplotlib)")
    parser.add_argument(
        "--rules",
        nargs="*",
        default=["indicator<=0.01", "recovery<=0.6", "recovery<=0.6,ranking<=0.6"],
        help="hybrid rules to try",
    )
    options = parser.parse_args()
    facts = machine("mpi4py", "numpy")
    show_machine(facts)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder)
        swept, few = sweep(bench), few_raters(bench)
        shared = hybrid(bench, options.rules)
    if options.figure:
        draw(swept, options.figure)
    save(options.json, facts, sweep=swept, few_raters=few, hybrid=shared)


if __name__ == "__main__":
    main()
