"""Bytes and trips of a party and round: counted in real runs, beside the size law, the entropy bound, and dense FedAvg in float32.

    python -m benchmarks.comm_cost [--quick] [--json FILE] [--parties 8] [--mpirun 4]

Every combination of method, support, aggregation, graph, keys, download and noise that the configuration allows is run for two rounds, small
and on generated or embedded data, by the whole engine in memory; its ledger is what is counted. --quick: as few as cover every method, and
every pair of values of the other axes.

    law     = the law of every message is equal to the ledger; ~ expected, ≤ bound, with counted / law. A message that breaks its law
            is named, and the exit code is 1
    FedAvg  counted / 4 bytes a coordinate of the method's shared vector, which is what dense FedAvg moves in float32, up and down
    bound   counted / the entropy of the content (benchmarks.entropy says of what); - where no law of the content is known
    trips   two ways each: all that goes in one direction before somebody waits for an answer; of a round that has its keys, where they
            are made for a batch

Evaluations are apart, and some of the runs are done again with a test after every round: a training round costs the same. So are some
under mpirun: their ledger is the same, row by row. Where an axis changes no byte the rows are one, and say `any`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.counted import beside_law, counted, ledger, run_here
from benchmarks.launch import job
from fedmpi.algorithm import load_method, method_names
from fedmpi.bill import laws
from fedmpi.bill.shape import Setting
from fedmpi.cli import resolve
from fedmpi.config import settings_of
from fedmpi.errors import ConfigError

PARTIES, ROUNDS = 8, 2
AGAIN = 4
# Each axis: its values, and the flags that each of them is. What fits together is the configuration's to say.
AXES: dict[str, dict[str, str]] = {
    "method": {name: f"--method {name}" for name in method_names()},
    "support": {name: f"--support {name}" for name in ("own", "union", "shared", "dense")},
    "aggregation": {
        "plain": "--aggregation plain",
        "secure": "--aggregation secure",
        "hybrid": "--aggregation hybrid --clear-parties 0,3",
    },
    "graph": {name: f"--graph {name}" for name in ("complete", "regular")},
    "keys": {name: f"--keys {name}" for name in ("round", "batch:16")},
    "download": {name: f"--download {name}" for name in ("delta", "full")},
    "noise": {"ε=8": "--epsilon 8", "none": "--epsilon inf"},
}
# What a run is about, by the method's task; as little local work as there can be.
BASE = {
    "classification": "--preset demo-20 --samples-per-party 4 --test-samples-per-party 2 --classes-per-party 2",
    "recommendation": "--preset demo-recsys",
}
SHORT = {"head_epochs": 0, "ext_epochs": 1, "batch_size": 4}
EVERY = f"--rounds {ROUNDS} --local-epochs 0 --checkpoint-every 0 --threads 1"

Choice = dict[str, str]  # axis -> value


def short_work(settings: type) -> list[str]:
    """Flags for as little training as a method with these settings can do."""
    some = {name: value for name, value in SHORT.items() if name in settings.__dataclass_fields__}
    return [word for name, value in some.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def flags_of(choice: Choice, parties: int, eval_every: int = 0) -> list[str]:
    words = [BASE[load_method(choice["method"]).task], EVERY, *(AXES[axis][value] for axis, value in choice.items())]
    own = short_work(settings_of(choice["method"]))
    return [*" ".join(words).split(), *own, "--parties", str(parties), "--eval-every", str(eval_every)]


def choices() -> Iterator[Choice]:
    for values in itertools.product(*AXES.values()):
        yield dict(zip(AXES, values))


def allowed(choice: Choice, parties: int, cache: str) -> bool:
    """Whether there is such a setting: by the configuration, the method and the rules of the protocol."""
    try:
        config = resolve([*flags_of(choice, parties), "--cache-dir", cache])
        laws.price(Setting(config), parties)
    except ConfigError:
        return False
    return True


def covering(parties: int, cache: str) -> list[Choice]:
    """A few of the allowed ones: every method, and every pair of values of two other axes that there is."""
    seen: set = set()
    found, some = [], list(choices())
    random.Random(0).shuffle(some)  # or the first method would have all the pairs
    for choice in some:
        rest = [(axis, value) for axis, value in choice.items() if axis != "method"]
        new = {choice["method"], *itertools.combinations(rest, 2)} - seen
        if new and allowed(choice, parties, cache):
            found.append(choice)
            seen |= new
    return sorted(found, key=lambda choice: [list(AXES[axis]).index(value) for axis, value in choice.items()])


# ---- one row ----


def measure(task: tuple[Choice, int, str]) -> dict | None:
    """The row of one combination; None where it is not allowed."""
    choice, parties, cache = task
    if not allowed(choice, parties, cache):
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        config = resolve([*flags_of(choice, parties), "--cache-dir", cache, "--out", str(out)])
        run_here(config, 3)
        return choice | beside_law(config, out)


def _silent() -> None:
    """A worker prints nothing: a run's words about its accuracy are not what is looked at."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def measure_all(tasks: list[tuple[Choice, int, str]], workers: int) -> list[dict]:
    context = multiprocessing.get_context("spawn")  # torch and threads do not survive a fork
    with context.Pool(workers, _silent) as pool:
        return [row for row in pool.imap(measure, tasks, chunksize=1) if row]


# ---- the same elsewhere, and with other tests ----


def elsewhere(choice: Choice, parties: int, cache: str) -> list[str]:
    """What differs under mpirun, or when every round is tested; of both nothing should."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:

        def here(eval_every: int) -> Path:
            out = Path(folder) / f"here-{eval_every}"
            flags = [*flags_of(choice, parties, eval_every), "--cache-dir", cache, "--out", str(out)]
            context = multiprocessing.get_context("spawn")
            with context.Pool(1, _silent) as pool:
                pool.apply(_run, (flags,))
            return out

        once, often = here(0), here(1)
        if counted(once)[0] != counted(often)[0]:
            wrong.append("training costs something else where every round is tested")
        started = Path(folder) / "mpirun"
        job(Path(sys.executable).parent / "mpirun", 3, flags_of(choice, parties), cache, folder, started)
        if ledger(started) != ledger(once):
            wrong.append("another ledger under mpirun than in memory")
    return wrong


def _run(flags: list[str]) -> None:
    run_here(resolve(flags), 3)


# ---- the table ----


def merged(rows: list[dict]) -> list[dict]:
    """Rows that differ in one axis and in no byte become one."""
    for axis in reversed(AXES):
        groups: dict[tuple, list[dict]] = {}
        for row in rows:
            groups.setdefault(tuple(row[other] for other in AXES if other != axis), []).append(row)
        rows = []
        for group in groups.values():
            same = all((row["messages"], row["bits"]) == (group[0]["messages"], group[0]["bits"]) for row in group)
            rows += [group[0] | {axis: "any"}] if same and len(group) == len(AXES[axis]) > 1 else group
    return rows


def show(rows: list[dict]) -> None:
    widths = {axis: max(len(axis), *map(len, values)) for axis, values in AXES.items()}
    title = "  ".join(f"{axis:<{width}}" for axis, width in widths.items())
    print(
        f"{title}  {'up [B]':>8} {'law':>7} {'FedAvg':>7} {'bound':>6}  {'down [B]':>8} {'law':>7} {'FedAvg':>7} {'bound':>6}  trips"
        f"  {'test up':>7} {'down':>5}"
    )
    for row in rows:
        cells = "  ".join(f"{row[axis]:<{width}}" for axis, width in widths.items())
        print(
            f"{cells}  {_way(row, laws.UP)}  {_way(row, laws.DOWN)}  {row['trips']:>5}"
            f"  {row['up']['test']:>7.0f} {row['down']['test']:>5.0f}"
        )


def _way(row: dict, way: str) -> str:
    found = row[way]
    if not found["counted"]:
        return f"{'-':>8} {'-':>7} {'-':>7} {'-':>6}"
    law = "=" if found["sign"] == laws.EXACT else f"{found['sign']}{found['counted'] / found['law']:.3f}"
    least = "-" if found["bound"] is None else f"{found['counted'] / found['bound']:.3f}"
    return f"{found['counted']:>8.0f} {law:>7} {found['counted'] / row['fedavg']:>7.3f} {least:>6}"


def run(quick: bool, parties: int = PARTIES, again: int = AGAIN, workers: int | None = None) -> list[dict]:
    """The rows, with what is wrong about each. `again`: how many of them are run under mpirun, too."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        some = covering(parties, cache) if quick else list(choices())
        rows = measure_all([(choice, parties, cache) for choice in some], workers or len(os.sched_getaffinity(0)))
        for at in range(again):
            row = rows[at * len(rows) // again]
            row["again"] = True
            row["wrong"] += elsewhere({axis: row[axis] for axis in AXES}, parties, cache)
    print(
        f"{len(rows)} combinations that are allowed, {parties} parties, {ROUNDS} rounds; a party and round, training:\n"
    )
    show(merged(rows))
    kinds = [message for row in rows for message in row["messages"]]
    exact = sum(message.get("sign") == laws.EXACT for message in kinds)
    print(
        f"\n{len(kinds)} kinds of message counted, {exact} with an exact law; {sum(len(row['wrong']) for row in rows)} broken"
    )
    print(f"{again} rows also under mpirun, and with a test after every round; {time.monotonic() - started:.0f} s")
    return rows


def main() -> int:
    parser = arguments("comm_cost", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="as few rows as cover every method and every pair of other values"
    )
    parser.add_argument("--parties", type=int, default=PARTIES)
    parser.add_argument("--mpirun", type=int, default=AGAIN, help="rows that are run under mpirun, too")
    parser.add_argument("--workers", type=int, help="rows at a time (default: cores)")
    options = parser.parse_args()
    facts = machine("numpy", "mpi4py", "torch")
    show_machine(facts)
    rows = run(options.quick, options.parties, options.mpirun, options.workers)
    wrong = [f"{' '.join(row[axis] for axis in AXES)}: {what}" for row in rows for what in row["wrong"]]
    for line in wrong:
        print(f"WRONG: {line}")
    save(options.json, facts, rows=rows, wrong=wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
