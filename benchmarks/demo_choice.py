"""How the settings of preset `demo` were chosen, and what sharing brings under them.

    python -m benchmarks.demo_choice [--json FILE] [--keep DIR] [--ranks 3] [--show]

200 parties draw 20 training samples each from one pool of scikit-learn's 1,797 digits, so two of them may share samples; nobody is
tested on what another trains on. Settings were varied around a start, on validation samples (--validation-fraction: the test
samples are then in none of the files that a run reads) and seeds 0 to 2. Then those of the preset, on test samples and five other
seeds, beside what a party can have alone: the local work of as many rounds and of twice as many (`local-only`), and
`--local-epochs` of joint training, which the closing table of every run shows. Updates are added up in the clear, which leaves the
same model as secure aggregation and costs less. Results are kept in --keep and not run again.
"""

import statistics
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import KeptJobs

COMMON = "--preset demo --aggregation plain --eval-every 0 --checkpoint-every 0"
START = {
    "epsilon": "2",
    "rounds": "10",
    "clip": "0.3",
    "ext-lr": "0.1",
    "head-epochs": "5",
    "ext-epochs": "2",
    "sparse-layers": "2",
    "density": "0.05",
}
TRIED = (
    {},
    {"clip": "0.6"},
    {"rounds": "5", "ext-epochs": "4"},
    {"density": "0.2"},
    {"density": "0.2", "rounds": "5"},
    {"density": "0.5"},
    {"density": "0.2", "rounds": "5", "clip": "0.6"},
    {"density": "0.2", "rounds": "5", "clip": "0.6", "ext-lr": "0.2"},
)
CHOSEN = TRIED[-1]  # as the preset has it
VALIDATION, CHOSEN_ON, CONFIRMED_ON = "0.25", (0, 1, 2), (8, 9, 10, 11, 12)
ALONE = "--method local-only --support dense --local-epochs 0"
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles of Student's t by number of pairs


def settings(changed: dict[str, str]) -> str:
    """All that was varied, as flags: a run's name then stands for its settings."""
    return " ".join(f"--{name} {value}" for name, value in (START | changed).items())


def on_validation(changed: dict[str, str]) -> str:
    return f"{settings(changed)} --validation-fraction {VALIDATION} --local-epochs 0"


def alone(rounds: int) -> str:
    local = " ".join(f"--{name} {(START | CHOSEN)[name]}" for name in ("ext-lr", "head-epochs", "ext-epochs"))
    return f"{ALONE} {local} --epsilon inf --rounds {rounds}"


class Choice:
    def __init__(self, options):
        self.jobs, self.only_show = KeptJobs(options.keep, options.ranks), options.show

    def run(self, flags: str, seed: int) -> dict | None:
        name = "-".join(word.removeprefix("--") for word in f"{flags} s {seed}".split())
        if self.only_show and not self.jobs.has(name):
            return None
        return self.jobs.run(name, f"{COMMON} {flags} --seed {seed}".split())

    def tried(self, changed: dict[str, str]) -> dict | None:
        """One setting on validation samples; norms beside C tell a bound that is too tight."""
        runs = [self.run(on_validation(changed), seed) for seed in CHOSEN_ON]
        runs = [run for run in runs if run]
        return runs and {
            "changed": changed,
            "accuracy": [100 * run["accuracy"] for run in runs],
            "untrained": [100 * run["accuracy_untrained"] for run in runs],
            "first_norm": statistics.mean(run["round_rows"][0]["update_norm"] for run in runs),
            "last_norm": statistics.mean(run["round_rows"][-1]["update_norm"] for run in runs),
            "coordinates": runs[0]["coordinates"],
            "cpu_seconds": statistics.mean(sum(phase["cpu"] for phase in run["seconds"].values()) for run in runs),
        }

    def confirmed(self) -> list[dict]:
        rows, rounds = [], int(CHOSEN["rounds"])
        for seed in CONFIRMED_ON:
            shared = self.run(settings(CHOSEN), seed)
            as_long, twice = (self.run(alone(count), seed) for count in (rounds, 2 * rounds))
            if shared and as_long and twice:
                figures = {
                    "shared": shared["accuracy"],
                    "as_long": as_long["accuracy"],
                    "twice": twice["accuracy"],
                    "local_epochs": shared["accuracy_local_only"],
                    "untrained": shared["accuracy_untrained"],
                }
                epsilon = {key: shared[key] for key in ("epsilon_outside", "epsilon_server", "epsilon_kind", "delta")}
                rows.append({"seed": seed} | {name: 100 * figure for name, figure in figures.items()} | epsilon)
        return rows


def spread(values: list[float]) -> str:
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {sd:.2f}"


def difference(rows: list[dict], name: str) -> str:
    """Shared less `name`, seed by seed, with the interval that holds its mean in 95 of 100 such benchmarks."""
    pairs = [row["shared"] - row[name] for row in rows]
    if len(pairs) < 2:
        return f"{pairs[0]:+.2f}"
    half = STUDENT[len(pairs)] * statistics.stdev(pairs) / len(pairs) ** 0.5
    middle = statistics.mean(pairs)
    return f"{middle:+.2f} ({middle - half:+.2f} to {middle + half:+.2f})"


def show(tried: list[dict], confirmed: list[dict]) -> None:
    start = ", ".join(f"{name} {value}" for name, value in START.items())
    print(f"\nvalidation samples, seeds {CHOSEN_ON[0]} to {CHOSEN_ON[-1]}; start: {start}")
    print(
        f"{'changed':<46} {'seeds':>5} {'accuracy [%]':>15} {'untrained':>10} {'shared':>7} {'update norms':>13} {'CPU [s]':>8}"
    )
    for row in tried:
        changed = ", ".join(f"{name} {value}" for name, value in row["changed"].items()) or "nothing"
        norms = f"{row['first_norm']:.2f}..{row['last_norm']:.2f}"
        print(
            f"{changed:<46} {len(row['accuracy']):>5} {spread(row['accuracy']):>15} {statistics.mean(row['untrained']):>10.2f} "
            f"{row['coordinates']:>7} {norms:>13} {row['cpu_seconds']:>8.0f}"
        )
    if confirmed:
        print(f"\ntest samples, seeds {', '.join(str(row['seed']) for row in confirmed)}: the preset's settings")
        print(f"{'':<34} {'accuracy [%]':>15}  shared less it (95 % interval)")
        print(f"{'DP-pFedDSU, shared':<34} {spread([row['shared'] for row in confirmed]):>15}")
        named = {
            "as_long": "alone, as many rounds",
            "twice": "alone, twice as many rounds",
            "local_epochs": "alone, --local-epochs",
            "untrained": "a head on the untrained extractor",
        }
        for name, said in named.items():
            print(f"{said:<34} {spread([row[name] for row in confirmed]):>15}  {difference(confirmed, name)}")


def main() -> None:
    parser = arguments("demo_choice", __doc__)
    parser.add_argument("--ranks", type=int, default=3, help="a server and a rank for every core (default 3)")
    parser.add_argument("--keep", type=Path, default=Path("runs/demo-choice"))
    parser.add_argument("--show", action="store_true", help="run nothing, print what is kept")
    options = parser.parse_args()
    facts, choice = machine("torch", "mpi4py", "numpy"), Choice(options)
    show_machine(facts)
    tried = [row for row in map(choice.tried, TRIED) if row]
    confirmed = choice.confirmed()
    show(tried, confirmed)
    choice.jobs.say_what_is_older()
    save(options.json, facts, start=START, tried=tried, confirmed=confirmed)


if __name__ == "__main__":
    main()
