"""The run's folder: what is written, when, and in which words.

config.yaml      the resolved configuration, but for the folder: --config makes another run of it
rounds.jsonl     a row a round
messages.csv     the ledger
costs.csv        CPU seconds of each party by protocol phase and cost
releases.jsonl   what left the parties, written before it did: the source of every epsilon (fedmpi.privacy.releases)
privacy.json     the statement about epsilon and how it came about
model.npz        the shared model, see fedmpi.model; under --keep-parties the ranks leave their parties' parts in parties/
summary.json     the run in one object
"""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from fedmpi import __version__
from fedmpi.config import Config
from fedmpi.errors import ConfigError, DataError
from fedmpi.files import append_line, make_folder, write_json, write_text
from fedmpi.privacy import releases
from fedmpi.privacy.account import Account
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.privacy.statement import Statement, rounding, warnings
from fedmpi.report.terminal import Terminal

#: Clipping is said from this share of cut updates on, and warned of where most are cut and their mean norm is this many times C.
SOME, MOST, FAR = 0.1, 0.5, 2.0


class Record:
    def __init__(self, config: Config, transport: str, terminal: Terminal):
        self.config = config
        self.out = config.out
        self.terminal = terminal
        self.transport = transport
        self.startup: float | None = None
        self._claim: int | None = None  # the folder, locked
        self.bound: float | None = None  # C, until it is said how much it cuts; None: said, or nothing is cut

    def claim(self) -> None:
        """Lock the folder, before anything in it is read or written."""
        if self.config.run.resume and not self.out.is_dir():
            raise ConfigError(f"resume = {self.out}: no such folder")
        try:
            make_folder(self.out)
            self._claim = claim_folder(self.out)
        except OSError as error:
            raise ConfigError(f"out = {self.out}: cannot be written ({error.strerror or error})") from None
        if self._claim is None:
            self.terminal.warn(f"{self.out}: its file system knows no locks; see that no other job works in it")

    def open(self, resume_round: int) -> None:
        """Begin the files, so that a run cannot end without a place for its result."""
        try:
            if self.config.run.resume:
                self.cut_rows(resume_round)
            else:
                if (self.out / "config.yaml").exists() or (self.out / releases.NAME).exists():
                    raise ConfigError(
                        f"out = {self.out}: holds a run already; choose another folder, or continue it with --resume"
                    )
                write_text(self.out / releases.NAME, "")  # nothing yet: so it can be resumed from here on
                write_text(self.out / "config.yaml", self.config.as_file())
                write_text(self.out / "rounds.jsonl", "")
        except OSError as error:
            raise ConfigError(f"out = {self.out}: cannot be written ({error.strerror or error})") from None

    def close(self) -> None:
        """Let go of the terminal and of the folder; a process that ends does the latter by itself."""
        self.terminal.close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def opening(self, mechanism: Mechanism, pays_below: float, measured_with: str) -> None:
        """What is said before the first round."""
        config, encoding = self.config, mechanism.encoding
        parties, rounds, sampling = config.run.parties, config.run.rounds, config.privacy.sampling
        self.terminal.say(
            f"{config.run.method} on {config.data.dataset}: {parties} parties, {rounds} rounds, "
            f"{encoding.dimension} coordinates of {encoding.bits} bits a party and round, "
            f"{config.aggregation.aggregation} aggregation, support {config.aggregation.support}"
        )
        self.terminal.say(mechanism.opening(sampling, parties, rounds))
        privacy = config.privacy
        self.terminal.say(rounding(mechanism, parties, rounds, sampling, privacy.delta, privacy.accountant))
        if mechanism.shortens:
            self.bound = encoding.clip
            if config.privacy.shown != "party":
                self.terminal.say(
                    "clipping: norms of updates stay home with these metrics, so how much C cuts is not known here"
                )
        ratio = mechanism.noise_to_signal(sampling, parties, rounds)
        for line in warnings(config.privacy.delta, parties, ratio, pays_below, measured_with):
            self.terminal.warn(line)
        if config.data.validation_fraction:
            self.terminal.say(
                f"validation_fraction = {config.data.validation_fraction:g}: every figure below is of validation data, held out of "
                "the training data; no test data is read"
            )
        if config.machine.threads != "1":
            self.terminal.warn(f"threads = {config.machine.threads}: the result may depend on placement and cores")

    def first_message(self) -> None:
        if self.startup is None:
            self.startup = time.time() - psutil.Process().create_time()

    def round(self, row: dict, statement: Statement) -> None:
        row = row | {
            "epsilon_outside": statement.epsilon_outside,
            "epsilon_server": statement.epsilon_server,
            "epsilon_party": statement.epsilon_party,
            "epsilon_nominal": statement.epsilon_nominal,
            "epsilon_kind": statement.epsilon_kind,
        }
        append_line(self.out / "rounds.jsonl", json.dumps(row, allow_nan=False))
        if self.bound is not None and row.get("update_norm") is not None:
            self._say_how_much_is_cut(row, self.bound)
            self.bound = None
        self.terminal.progress(row, self.config.run.rounds)

    def _say_how_much_is_cut(self, row: dict, bound: float) -> None:
        """Once, after the first round: a run that learns little may have lost its updates to C and not to noise."""
        share, times = row["clipped"], row["update_norm"] / bound
        line = (
            f"clipping: {share:.0%} of the updates of round {row['round']} were longer than C = {bound:g}, their mean norm "
            f"{times:.2g} times that; what is beyond C is lost"
        )
        if share > MOST and times >= FAR:
            self.terminal.warn(f"{line}: a larger --clip keeps more of it, and noise grows with it")
        elif share >= SOME:
            self.terminal.say(line)

    def closing(self, facts: dict, account: Account, ledger, costs: dict) -> dict:
        """Write everything and show the table; returns the summary."""
        config, statement = self.config, account.statement()
        summary = {
            "fedmpi": __version__,
            "task": facts.pop("task"),
            "method": config.run.method,
            "preset": config.run.preset,
            "seed": config.run.seed,
            "rounds": config.run.rounds,
            "parties": config.run.parties,
            "ranks": facts.pop("ranks"),
            "evaluated_on": "validation" if config.data.validation_fraction else "test",
            **facts.pop("scores"),
            "epsilon_outside": statement.epsilon_outside,
            "epsilon_server": statement.epsilon_server,
            "epsilon_party": statement.epsilon_party,
            "epsilon_nominal": statement.epsilon_nominal,
            "epsilon_kind": statement.epsilon_kind,
            "epsilon_reason": statement.reason,
            "private": statement.private,
            "delta": statement.delta,
            "aggregation": config.aggregation.aggregation,
            "support": config.aggregation.support,
            "bytes_up": _bytes(ledger, "up"),
            "bytes_down": _bytes(ledger, "down"),
            **facts,
            "startup_seconds": round(self.startup, 3) if self.startup is not None else None,
            "total_seconds": round(time.time() - psutil.Process().create_time(), 3),
            "mpi": self.transport,
        }
        write_text(self.out / "messages.csv", ledger.csv())
        lines = (f"{p},{phase},{cost},{seconds:.6f}" for (p, phase, cost), seconds in sorted(costs.items()))
        write_text(self.out / "costs.csv", "\n".join(("party,phase,cost,cpu_seconds", *lines)) + "\n")
        write_json(self.out / "privacy.json", account.as_dict())
        write_json(self.out / "summary.json", summary)
        self.terminal.table(summary, statement, self.out)
        return summary

    def cut_rows(self, resume_round: int) -> None:
        """Drop rows after the checkpoint; they are about to be repeated."""
        kept: list[dict[str, Any]] = []
        path = self.out / "rounds.jsonl"
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                row = json.loads(line)
                later = row["round"] > resume_round
            except (ValueError, KeyError, TypeError):
                if (kept[-1]["round"] if kept else 0) >= resume_round:
                    continue  # the line that the interruption cut short
                raise DataError(f"{path} line {number}: not a round's row") from None
            if not later:
                kept.append(row)
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def _bytes(ledger, direction: str) -> dict:
    totals = ledger.summary(direction)
    return {view: {part: totals[f"{view}_{part}"] for part in ("payload", "framing")} for view in ("wire", "logical")}


def claim_folder(path: Path) -> int | None:
    """A lock on the folder for as long as what is returned stays open: two jobs at work in it would each forget what the other
    released. None where the file system knows none. It is a file that is open for writing, because NFS locks no other."""
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"out = {path}: another job is at work in it; wait for it, or choose another folder"
        ) from None
    except OSError:
        os.close(lock)
        return None
    return lock


def interrupted(wanted: Path) -> Path | None:
    """The first of `wanted` and its successors that released something under secret noise and did not end."""
    for path in (wanted, *sorted(wanted.parent.glob(f"{wanted.name}-[0-9]*"))):
        if (path / releases.NAME).exists() and not (path / "summary.json").exists():
            try:
                if releases.ReleaseLog.read(path).under_secret_noise:
                    return path
            except DataError:
                return path  # nobody can tell
    return None


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3 ... that holds no run."""
    number, path = 1, wanted
    while (path / "config.yaml").exists() or (path / releases.NAME).exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path
