"""What grows with the number of parties, and what a million would cost: CPU of a party and of rank 0, bytes, memory.

    python -m benchmarks.scaling [--quick] [--json FILE] [--parties 20 50 100 200 500 1000 2000] [--ranks 3] [--to 1000000]

Secure aggregation over the regular graph under mpirun, 33,640 coordinates with noise (benchmarks.toy: no training), nobody drops out.
CPU is what ranks measure of themselves by phase and primitive: a party's is the mean over parties and rounds, rank 0's is what all ranks
spent less what the clients did; its "wait for updates" is receiving, decoding and routing. Bytes are the ledger's, held against the size law; memory is the largest PSS of a rank.

Growth is fitted by least squares of relative errors, no coefficient below 0; k is the graph's degree, about a + b log n:

    a party's CPU     a + b k                    a party masks with its k neighbours, however many there are beside them
    rank 0's CPU      a + n (b + c k)            it carries and opens k shares of each party, and adds up one vector of each
    rank 0's memory   a + b n                    a client rank's: a + b of its parties

Beside them a straight line through the logarithms (its slope) and, of a party, a + b log2 n; each with its largest relative residual.
"""

from __future__ import annotations

import csv
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.counted import beside_law
from benchmarks.launch import job
from benchmarks.toy import DIMENSION
from fedmpi.bill import laws
from fedmpi.bill.shape import Setting
from fedmpi.cli import resolve
from fedmpi.config import Config
from fedmpi.secagg.graph import regular_parameters
from fedmpi.wire.phases import Cost, Phase

FULL = (20, 50, 100, 200, 500, 1000, 2000)
QUICK = (20, 50, 100, 200)
RANKS, ROUNDS, MILLION = 3, 2, 1_000_000
TOY = (
    "--preset demo-20 --method benchmarks.toy:Method --dataset none --support dense --aggregation secure --graph regular "
    "--eval-every 0 --checkpoint-every 0 --local-epochs 0"
).split()
NOT_A_ROUND = ("setup", "references", "evaluation", "checkpoint", "keep parties")
LOCAL = str(Cost.LOCAL_WORK)  # with the toy method the drawing of a made-up update
ENCODE = str(Cost.ENCODE)  # which rank 0 never does


def flags(parties: int, rounds: int) -> list[str]:
    return [*TOY, "--parties", str(parties), "--rounds", str(rounds)]


# ---- what is measured ----


def measure(parties: int, ranks: int, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = job(Path(sys.executable).parent / "mpirun", ranks, flags(parties, rounds), folder, folder, out)
        row = beside_law(resolve([*flags(parties, rounds), "--out", str(out)]), out) | cpu(run, out, parties, rounds)
    peaks = run["peak_pss_by_rank"]
    return row | {
        "ranks": ranks,
        "up": row[laws.UP]["counted"],
        "down": row[laws.DOWN]["counted"],
        "server_pss": peaks.get(0, 0),
        "client_pss": max((size for rank, size in peaks.items() if rank), default=0),
        "hosted": -(-parties // (ranks - 1)),
        "round_seconds": [row["seconds"] for row in run["round_rows"]],
    }


def cpu(run: dict, out: Path, parties: int, rounds: int) -> dict:
    """Seconds of CPU in a round, without local work: of a party in the mean, and of rank 0; each by what it was spent on."""
    by_client = client_seconds(out)
    spent = Counter({name: seconds["cpu"] for name, seconds in run["seconds"].items() if name not in NOT_A_ROUND})
    for (_, cost), seconds in by_client.items():
        spent[cost] -= seconds
    client = {f"{phase}: {cost}": s / parties / rounds for (phase, cost), s in by_client.items() if cost != LOCAL}
    # Rows of a matrix are encoded for all parties of a rank at once, and charged to none of them.
    client[f"{Phase.UPDATE}: {ENCODE}"] = (
        client.get(f"{Phase.UPDATE}: {ENCODE}", 0.0) + spent[ENCODE] / parties / rounds
    )
    server = {name: s / rounds for name, s in spent.items() if name not in (LOCAL, ENCODE) and s / rounds > 1e-4}
    return {
        "client": client,
        "client_cpu": sum(client.values()),
        "server": server,
        "server_cpu": sum(server.values()),
    }


def client_seconds(run: Path) -> Counter[tuple[str, str]]:
    """CPU of all parties over all rounds, by phase and primitive."""
    found: Counter[tuple[str, str]] = Counter()
    with (run / "costs.csv").open() as file:
        for row in csv.DictReader(file):
            found[row["phase"], row["cost"]] += float(row["cpu_seconds"])
    return found


# ---- how it grows ----


class Fit:
    """y as a sum of these terms, each with a coefficient that is not below 0."""

    def __init__(self, text: str, terms: Callable[[dict], Sequence[float]], rows: list[dict], what: str):
        self.text, self._terms = text, terms
        values = np.array([row[what] for row in rows])
        design = np.array([terms(row) for row in rows], float)
        self.coefficients, _ = nnls(design / values[:, None], np.ones(len(values)))
        self.residual = float(np.abs(design @ self.coefficients / values - 1).max())

    def at(self, row: dict) -> float:
        return float(np.dot(self._terms(row), self.coefficients))

    def said(self) -> str:
        found = ", ".join(f"{name} = {value:.3g}" for name, value in zip("abc", self.coefficients))
        return f"{self.text}: {found}; residual at most {100 * self.residual:.0f} %"

    def as_dict(self) -> dict:
        return {"law": self.text, "coefficients": self.coefficients.tolist(), "largest_residual": self.residual}


def slope(rows: list[dict], what: str) -> tuple[float, float]:
    """(exponent of n, largest relative residual) of a straight line through the logarithms."""
    n, y = (np.log([row[name] for row in rows]) for name in ("parties", what))
    line = np.polyfit(n, y, 1)
    return float(line[0]), float(np.abs(np.exp(y - np.polyval(line, n)) - 1).max())


def fits(rows: list[dict]) -> dict[str, Fit]:
    return {
        "client_cpu": Fit("a + b k", lambda row: (1, row["degree"]), rows, "client_cpu"),
        "client_cpu_log": Fit("a + b log2 n", lambda row: (1, math.log2(row["parties"])), rows, "client_cpu"),
        "server_cpu": Fit(
            "a + n (b + c k)",
            lambda row: (1, row["parties"], row["parties"] * row["degree"]),
            rows,
            "server_cpu",
        ),
        "server_pss": Fit("a + b n", lambda row: (1, row["parties"]), rows, "server_pss"),
        "client_pss": Fit("a + b hosted", lambda row: (1, row["hosted"]), rows, "client_pss"),
    }


def extrapolate(found: dict[str, Fit], parties: int, rounds: int) -> dict:
    """Bytes, degree and width are those of the laws, CPU and memory of the fits."""
    config = resolve(flags(parties, rounds))
    settings = config.aggregation
    degree, threshold = regular_parameters(parties, settings.corrupt, settings.expected_dropout)
    bill = laws.price(Setting(config), parties)
    assert bill.degree == degree
    at = {"parties": parties, "degree": degree}
    return at | {
        "threshold": threshold,
        "bits": bill.bits,
        "up": laws.total(bill.training, laws.UP),
        "down": laws.total(bill.training, laws.DOWN),
        "down_sign": laws.surety(line for line in bill.training if line.direction == laws.DOWN),
        **{name: found[name].at(at) for name in ("client_cpu", "client_cpu_log", "server_cpu", "server_pss")},
    }


def breaks(far: dict, largest: int, config: Config) -> list[str]:
    """What the figures take for granted, and what would not hold at that size."""
    settings, moved = config.aggregation, far["parties"] * (far["up"] + far["down"])
    return [
        f"measured up to {largest} parties; beyond, CPU and memory follow the fits, which nothing has tested there. Bytes, degree and "
        "bits are the laws' and need no fit",
        "every party computes on a device of its own, at the speed of this machine; local training is not in it",
        f"degree {far['degree']} and threshold {far['threshold']} are those of fedmpi.secagg.graph for {settings.corrupt:g} corrupt and "
        f"{settings.expected_dropout:g} dropping out, 2^-40 a round at most; here nobody drops out, and who does costs rank 0 up to "
        f"{far['degree']} mask streams more",
        f"what breaks: rank 0 computes {far['server_cpu'] / 60:.0f} minutes a round on its one thread, carries {moved / 1e9:.0f} GB "
        f"({8 * moved / 1e10 / 60:.1f} minutes of a 10 Gbit/s link), and holds {far['server_pss'] / 1e9:.0f} GB in one process, "
        f"{far['server_pss'] / far['parties'] / far['up']:.1f} times what a party sends, of every party",
    ]


# ---- what is said ----


def show(rows: list[dict]) -> None:
    print(
        f"\n{'parties':>9} {'degree':>6} {'bits':>4} {'party CPU':>10} {'rank 0 CPU':>11} {'up':>9} {'down':>9} {'rank 0 PSS':>11}"
        f" {'a client rank':>14} {'round':>8}"
    )
    for row in rows:
        print(
            f"{row['parties']:>9,} {row['degree']:>6} {row['bits']:>4} {1e3 * row['client_cpu']:>7.1f} ms {row['server_cpu']:>9.3f} s"
            f" {row['up'] / 1e3:>6.1f} kB {row['down'] / 1e3:>6.1f} kB {row['server_pss'] / 1e6:>8.0f} MB"
            f" {row['client_pss'] / 1e6:>11.0f} MB {np.median(row['round_seconds']):>6.1f} s"
        )
    for who, unit, scale in (("client", "ms of a party", 1e3), ("server", "s of rank 0", 1.0)):
        names = sorted({name for row in rows for name in row[who]}, key=lambda name: -rows[-1][who].get(name, 0.0))
        print(f"\n{unit + ', CPU a round':<32}" + "".join(f"{row['parties']:>9,}" for row in rows) + "    slope")
        for name in names:
            values = [scale * row[who].get(name, 0.0) for row in rows]
            some = [{"parties": row["parties"], "y": value} for row, value in zip(rows, values) if value > 1e-4]
            growth = f"{slope(some, 'y')[0]:9.2f}" if len(some) > 2 else ""
            print(f"  {name:<30}" + "".join(f"{value:>9.3f}" for value in values) + growth)


def show_growth(rows: list[dict], found: dict[str, Fit], far: dict, said: list[str]) -> None:
    print("\ngrowth")
    for name, fit in found.items():
        print(f"  {name:<15} {fit.said()}")
    for name in ("client_cpu", "server_cpu", "up", "down", "server_pss"):
        exponent, residual = slope(rows, name)
        print(f"  {name:<15} n^{exponent:.2f}; residual at most {100 * residual:.0f} %")
    print(
        f"\n{far['parties']:,} parties: {1e3 * far['client_cpu']:.0f} ms of a party (by log2 n {1e3 * far['client_cpu_log']:.0f}), "
        f"{far['server_cpu']:.0f} s of rank 0, {far['up'] / 1e3:.1f} kB up and {far['down_sign']}{far['down'] / 1e3:.1f} kB down, "
        f"{far['server_pss'] / 1e9:.1f} GB on rank 0; {far['degree']} neighbours, {far['bits']} bits a coordinate"
    )
    for line in said:
        print(f"  - {line}")


def run(parties: Sequence[int], ranks: int = RANKS, rounds: int = ROUNDS, to: int = MILLION) -> dict:
    rows = [measure(n, ranks, rounds) for n in parties]
    found = fits(rows)
    beyond = [10**power for power in range(1, 12) if max(parties) < 10**power < to]
    path = [extrapolate(found, n, rounds) for n in (*beyond, to)]
    far = path[-1]
    said = breaks(far, max(parties), resolve(flags(to, rounds)))
    show(rows)
    show_growth(rows, found, far, said)
    said_of_fits = {name: fit.as_dict() for name, fit in found.items()}
    return {"rows": rows, "fits": said_of_fits, "path": path, "far": far, "assumptions": said}


def main() -> int:
    parser = arguments("scaling", __doc__)
    parser.add_argument("--quick", action="store_true", help=f"up to {QUICK[-1]} parties")
    parser.add_argument("--parties", type=int, nargs="+", help="three numbers or more")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--to", type=int, default=MILLION, metavar="N", help="parties to extrapolate to")
    options = parser.parse_args()
    facts = machine("numpy", "mpi4py", "cryptography", "pycryptodome")
    show_machine(facts)
    print(
        f"{DIMENSION} coordinates, {options.ranks} ranks, {options.rounds} rounds, secure, regular graph, noise for epsilon 8"
    )
    result = run(options.parties or (QUICK if options.quick else FULL), options.ranks, options.rounds, options.to)
    save(options.json, facts, **result)
    wrong = [f"{row['parties']} parties: {what}" for row in result["rows"] for what in row["wrong"]]
    for line in wrong:
        print(f"WRONG: {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
