"""What a person sees: a few lines before, a progress bar if this is a terminal and else a line now and then, one table after."""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedmpi.privacy.statement import Statement
from fedmpi.report.savings import PROTOCOL_COSTS

WIDTH = 110
LINE_EVERY = 60.0  # seconds between two lines of a job that nobody watches
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "srun")


def screen_behind_launcher(environ) -> str | None:
    """The terminal that a person watches, if there is one.

    A rank's own stdout does not tell: Open MPI gives every rank a pseudo-terminal and MPICH a pipe, whatever is behind. The
    launcher's stdout does. FEDMPI_PROGRESS=0 keeps it silent, in a terminal and elsewhere.
    """
    if environ.get("FEDMPI_PROGRESS") == "0":
        return None
    try:
        parents = psutil.Process().parents()
        launcher = next((process.pid for process in parents if process.name() in LAUNCHERS), "self")
        path = os.readlink(f"/proc/{launcher}/fd/1")
    except (OSError, psutil.Error):
        return None
    return path if path.startswith(("/dev/pts/", "/dev/tty")) else None


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.2f} %"


def _error(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


# Every score that a method may report: its label, how it is written, what it means. The first one of a run leads.
SCORES = {
    "accuracy": ("accuracy", _share, "mean over the parties, each on its own test data"),
    "accuracy_untrained": ("  untrained extractor", _share, "nothing shared, heads trained as long"),
    "accuracy_local_only": ("  local only", _share, "each party alone, extractor and head"),
    "rmse": ("RMSE", _error, "root mean square error over all test ratings"),
    "mae": ("MAE", _error, "mean absolute error over all test ratings"),
    "rmse_private_model": ("  private models", _error, "RMSE of each party's own model alone, nothing shared"),
    "rmse_party_mean": ("  party means", _error, "RMSE of each party's mean rating, nothing shared"),
    "rmse_optimum": ("  optimum", _error, "RMSE of the generator's own prediction: nobody can be better"),
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Not the end of the process, which rich would make it."""
        self.quiet = True


def _or_be_silent(method):
    """Whoever watched may be gone, or the disk behind stdout full: a run does not end for that, its files say it all."""

    @functools.wraps(method)
    def tried(self, *words):
        with contextlib.suppress(OSError, UnicodeError):
            method(self, *words)

    return tried


class Terminal:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        screen = screen_behind_launcher(os.environ)
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # an encoding without Greek letters
        self._console = _Console(
            file=sys.stdout, force_terminal=bool(screen), no_color=not screen, width=WIDTH, highlight=False
        )
        self._live = self._open(screen)
        self._silent = os.environ.get("FEDMPI_PROGRESS") == "0"
        self._bar: Progress | None = None
        self._score = ""  # the latest one: most rounds are not tested
        self._clock = clock
        self._begun: tuple[float, int] | None = None  # when the first round began, and which one it was
        self._said_at = 0.0

    @staticmethod
    def _open(screen: str | None) -> Console | None:
        """A console on the terminal itself: a launcher passes output on line by line, and a progress bar ends none."""
        try:
            return (
                _Console(file=open(screen, "w", errors="replace"), force_terminal=True, width=WIDTH) if screen else None
            )
        except OSError:
            return None

    @_or_be_silent
    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)

    @_or_be_silent
    def warn(self, line: str) -> None:
        self._console.print(f"warning: {line}", style="yellow", soft_wrap=True, markup=False)

    @_or_be_silent
    def progress(self, row: dict, rounds: int) -> None:
        for name, (_, show, _) in SCORES.items():
            if row.get(name) is not None:
                self._score = f"{name} {show(row[name])}"
                break
        if self._live is not None:
            self._move_bar(row, rounds)
        elif not self._silent:
            self._say_round(row, rounds)

    def _figures(self, row: dict) -> str:
        loss = f"loss {row['loss']:.3f}" if "loss" in row else ""
        return "  ".join(part for part in (loss, self._score, _epsilon_so_far(row)) if part)

    def _move_bar(self, row: dict, rounds: int) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=self._live,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", total=rounds, completed=row["round"] - 1, figures="")
            self._bar.start()
        self._bar.update(self._task, completed=row["round"], figures=self._figures(row))
        if row["round"] == rounds:
            self._bar.stop()

    def _say_round(self, row: dict, rounds: int) -> None:
        """A line a round or a minute, whichever is rarer, and the last round's: a log must show that a job is alive."""
        now = self._clock()
        if self._begun is None:
            self._begun = now - row["seconds"], row["round"]
            self._said_at = self._begun[0]
        if now - self._said_at < LINE_EVERY and row["round"] < rounds:
            return
        self._said_at = now
        start, first = self._begun
        each, left = (now - start) / (row["round"] - first + 1), rounds - row["round"]
        pace = f"{_time(each)} a round" + (f", {_time(left * each)} left" if left else "")
        self.say(f"round {row['round']}/{rounds}  {self._figures(row)}  {pace}")

    @_or_be_silent
    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    @_or_be_silent
    def table(self, summary: dict, statement: Statement, out) -> None:
        self.close()
        table = Table(title=f"{summary['method']}, {summary['preset']}, seed {summary['seed']}", title_justify="left")
        table.add_column("what", style="bold", no_wrap=True)
        table.add_column("value", no_wrap=True)
        table.add_column("meaning", overflow="fold")
        for row in closing_rows(summary, statement):
            table.add_row(*row)
        self._console.print(table)
        self._console.print(f"{out}/summary.json", markup=False)


def closing_rows(summary: dict, statement: Statement) -> list[tuple[str, str, str]]:
    parties, rounds = summary["parties"], summary["rounds"]
    rows = [(label, show(summary[name]), said) for name, (label, show, said) in SCORES.items() if name in summary]
    rows += [
        (
            "ε outside",
            _epsilon(statement.epsilon_outside),
            f"whoever sees the released models; δ = {statement.delta:g}",
        ),
        ("ε server", _epsilon(statement.epsilon_server), f"rank 0 itself, {summary['aggregation']} aggregation"),
        ("ε party", _epsilon(statement.epsilon_party), "another party, which knows the cohorts and its own noise"),
        ("ε nominal", _epsilon(statement.epsilon_nominal), "the paper's arithmetic"),
        ("  kind", statement.epsilon_kind, statement.reason or "proven for what was sent"),
    ]
    for name, key in (("bytes up", "bytes_up"), ("bytes down", "bytes_down")):
        logical, wire = (sum(summary[key][view].values()) for view in ("logical", "wire"))
        each = logical / parties / rounds
        rows.append((name, _size(logical), f"{_size(each)} a party and round; {_size(wire)} on the wire"))
    for phase, seconds in summary["seconds"].items():
        if max(seconds.values()) >= 0.05 or phase in PROTOCOL_COSTS:
            waited = f"; rank 0 waited {seconds['wall']:.1f} s" if seconds["wall"] >= 0.05 else ""
            each = (
                f", {1e6 * seconds['cpu'] / parties / rounds:.0f} µs a party and round"
                if phase in PROTOCOL_COSTS
                else ""
            )
            rows.append((f"time  {phase}", f"{seconds['cpu']:.2f} s", f"CPU over all ranks{each}{waited}"))
    if "hybrid" in summary:
        rows += _hybrid_rows(summary["hybrid"], summary["task"])
    dropouts = summary["dropouts"]
    rows += [
        ("dropouts", f"{dropouts['planned']} + {dropouts['real']}", "planned + real"),
        *(
            [("left out", str(len(dropouts["benched"])), "parties of those who broke the rules")]
            if dropouts.get("benched")
            else ()
        ),
        ("memory", _size(summary["memory_pss"]), f"PSS over {summary['ranks']} ranks"),
        ("model", summary["model_sha256"][:16], "first digits of model_sha256"),
    ]
    return rows


def _hybrid_rows(hybrid: dict, task: str) -> list[tuple[str, str, str]]:
    shown = "the items they rated and their masked ratings" if task == "recommendation" else "their updates"
    rows = [
        (
            "hybrid",
            f"{hybrid['clear']} + {hybrid['hidden']}",
            f"in the clear + hidden; of the clear ones rank 0 sees {shown}",
        )
    ]
    if hybrid["bytes_saved_up"] is not None:
        saved = f"{_size(hybrid['bytes_saved_up'])} up, {_size(hybrid['bytes_saved_down'])} down"
        said = f"and {hybrid['cpu_seconds_saved']:.1f} s of CPU, at what a hidden party cost in this run"
        rows.append(("  saved", saved, said))
    return rows


def _epsilon_so_far(row: dict) -> str:
    figure = row["epsilon_outside"] if row["epsilon_outside"] is not None else row["epsilon_nominal"]
    return "ε none" if figure is None else f"ε {figure:.3g} {row['epsilon_kind']}"


def _epsilon(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _size(count: float) -> str:
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB"):
        count /= 1000
        if count < 1000:
            return f"{count:.2f} {unit}"
    return f"{count / 1000:.2f} GB"
