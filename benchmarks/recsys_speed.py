"""Time to the same RMSE on ml-100k: the federated runs beside Surprise, which has all ratings in one process.

    python -m benchmarks.recsys_speed --data-dir DIR --surprise-python OTHER/bin/python [--rounds 30] [--json FILE]

Both sides get the same 80/20 split. The bars are the RMSEs of three of Surprise's SVD fits. A first run, evaluated every
round, finds the round that reaches each; then runs of just that many rounds, evaluated at the end alone, are timed: they must
give the same RMSE, and evaluation is not in their time. Surprise's time is that of `fit`, ours that of the rounds; what comes
before is shown apart. The fits run under a Python of their own: python -m venv OTHER && OTHER/bin/pip install scikit-surprise
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import ROOT, job
from fedmpi.data.prepared import prepare
from fedmpi.data.ratings.spec import RatingSpec

DATASET, PARTIES = "ml-100k", 943
FLAGS = (
    f"--preset demo-recsys --dataset {DATASET} --parties {PARTIES} --factors 20 --item-reg 60 --aggregation plain "
    "--support own --checkpoint-every 0 --seed 0"
)
METHODS = ("fedmf", "fedmmf-lr")
# Phases of a run that are no part of the rounds' work.
OUTSIDE = ("setup", "references", "evaluation", "checkpoint")
BARS = {
    "tuned": "SVD, 20 factors, reg 0.1, 60 epochs",
    "quick": "SVD, the quickest of a grid",
    "best": "SVD, the best of a grid",
}
OTHERS = {"defaults": "SVD, defaults", "SVD++": "SVD++, defaults"}


def write_split(data_dir: Path, cache: str, folder: Path) -> None:
    """The ratings that the runs will see, as train.npy and test.npy: party, item, rating."""
    spec = RatingSpec(dataset=DATASET, data_dir=str(data_dir), parties=PARTIES, seed=0)
    store = spec.open(prepare(spec, cache))
    block = store.block(0, store.parties)
    for name, offsets, items, values in (
        ("train", block.train_offsets, block.train_items, block.train_values),
        ("test", block.test_offsets, block.test_items, block.test_values),
    ):
        users = np.repeat(np.arange(store.parties), np.diff(offsets))
        np.save(folder / f"{name}.npy", np.column_stack((users, items, values)))


def surprise_fits(python: Path, folder: Path, names: dict[str, str]) -> dict:
    command = [python, ROOT / "benchmarks" / "recsys_surprise.py", folder, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise SystemExit(f"{python}: {last}\ninstall it there: {python} -m pip install scikit-surprise")
    return json.loads(done.stdout)


class Runs:
    def __init__(self, data_dir: Path, ranks: int, cache: str, folder: str):
        self._where = (cache, folder)
        self._data = ["--data-dir", str(data_dir.absolute())]
        self._ranks = ranks

    def run(self, method: str, rounds: int, eval_every: int) -> dict:
        flags = [*FLAGS.split(), *self._data, "--method", method]
        flags += ["--rounds", str(rounds), "--eval-every", str(eval_every)]
        before = children()
        run = job(Path(sys.executable).parent / "mpirun", self._ranks, flags, *self._where)
        return run | {"job_cpu": children() - before}

    def to_reach(self, method: str, bars: dict[str, float], rounds: int, repeats: int) -> list[dict]:
        """For each bar the first round at or below it, and medians over runs of just that many rounds."""
        curve = [row["rmse"] for row in self.run(method, rounds, 1)["round_rows"]]
        reached = {
            name: next((i for i, rmse in enumerate(curve, 1) if rmse <= bar), None) for name, bar in bars.items()
        }
        timed = {}
        for number in sorted(set(reached.values()) - {None}):
            found = [self.run(method, number, 0) for _ in range(repeats)]
            if any(run["rmse"] != curve[number - 1] for run in found):
                raise SystemExit(f"{method}: {number} rounds gave another RMSE when evaluated at the end alone")
            timed[number] = [figures_of(run) for run in found]
        rows = []
        for name, number in reached.items():
            row = {"method": method, "bar": name, "rounds": number, "curve": curve}
            if number:
                row |= {"rmse": curve[number - 1], "timed": timed[number], **medians(timed[number])}
            rows.append(row)
        return rows


def children() -> float:
    """CPU seconds of all processes that have ended; mpirun waits for its ranks, so theirs are in it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures_of(run: dict) -> dict[str, float]:
    phases = run["seconds"]
    rounds = sum(row["seconds"] for row in run["round_rows"])
    # The one evaluation falls into the last round; sending the model for it is left in.
    return {
        "wall": rounds - phases["evaluation"]["wall"],
        "cpu": sum(phase["cpu"] for name, phase in phases.items() if name not in OUTSIDE),
        "first_round": run["round_rows"][0]["seconds"],
        "setup": phases["setup"]["wall"],
        "startup": run["startup_seconds"],
        "job_wall": run["wall_seconds"],
        "job_cpu": run["job_cpu"],
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def show_fits(found: dict, fits: dict[str, dict]) -> None:
    print(
        f"\nSurprise {found['surprise']}, one process, one thread; its data structure takes {found['prepare']:.2f} s more"
    )
    print(f"{'':<42} {'RMSE':>7} {'wall s':>8} {'CPU s':>8}   medians")
    for name, title in (BARS | OTHERS).items():
        row = fits[name]
        label = f"{name}: {title}" if name in BARS else title
        print(
            f"{label:<42} {row['rmse']:>7.4f} {row['wall']:>8.2f} {row['cpu']:>8.2f}   of {len(found['fits'][name])} fits"
        )


def show_runs(rows: list[dict], fits: dict[str, dict], prepare: float, ranks: int) -> None:
    print(
        f"\nfedmpi on {ranks} ranks (a server, {ranks - 1} clients), {PARTIES} parties, plain aggregation, no evaluation"
    )
    print(
        "rounds until the RMSE of each fit; ratios: Surprise's time over ours, above 1 where the federated run is faster"
    )
    heads = (
        "rounds",
        "RMSE",
        "wall s",
        "ratio",
        "CPU s",
        "ratio",
        "setup s",
        "ratio",
        "start s",
        "job wall",
        "job CPU",
    )
    print(f"{'':<17}" + "".join(f"{head:>9}" for head in heads))
    for row in rows:
        name, bar = f"{row['method']}, {row['bar']}", fits[row["bar"]]
        if row["rounds"] is None:
            print(f"{name:<17} not reached; best {min(row['curve']):.4f}")
            continue
        row["ratios"] = {
            "wall": bar["wall"] / row["wall"],
            "cpu": bar["cpu"] / row["cpu"],
            "with_setup": (bar["wall"] + prepare) / (row["wall"] + row["setup"]),
        }
        wall, cpu, both = row["ratios"].values()
        print(
            f"{name:<17}{row['rounds']:>9}{row['rmse']:>9.4f}{row['wall']:>9.2f}{wall:>9.2f}{row['cpu']:>9.2f}{cpu:>9.2f}"
            f"{row['setup']:>9.2f}{both:>9.2f}{row['startup']:>9.1f}{row['job_wall']:>9.1f}{row['job_cpu']:>9.1f}"
        )
    print(
        "setup: ratings opened and, for FedMMF, private models fitted; the ratio beside it is of set-up and training on both"
    )
    print(
        "sides. start: until the first model message leaves, imports included. job: from mpirun to its exit. The rounds"
    )
    print("include every party's update, encoded, sent over MPI (a message a rank and round) and added as integers.")


def main() -> None:
    parser = arguments("recsys_speed", __doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder that holds ml-100k")
    parser.add_argument("--surprise-python", type=Path, required=True, help="a python that has scikit-surprise")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30, help="at most so many until the bar is reached")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each method")
    options = parser.parse_args()
    facts = machine("mpi4py", "numpy")
    show_machine(facts)
    with tempfile.TemporaryDirectory() as folder:
        write_split(options.data_dir, folder, Path(folder))
        python = options.surprise_python.absolute()  # not resolved: a link is what makes it the environment's own
        found = surprise_fits(python, Path(folder), BARS | OTHERS)
        bars = {name: medians(found["fits"][name])["rmse"] for name in BARS}
        runs = Runs(options.data_dir, options.ranks, folder, folder)
        rows = [row for method in METHODS for row in runs.to_reach(method, bars, options.rounds, options.repeats)]
        again = surprise_fits(
            python, Path(folder), BARS
        )  # before and after: whatever else the machine does falls on both
    for name in BARS:
        found["fits"][name] += again["fits"][name]
    fits = {name: medians(each) for name, each in found["fits"].items()}
    show_fits(found, fits)
    show_runs(rows, fits, found["prepare"], options.ranks)
    save(options.json, facts, surprise=found, runs=rows)


if __name__ == "__main__":
    main()
