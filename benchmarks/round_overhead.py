"""What a round without training costs beyond its bytes: raw mpi4py, the endpoint, whole rounds of the engine, and others'.

    python -m benchmarks.round_overhead [--flower-python PYTHON] [--turns 3] [--json FILE]

20 parties of 270,000 parameters, a rank each. Raw and endpoint are benchmarks.transport: as many bytes down and up, nothing done with
them. The engine's rounds sample, send the model, take every party's update through the mechanism (clipped and rounded, no noise), add, step
and write their row; plain with all of the model down or with what it lacks of it, and secure. A party's update is drawn before the
first round. Flower runs its simulation under a Python of its own, its clients send back what they got. All
take turns, and each gives the median of its rounds after the first two.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import launch, toy
from benchmarks.common import arguments, machine, save, show_machine
from fedmpi.algorithm import LocalUpdate

MPIRUN = Path(sys.executable).parent / "mpirun"
SIZE = "FEDMPI_BENCHMARK_PARAMETERS"  # how the ranks of a job are told
WARM = 2  # rounds that are not counted

ENGINE = (
    "--preset demo-20 --method benchmarks.round_overhead:Method --dataset none --support dense --metrics none --epsilon inf "
    "--local-epochs 0 --eval-every 0 --checkpoint-every 0"
)
WHOLE_ROUNDS = {
    "fedmpi, plain, whole model down": "--aggregation plain --download full",
    "fedmpi, plain": "--aggregation plain",
    "fedmpi, secure": "--aggregation secure --graph complete",
}
BASE = "fedmpi, plain, whole model down"  # as the others do it


class Method(toy.Method):
    """Parties whose update is there already."""

    dimension = int(os.environ.get(SIZE) or 270_000)

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        self._update = np.random.default_rng(self.seed).standard_normal(self.dimension, np.float32)

    def work(self, party, theta, round):
        return LocalUpdate(party, self._update, None, {"loss": 0.0, "head_loss": 0.0, "penalty": 0.0})


def transport(parties: int, parameters: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    rows = folder / "transport.json"
    words = ["--parameters", str(parameters), "--rounds", str(rounds), "--json", str(rows)]
    command = [MPIRUN, "-n", str(parties + 1), sys.executable, "-m", "benchmarks.transport", *words]
    environment = launch.environment(MPIRUN, str(folder))
    subprocess.run(command, env=environment, cwd=launch.ROOT, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(rows.read_text())["seconds"]
    return {"raw mpi4py": found["raw"], "endpoint": found["endpoint"]}


def engine(flags: str, parties: int, rounds: int, folder: Path) -> list[float]:
    sizes = ["--parties", str(parties), "--rounds", str(rounds + WARM)]
    found = launch.job(MPIRUN, parties + 1, [*ENGINE.split(), *flags.split(), *sizes], str(folder), str(folder))
    return [row["seconds"] for row in found["round_rows"]][WARM:]


def others(options) -> dict[str, Callable[[], list[float]]]:
    sizes = [str(options.parties), str(options.parameters), str(options.rounds + WARM)]
    known = {}
    if options.flower_python:
        flower = [options.flower_python, "-m", "benchmarks.overhead_flower", *sizes]
        known["Flower's simulation"] = lambda: launch.peer(flower)["seconds"][WARM:]
    return known


def show(times: dict[str, list[float]]) -> None:
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"\n{'a round':<34} {'median [ms]':>12} {'best [ms]':>10} {'/ raw':>8} {'/ fedmpi':>9}")
    for name, seconds in times.items():
        of_raw, of_ours = middle[name] / middle["raw mpi4py"], middle[name] / middle[BASE]
        print(f"{name:<34} {1000 * middle[name]:>12.1f} {1000 * min(seconds):>10.1f} {of_raw:>8.2f} {of_ours:>9.2f}")


def main() -> None:
    parser = arguments("round_overhead", __doc__)
    parser.add_argument("--parties", type=int, default=20)
    parser.add_argument("--parameters", type=int, default=270_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--flower-python", metavar="PYTHON", help="a Python with flwr[simulation] and numpy")
    options = parser.parse_args()
    if min(options.parties - 2, options.parameters, options.rounds, options.turns) < 1:
        parser.error("3 parties or more, and 1 or more of everything else")
    os.environ[SIZE] = str(options.parameters)
    facts = machine("mpi4py", "numpy") | {"parties": options.parties, "parameters": options.parameters}
    show_machine(facts)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(options.turns):
            for kind, seconds in transport(options.parties, options.parameters, options.rounds, folder).items():
                times.setdefault(kind, []).extend(seconds)
            for kind, flags in WHOLE_ROUNDS.items():
                times.setdefault(kind, []).extend(engine(flags, options.parties, options.rounds, folder))
            for kind, run in others(options).items():
                times.setdefault(kind, []).extend(run())
    show(times)
    save(options.json, facts, seconds=times)


if __name__ == "__main__":
    main()
