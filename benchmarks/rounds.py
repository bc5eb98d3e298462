"""Rounds per hour of FedRep's local work on ResNet20 and CIFAR-10, and memory, beside an older checkout and beside Flower's simulation.

    python -m benchmarks.rounds --data-dir DIR [--before CHECKOUT] [--flower-python PYTHON] [--json FILE]

20 parties of 100 images, batches of 64, 15 epochs on the head and 5 on the extractor, no noise, plain aggregation. The jobs take turns
and each gives the median of its rounds after the first, so that start-up counts for nobody; the first round stands beside it. --before
names a checkout of an earlier commit whose rounds are to be compared. Flower runs under a Python of its own (flwr[simulation], torch,
numpy), two clients at a time, once as one would write FedRep there and once with features computed once and images channels last.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import launch
from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.cli import resolve
from fedmpi.runtime import build

FLAGS = (
    "--preset cifar10-s5 --method fedrep --support dense --epsilon inf --aggregation plain --samples-per-party 100 "
    "--local-epochs 0 --metrics none --checkpoint-every 0"
)


def ours(flags: list[str], ranks: int, cache: str, folder: str, checkout: Path) -> dict:
    found = launch.job(Path(sys.executable).parent / "mpirun", ranks, flags, cache, folder, checkout=checkout)
    seconds = [row["seconds"] for row in found["round_rows"]]
    return {"seconds": seconds, "peak_pss": found["peak_pss"], "ranks": ranks, "model_sha256": found["model_sha256"]}


def flower(python: str, data: Path, rounds: int, kind: str) -> dict:
    return launch.peer([python, "-m", "benchmarks.rounds_flower", str(data), str(rounds), kind])


def export(flags: list[str], cache: str, path: Path) -> Path:
    """The parties' training data, normalised, for the other side."""
    store = build.open_store(resolve([*flags, "--cache-dir", cache]))
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (store.mean, store.std))
    arrays = {"parties": np.array(store.parties)}
    for party in range(store.parties):
        shard = store.shard(party)
        arrays[f"x{party}"] = (np.asarray(shard.train_x, np.float32) / 255 - mean) / std
        arrays[f"y{party}"] = np.array(shard.train_y)
    np.savez(path, **arrays)
    return path


def main() -> None:
    parser = arguments("rounds", __doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 21])
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--flower-python", help="a Python with flwr[simulation], torch and numpy")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: the first one is not counted, so 2 or more")
    facts = machine("torch", "mpi4py", "numpy")
    show_machine(facts)
    here = Path(__file__).parent.parent
    flags = [*FLAGS.split(), "--rounds", str(options.rounds), "--data-dir", str(options.data_dir.absolute())]
    rows: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = f"{folder}/cache"
        data = export(flags, cache, Path(folder) / "parties.npz") if options.flower_python else None
        for _ in range(options.turns):
            for ranks in options.ranks:
                for name, checkout in (("fedmpi", here), ("before", options.before)):
                    if checkout:
                        result = ours(flags, ranks, cache, folder, checkout.absolute())
                        rows.setdefault(f"{name}, {ranks} ranks", []).append(result)
            for kind in ("plain", "same") if data else ():
                result = flower(options.flower_python, data, options.rounds, kind)
                rows.setdefault(f"Flower, {kind}", []).append(result)
    base = None
    print(f"\n{'':<20} {'first [s]':>10} {'round [s]':>10} {'rounds/hour':>12} {'/ fedmpi':>9} {'memory [GiB]':>13}")
    for name, results in rows.items():
        later = statistics.median(second for result in results for second in result["seconds"][1:])
        base = base or later
        first = statistics.median(result["seconds"][0] for result in results)
        memory = max(result["peak_pss"] for result in results) / 2**30
        print(f"{name:<20} {first:>10.1f} {later:>10.1f} {3600 / later:>12.0f} {later / base:>9.2f} {memory:>13.2f}")
    save(options.json, facts, flags=FLAGS, rows=rows)


if __name__ == "__main__":
    main()
