"""The first paper's evaluation: tables II to VII and figure 2, each by one command.

    python -m benchmarks.paper_tables II --data-dir DIR [--scale 0.05] [--seeds 3] [--keep DIR] [--json FILE]
    python -m benchmarks.paper_tables figure2 --figure loss.png

Runs what is missing, resumes what was interrupted, prints the paper's value beside ours (mean ± sd over seeds), what it adds to
the same parties each alone for as many rounds (`lift`) and to a head on the extractor as it was drawn, and whether its epsilon
holds. DP-pFedDSU stands twice in every table: with support `own`, which is the paper to the letter and has a nominal epsilon only,
and with `shared`, whose epsilon holds. DP-pFedHome is not in the paper: see its file in fedmpi/vision/methods.

--scale S cuts a table in a stated way: S times the training samples of a party, the fourth root of S times the rounds (the noise adds
up over rounds, so they are cut less), batches smaller by the square root of S but 8 at least (or hardly a step would be left), 200 test
samples a party at most, all parties (the noise of a mean depends on them); below 0.05 also images of half the width and height. --list
prints the runs with their numbers, and --cell I runs one of them, for an array job; --check says before it how much there is to do.
"""

import math
import statistics
import zlib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import KeptJobs
from fedmpi.cli import resolve
from fedmpi.data.images import catalog
from fedmpi.errors import DataError, FedmpiError

# Training samples of a party in the full data set.
SAMPLES = {"cifar10": 2500, "cifar100": 500, "emnist": 5640}

RIVALS = {
    "DP-FedAvg-fb": "--method dp-fedavg-fb --support dense",
    "PPSGD": "--method ppsgd --support dense",
    "PMTL-FT": "--method pmtl-ft --support dense",
    "CENTAUR": "--method centaur --support dense",
}
CHANGED = {"DP-pFedHome": "--method dp-pfedhome --support dense --eval-every 0"}  # not in the paper; its tests are long
ALONE = "--method local-only --support dense --epsilon inf"
CEILINGS = {
    "each party alone": ALONE,
    "FedRep, no noise": "--method fedrep --support dense --epsilon inf",
    "FedAvg, no noise": "--method fedavg --support dense --epsilon inf",
}
OURS = {
    "DP-pFedDSU, own": "--method dp-pfeddsu --aggregation plain --support own",
    "DP-pFedDSU, shared": "--method dp-pfeddsu --support shared",
}


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    preset: str
    flags: str
    paper: float | None


def _table_two() -> list[Cell]:
    """Accuracy of all methods, epsilon 1."""
    paper = {
        "emnist-s5": (69.97, 66.80, 69.97, 81.11, 81.80),
        "emnist-s10": (54.93, 52.89, 54.63, 68.97, 71.87),
        "cifar10-s2": (83.70, 84.35, 83.34, 85.11, 86.29),
        "cifar10-s5": (49.00, 53.00, 48.86, 53.92, 55.76),
        "cifar10-s10": (36.98, 43.02, 36.29, 41.06, 43.92),
        "cifar100-s3": (47.26, 62.63, 48.26, 60.26, 63.47),
        "cifar100-s5": (29.91, 44.01, 29.67, 43.56, 46.00),
        "cifar100-s10": (17.70, 28.63, 17.58, 28.30, 28.80),
    }
    return [cell for preset, values in paper.items() for cell in _methods(preset, preset, "", values)]


def _methods(column: str, preset: str, flags: str, values: tuple) -> list[Cell]:
    rivals = [Cell(name, column, preset, f"{own} {flags}", value) for (name, own), value in zip(RIVALS.items(), values)]
    ours = [Cell(name, column, preset, f"{own} {flags}", values[-1]) for name, own in OURS.items()]
    changed = [Cell(name, column, preset, f"{own} {flags}", None) for name, own in CHANGED.items()]
    return rivals + ours + changed + [Cell(name, column, preset, own, None) for name, own in CEILINGS.items()]


def _table_three() -> list[Cell]:
    """CIFAR-10, s = 5, under three budgets."""
    paper = {
        "0.5": (48.84, 51.62, 48.76, 53.40, 55.71),
        "1": (49.00, 53.00, 48.86, 53.92, 55.76),
        "2": (53.13, 55.50, 52.94, 54.85, 55.94),
    }
    return [
        c for eps, values in paper.items() for c in _methods(f"ε = {eps}", "cifar10-s5", f"--epsilon {eps}", values)
    ]


def _table_four() -> list[Cell]:
    """What reparameterised training (RT) and the dynamic adaptive norm (DAN) add to CENTAUR."""
    paper = {
        "cifar10-s10": (41.06, 43.38, 43.92),
        "cifar10-s5": (53.92, 55.05, 55.76),
        "emnist-s10": (68.97, 71.10, 71.87),
    }
    cells = []
    for preset, (neither, rt, both) in paper.items():
        cells.append(Cell("neither (CENTAUR)", preset, preset, RIVALS["CENTAUR"], neither))
        for name, own in OURS.items():
            support = name.split(", ")[1]
            cells.append(Cell(f"RT, {support}", preset, preset, f"{own} --dan-weight 0", rt))
            cells.append(Cell(f"RT + DAN, {support}", preset, preset, own, both))
    return cells


def _sweep(option: str, paper: dict[str, float], flags: str = "") -> list[Cell]:
    """One setting of DP-pFedDSU on CIFAR-10, s = 10, where the paper's figures are."""
    return [
        Cell(name, value, "cifar10-s10", f"{own} --{option} {value} {flags}", accuracy)
        for value, accuracy in paper.items()
        for name, own in OURS.items()
    ]


TABLES = {
    "II": _table_two,
    "III": _table_three,
    "IV": _table_four,
    "V": lambda: _sweep(
        "density",
        {"0.01": 42.1, "0.05": 42.23, "0.1": 41.25, "0.3": 41.95, "0.5": 41.32, "0.7": 42.04, "0.9": 42.18},
        "--dan-weight 0",
    ),
    "VI": lambda: _sweep(
        "sparse-layers",
        {"1": 42.23, "2": 41.56, "3": 41.6, "4": 43.4, "5": 42.61, "6": 43.09, "7": 40.74, "8": 41.64},
        "--dan-weight 0",
    ),
    "VII": lambda: _sweep(
        "dan-weight",
        {"0.1": 43.38, "0.2": 43.92, "0.3": 43.41, "0.4": 42.69, "0.5": 42.72, "0.6": 43.06, "0.7": 43.35},
    ),
    "figure2": lambda: [c for c in _methods("training loss", "cifar10-s5", "", (None,) * 5) if c.row not in CEILINGS],
}


class Runner:
    def __init__(self, options):
        self.options = options
        self.jobs = KeptJobs(options.keep, options.ranks)

    def flags(self, cell: Cell, seed: int) -> list[str]:
        options, flags = self.options, ["--preset", cell.preset, "--seed", str(seed), *cell.flags.split()]
        if options.scale < 1:
            rounds = 50 if cell.preset.startswith("emnist") else 100
            samples = math.ceil(options.scale * SAMPLES[cell.preset.split("-")[0]])
            flags += f"--rounds {math.ceil(options.scale**0.25 * rounds)} --samples-per-party {samples}".split()
            flags += f"--batch-size {max(8, round(64 * options.scale**0.5))} --test-samples-per-party 200".split()
            flags += ["--shrink", "2"] if options.scale < 0.05 else []
        return [*flags, "--local-epochs", "0", *options.extra.split()]

    def name(self, cell: Cell, seed: int) -> str:
        return f"{cell.preset}-s{seed}-{zlib.crc32(' '.join(self.flags(cell, seed)).encode()):08x}"

    def run(self, cell: Cell, seed: int) -> dict | None:
        """The run's summary and rounds: kept, gone on with, or new; with --show, None if it is not there."""
        flags, data_dir, name = self.flags(cell, seed), self.options.data_dir, self.name(cell, seed)
        if self.options.show and not self.jobs.has(name):
            return None
        where = ["--round-deadline", "1e6"]  # a party alone does all its rounds in one answer
        return self.jobs.run(name, flags, [*where, *(["--data-dir", str(data_dir.absolute())] if data_dir else [])])


def check(runner: Runner, runs: list[tuple[Cell, int]]) -> str:
    """What there is to do, if its data is there: a cluster shall not find out in every run by itself."""
    missing = [run for run in runs if not runner.jobs.has(runner.name(*run))]
    if not missing:
        return f"all {len(runs)} runs are kept"
    # settings that decide on data and length are those of a preset, and of --extra
    configs = [resolve(runner.flags(*run)) for run in {cell.preset: (cell, seed) for cell, seed in missing}.values()]
    for config in configs:
        given = runner.options.data_dir or (config.data.data_dir and Path(config.data.data_dir).expanduser())
        try:
            catalog.get(config.data.dataset).locate(given or runner.jobs.folder / "cache" / "downloads")
        except DataError as error:
            raise DataError(str(error) if given else f"{error}, or give --data-dir") from None
    rounds, parties = (span([getattr(config.run, name) for config in configs]) for name in ("rounds", "parties"))
    return f"{len(missing)} of {len(runs)} runs to do, of {rounds} rounds with {parties} parties on {runner.options.ranks} ranks"


def span(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else str(numbers[0])


def reference(cell: Cell) -> Cell:
    """What a cell's lift is over: the same parties, data and local work, each on its own."""
    return Cell("each party alone", cell.column, cell.preset, ALONE, None)


def show(cells: list[Cell], found: dict[Cell, list[dict]]) -> list[dict]:
    rows = []
    for column in dict.fromkeys(cell.column for cell in cells):
        print(f"\n{column}")
        print(f"  {'':<22} {'paper':>7} {'ours':>15} {'lift':>15} {'over untrained':>15}  epsilon")
        for cell in (cell for cell in cells if cell.column == column):
            pairs = [(run, alone) for run, alone in zip(found[cell], found[reference(cell)]) if run and alone]
            if not pairs:
                print(f"  {cell.row:<22} {'no run yet':>23}")
                continue
            runs = [run for run, _ in pairs]
            own = [100 * run["accuracy"] for run in runs]
            lift = [100 * (run["accuracy"] - alone["accuracy"]) for run, alone in pairs]
            trained = [100 * (run["accuracy"] - run["accuracy_untrained"]) for run in runs]
            paper = f"{cell.paper:.2f}" if cell.paper is not None else ""
            print(
                f"  {cell.row:<22} {paper:>7} {spread(own)} {spread(lift)} {spread(trained)}  {runs[0]['epsilon_kind']}"
            )
            rows.append({"row": cell.row, "column": column, "paper": cell.paper, "flags": cell.flags, "accuracy": own})
            rows[-1] |= {"lift": lift, "over_untrained": trained, "epsilon_kind": runs[0]["epsilon_kind"]}
            rows[-1] |= {"seconds": [run["wall_seconds"] for run in runs]}
    return rows


def spread(values: list[float]) -> str:
    """Mean and sd over seeds."""
    return f"{statistics.mean(values):>7.2f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:<5.2f}"


def draw(cells: list[Cell], found: dict[Cell, list[dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for cell in cells:
        curves = [[row.get("loss", math.nan) for row in run["round_rows"]] for run in found[cell] if run]
        if curves:
            means = [statistics.mean(values) for values in zip(*curves)]
            axes.plot(range(1, len(means) + 1), means, label=cell.row)
    axes.set(xlabel="round", ylabel="training loss, mean over parties", title="figure 2")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = arguments("paper_tables", __doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--columns", nargs="*", default=[], help="only these columns, as II has cifar10-s5")
    parser.add_argument("--rows", nargs="*", default=[], help="only these rows, as II has CENTAUR")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--ranks", type=int, default=21)
    parser.add_argument("--keep", type=Path, default=Path("runs/paper_tables"))
    parser.add_argument("--extra", default="", help="further fedmpi options for every run, in one string")
    parser.add_argument("--figure", type=Path, help="draw the training loss to this file (needs matplotlib)")
    parser.add_argument("--list", action="store_true", help="print the runs and their numbers, and stop")
    parser.add_argument("--check", action="store_true", help="see whether the data is there, say what is to do, stop")
    parser.add_argument("--show", action="store_true", help="run nothing, print what is kept")
    parser.add_argument("--cell", type=int, help="do this one run and stop")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: must be 1 or more")
    if not 0 < options.scale <= 1:
        parser.error(f"--scale {options.scale}: must be above 0 and at most 1")
    known = TABLES[options.table]()
    for what, chosen in (("row", options.rows), ("column", options.columns)):
        names = dict.fromkeys(getattr(cell, what) for cell in known)
        for name in chosen:
            if name not in names:
                parser.error(f"--{what}s {name}: table {options.table} has {'; '.join(names)}")
    cells = [
        cell
        for cell in known
        if (not options.columns or cell.column in options.columns) and (not options.rows or cell.row in options.rows)
    ]
    wanted = dict.fromkeys([*cells, *map(reference, cells)])
    runner = Runner(options)
    runs = [(cell, seed) for seed in range(options.seeds) for cell in wanted]
    different = {" ".join(runner.flags(*run)): run for run in runs}  # columns can share a reference
    if options.list:
        for number, flags in enumerate(different):
            print(number, flags)
        return
    if options.check:
        try:
            print(check(runner, list(different.values())))
        except FedmpiError as error:
            raise SystemExit(f"paper_tables: {error}") from None
        return
    if options.cell is not None and not 0 <= options.cell < len(different):
        parser.error(f"--cell {options.cell}: there are {len(different)} runs, 0 to {len(different) - 1}")
    facts = machine("torch", "mpi4py", "numpy")
    show_machine(facts)
    if options.cell is not None:
        runner.run(*list(different.values())[options.cell])
        return
    found: dict[Cell, list[dict]] = {cell: [] for cell in wanted}
    for cell, seed in runs:
        found[cell].append(runner.run(cell, seed))
    rows = show(cells, found)
    runner.jobs.say_what_is_older()
    if options.figure:
        draw(cells, found, options.figure)
    save(options.json, facts, table=options.table, scale=options.scale, rows=rows)


if __name__ == "__main__":
    main()
