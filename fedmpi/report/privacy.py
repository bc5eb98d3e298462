"""fedmpi privacy RUN: what a run may say about epsilon, counted anew from the log of its releases.

RUN is the folder of any run, finished or not. Of an unfinished one it is what has been spent so far, the round under way
included. Where the run has ended and says otherwise in its summary.json, that is an error.
"""

import argparse
import json
import math
from collections import Counter
from pathlib import Path

from fedmpi.errors import DataError
from fedmpi.privacy.account import Account, fold
from fedmpi.privacy.releases import ReleaseLog
from fedmpi.privacy.statement import FIGURES, Statement

WORDS = {
    "epsilon_outside": "whoever sees the released models",
    "epsilon_server": "rank 0",
    "epsilon_party": "another party",
    "epsilon_nominal": "the paper's arithmetic",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="fedmpi privacy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--json", action="store_true", help="the statement as privacy.json has it")
    asked = parser.parse_args(argv)
    log = ReleaseLog.read(asked.run)
    account = fold(log.events)
    account.settle()
    print(json.dumps(account.as_dict(), indent=2) if asked.json else _lines(asked.run, log, account))
    _check(asked.run, account.statement())
    return 0


def _lines(run: Path, log: ReleaseLog, account: Account) -> str:
    statement = account.statement()
    number = Counter(type(event).__name__ for event in log.events)
    ended = "ended" if number["Ended"] else "did not end"
    lines = [
        f"{run}: {number['Asked']} rounds asked for, {number['Opened']} sums opened, {number['Stepped']} steps of the model; "
        f"{ended}, started {number['Started']} time{'s' if number['Started'] > 1 else ''}",
        "",
    ]
    for name in FIGURES:
        value = getattr(statement, name)
        lines.append(f"  {name:<16} {_figure(value):>10}   {WORDS[name]}")
    if account.terms.adversary == "active":
        lines.append(f"  {'':<16} {_figure(account.lying()):>10}   rank 0, if it lies as best it can")
    lines += [f"  {'delta':<16} {statement.delta:>10g}", f"  {'kind':<16} {statement.epsilon_kind:>10}", ""]
    for title, said in (("why", [statement.reason]), ("trust", statement.trust), ("released", statement.released)):
        if any(said):
            lines += [f"{title}:", *(f"  {line}" for line in said)]
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _check(run: Path, statement: Statement) -> None:
    """The run's own summary says the same; one that is not there yet says nothing."""
    try:
        said = json.loads((run / "summary.json").read_text())
    except OSError:
        return
    except ValueError:
        raise DataError(f"{run}/summary.json cannot be read") from None
    for name in (*FIGURES, "epsilon_kind"):
        if not _same(said.get(name), getattr(statement, name)):
            raise DataError(
                f"{run}/summary.json has {name} {said.get(name)}, the log of releases gives {getattr(statement, name)}"
            )


def _same(one: object, other: object) -> bool:
    """Figures but for the last digits, which another machine may round otherwise."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other
