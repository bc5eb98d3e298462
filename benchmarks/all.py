"""What a round costs, in one table and one figure: bytes, trips and CPU of the main settings, and how they grow with the parties.

    python -m benchmarks.all --quick [--table benchmarks/costs.md] [--figure benchmarks/costs.png] [--json FILE]

Three parts, each of which is a benchmark of its own: the main settings under mpirun with the rounds and noise of their presets, and as
little local training as there can be, since bytes do not depend on it; `comm_cost`, every combination beside its law; `scaling`, from 20
parties on. Then `round_overhead`, if it is there. --quick takes at most ten minutes on 2 cores: fewer combinations, fewer parties.
The figure needs matplotlib (pip install -e '.[plots]'). The exit code is 1 if a message breaks its law.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import comm_cost, costs_figure, scaling
from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.counted import beside_law
from benchmarks.launch import ROOT, job
from fedmpi.bill import laws
from fedmpi.cli import resolve
from fedmpi.config import settings_of
from fedmpi.files import write_text

HERE = Path(__file__).parent
RANKS = 3
# What a reader of the README would start, by the words of the table.
SETTINGS = {
    "the default: DP-pFedDSU, secure": "--preset demo",
    "  with --keys batch:16": "--preset demo --keys batch:16",
    "  with --download full": "--preset demo --download full",
    "  with --aggregation plain": "--preset demo --aggregation plain",
    "CENTAUR, dense, secure": "--preset demo --method centaur --support dense",
    "DP-pFedDSU, secure, complete graph": "--preset demo-20",
    "  with --support union": "--preset demo-20 --support union",
    "  with --support own, plain": "--preset demo-20 --support own --aggregation plain",
    "FedAvg, dense, no noise, plain": "--preset demo-20 --method fedavg --epsilon inf --support dense --aggregation plain",
    "FedMF, secure": "--preset demo-recsys",
    "FedMF, own rows, plain": "--preset demo-recsys --support own --aggregation plain",
}
EVERY = "--eval-every 0 --local-epochs 0 --checkpoint-every 0"
IMAGES = "--samples-per-party 10 --test-samples-per-party 10"
OVERHEAD = "round_overhead"  # rounds without training beside raw mpi4py
FEW = "--turns 1 --rounds 8".split()


def flags_of(setting: str) -> list[str]:
    config = resolve(setting.split())
    short = comm_cost.short_work(settings_of(config.run.method))
    return [*setting.split(), *EVERY.split(), *(IMAGES.split() if config.data.dataset == "digits" else ()), *short]


def main_settings(wanted: dict[str, str]) -> list[dict]:
    rows = []
    for name, setting in wanted.items():
        flags = flags_of(setting)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            run = job(Path(sys.executable).parent / "mpirun", RANKS, flags, f"{folder}/cache", folder, out)
            config = resolve([*flags, "--out", str(out), "--cache-dir", f"{folder}/cache"])
            row = beside_law(config, out) | scaling.cpu(run, out, config.run.parties, config.run.rounds)
        rows.append({"name": name, "flags": setting, **row})
    return rows


def overhead() -> dict | None:
    """Rows of the benchmark of a round's own time, where this checkout has it."""
    if importlib.util.find_spec(f"benchmarks.{OVERHEAD}") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"benchmarks.{OVERHEAD}", *FEW, "--json", str(file)]
        subprocess.run(command, cwd=ROOT, check=True)
        return json.loads(file.read_text())


# ---- the table ----


def table(rows: list[dict]) -> list[str]:
    lines = [
        "| setting | parties | coordinates × bits | up | of FedAvg | over entropy | down | of FedAvg | over entropy | trips | a party's "
        "CPU | rank 0's CPU |",
        "| --- " * 12 + "|",
    ]
    for row in rows:
        name = f"&nbsp;&nbsp;{row['name'].strip()}" if row["name"].startswith(" ") else row["name"]
        cells = [name, f"{row['parties']}", f"{row['coordinates']:,} × {row['bits']}"]
        for way in (laws.UP, laws.DOWN):
            found = row[way]
            cells += [f"{found['counted'] / 1e3:.1f} kB", f"{100 * found['counted'] / row['fedavg']:.1f} %"]
            cells.append("–" if found["bound"] is None else f"{found['counted'] / found['bound']:.2f}")
        cells += [f"{row['trips']}", f"{1e3 * row['client_cpu']:.2g} ms", f"{1e3 * row['server_cpu']:.0f} ms"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def growth(found: dict) -> list[str]:
    lines = [
        "| parties | neighbours | bits | up | down | a party's CPU | rank 0's CPU | rank 0's memory |",
        "| --- " * 8 + "|",
    ]
    for row in (*found["rows"], found["far"]):
        far = row is found["far"]
        mark, sign = ("**", "~") if far else ("", "")
        cells = [f"{mark}{row['parties']:,}{mark}", f"{row['degree']}", f"{row['bits']}"]
        cells += [f"{row[way] / 1e3:.1f} kB" for way in (laws.UP, laws.DOWN)]
        cells += [f"{sign}{1e3 * row['client_cpu']:.1f} ms", f"{sign}{row['server_cpu']:,.{0 if far else 2}f} s"]
        cells.append(f"{sign}{row['server_pss'] / 1e9:.{0 if far else 3}f} GB")
        lines.append("| " + " | ".join(cells) + " |")
    fits = found["fits"]
    lines += ["", "The last row is not measured:", *(f"- {line}" for line in found["assumptions"])]
    for name, what in (
        ("client_cpu", "a party's CPU"),
        ("server_cpu", "rank 0's CPU"),
        ("server_pss", "rank 0's memory"),
    ):
        lines.append(
            f"- {what} by {fits[name]['law']}, within {100 * fits[name]['largest_residual']:.0f} % of what was measured"
        )
    return lines


def own_time(rounds: dict | None) -> list[str]:
    """What a round takes by the clock where nothing is trained, beside raw mpi4py."""
    if rounds is None:
        return []
    middle = {name: f"{1e3 * statistics.median(seconds):.1f} ms" for name, seconds in rounds["seconds"].items()}
    about = ", ".join(f"{rounds['machine'][what]:,} {what}" for what in ("parties", "parameters"))
    said = "; ".join(f"{name} {took}" for name, took in middle.items())
    return ["", f"A round without training by the clock (`{OVERHEAD}`, {about}), medians: {said}."]


def text_of(
    facts: dict, rows: list[dict], combinations: list[dict], found: dict, rounds: dict | None, took: tuple[float, float]
) -> str:
    broken = sum(len(row["wrong"]) for row in (*rows, *combinations, *found["rows"]))
    kinds = [message for row in combinations for message in row["messages"]]
    exact = sum(message.get("sign") == laws.EXACT for message in kinds)
    return "\n".join(
        [
            "# What a round costs",
            "",
            f"Written by `python -m benchmarks.all` in {took[0] / 60:.0f} minutes, {took[1] / 60:.0f} of CPU: "
            + ", ".join(f"{name} {value}" for name, value in facts.items())
            + ".",
            "",
            "![Bytes of the main settings, and how a round grows with the parties](costs.png)",
            "",
            "Of a party and training round, counted in the ledgers of runs under mpirun; tests are apart. *Of FedAvg*: of the float32 that",
            "dense FedAvg would send for the same shared vector. *Over entropy*: over the fewest bytes that any code of the content takes",
            "([entropy.py](entropy.py)); – where the content has no known law. CPU is without local training.",
            "",
            *table(rows),
            "",
            f"{len(combinations)} combinations of {', '.join(comm_cost.AXES)} were run beside their laws (`comm_cost`): {len(kinds)} kinds of "
            f"message, {exact} with an exact law, {broken} broken.",
            *own_time(rounds),
            "",
            f"## With the number of parties ({scaling.DIMENSION:,} coordinates, secure, regular graph)",
            "",
            *growth(found),
            "",
        ]
    )


def main() -> int:
    parser = arguments("all", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer combinations and parties: at most ten minutes on 2 cores"
    )
    parser.add_argument("--table", type=Path, default=HERE / "costs.md")
    parser.add_argument("--figure", type=Path, default=HERE / "costs.png")
    options = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the figure needs matplotlib: pip install -e '.[plots]'")
    facts = machine("numpy", "mpi4py", "torch")
    show_machine(facts)
    started = time.monotonic()
    rows = main_settings(SETTINGS)
    combinations = comm_cost.run(options.quick, again=2 if options.quick else comm_cost.AGAIN)
    found = scaling.run(scaling.QUICK if options.quick else scaling.FULL)
    rounds = overhead()
    took = time.monotonic() - started, sum(os.times()[:4])
    text = text_of(facts, rows, combinations, found, rounds, took)
    print(f"\n{text}")
    write_text(options.table, text)
    costs_figure.draw(rows, found, options.figure)
    save(options.json, facts, settings=rows, combinations=combinations, scaling=found, overhead=rounds)
    return int(any(row["wrong"] for row in (*rows, *combinations, *found["rows"])))


if __name__ == "__main__":
    sys.exit(main())
