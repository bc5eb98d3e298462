"""What the ledger of a real run counted, beside what the size laws say of it (fedmpi.bill.laws).

Runs are of the whole engine, the same server and client code as under mpirun, with every rank a thread of one process; or of mpirun
itself. Training and evaluation are kept apart as in a bill: a download of the model is training's, whatever it is used for first.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from scipy.stats import t

from benchmarks.entropy import bound
from fedmpi.bill import laws
from fedmpi.bill.shape import Setting
from fedmpi.config import Config
from fedmpi.report.terminal import Terminal
from fedmpi.runtime.rank import run_client
from fedmpi.runtime.server import run_server
from fedmpi.runtime.start import start_run
from fedmpi.transport.memory import run_ranks
from fedmpi.wire.frame import FRAMING
from fedmpi.wire.phases import Phase

Kind = tuple[str, str, str]  # phase, message, direction


class Count(NamedTuple):
    """Of all parties, were each on a link of its own."""

    messages: int
    payload: int  # bytes
    chance: float  # by which the mean payload may be off for who the parties are, in all but one of a thousand cases


Counts = dict[Kind, Count]

APART = ("setup", "bookkeeping")  # of the ranks, not of a round; a tally's length depends on the seconds that it tells
OFF = 0.02  # part by which an expectation may be off in a run of few rounds ...
HEAD = 24  # ... and bytes: a code's head and its padding
RARE = 0.001


def run_here(config: Config, ranks: int) -> dict:
    """The engine inside this process; the run's summary."""
    start = start_run(config, ranks, "in memory", Terminal())
    try:
        return run_ranks(ranks, lambda end: run_server(end, *start) if end.rank == 0 else run_client(end, config))[0]
    finally:
        start.record.close()


def ledger(run: Path) -> list[dict[str, str]]:
    """Rows of rounds and tests. Of round 0, which measures the references, none: a bill has no line for it."""
    with (run / "messages.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] not in APART]
    return [row for row in rows if row["round"] != "0" or row["phase"] != "evaluation" and row["purpose"] != "test"]


def counted(run: Path) -> tuple[Counts, Counts]:
    """(of training, of evaluations), over the whole run."""
    by_party: tuple[dict[Kind, Counter], ...] = ({}, {})
    for row in ledger(run):
        kind = row["phase"], row["message"], row["direction"]
        of_kind = by_party[_of_test(row)].setdefault(kind, Counter())
        of_kind["messages", row["party"]] += int(row["logical_framing"]) // FRAMING
        of_kind["payload", row["party"]] += int(row["logical_payload"])
    training, test = ({kind: _count(of_kind) for kind, of_kind in half.items()} for half in by_party)
    return training, test


def _count(of_kind: Counter) -> Count:
    """A law that is a mean over parties is held against a few of them: Student's interval says how far off that may be."""
    number = {party: count for (what, party), count in of_kind.items() if what == "messages" and count}
    payload = {party: of_kind["payload", party] for party in number}
    sizes = [payload[party] / number[party] for party in number]
    chance = 0.0
    if len(sizes) > 1:
        chance = float(t.isf(RARE / 2, len(sizes) - 1)) * statistics.stdev(sizes) / math.sqrt(len(sizes))
    return Count(sum(number.values()), sum(payload.values()), chance)


def total(counts: Counts, direction: str) -> int:
    """Bytes with framing."""
    return sum(count.payload + FRAMING * count.messages for kind, count in counts.items() if kind[2] == direction)


def trips(run: Path, of_test: bool) -> tuple[int, int]:
    """(fewest, most) of a round, or of a test: two ways each, of what was really sent. The fewest are those of a round that has its
    keys, where they are made for several."""
    found: dict[str, set[tuple[Phase, str]]] = {}
    for row in ledger(run):
        if _of_test(row) == of_test:
            found.setdefault(row["round"], set()).add((Phase(row["phase"]), row["direction"]))
    each = [-(-laws.ways(pairs) // 2) for pairs in found.values()] or [0]
    return min(each), max(each)


def _of_test(row: dict[str, str]) -> bool:
    return row["purpose"] == "test" or row["phase"] == str(Phase.EVALUATION)


def union_of(run: Path) -> int | None:
    """How many coordinates the run's unions had, in the mean; None where support is not union. No law knows it before a run."""
    events = map(json.loads, (run / "releases.jsonl").read_text().splitlines())
    found = [event["coordinates"] for event in events if event.get("coordinates")]
    return round(sum(found) / len(found)) if found else None


def beside_law(config: Config, run: Path) -> dict:
    """A finished run's bytes and trips, of a party and round and of a party and test, beside the law, the entropy bound and dense FedAvg
    in float32; `wrong` names what breaks its law. With the preset's metrics, so that every model reaches everybody: the last one for
    the last test."""
    parties, rounds, every = config.run.parties, config.run.rounds, config.evaluation.eval_every
    setting = Setting(config)
    bill = laws.price(setting, parties, union_of(run) if config.aggregation.support == "union" else None)
    training, test = counted(run)
    tests = -(-rounds // every) if every else 1  # the last round has one in any case
    messages = compare(bill.training, training, parties * rounds)
    of_tests = compare(bill.evaluation, test, parties * tests)
    row: dict = {"parties": parties, "dimension": setting.shape.dimension, "coordinates": bill.coordinates}
    row |= {"bits": bill.bits, "degree": bill.degree, "fedavg": 4 * setting.shape.dimension}
    for way, least in zip((laws.UP, laws.DOWN), bound(setting, bill)):
        lines = [line for line in bill.training if line.direction == way]
        row[way] = {
            "counted": total(training, way) / parties / rounds,
            "law": laws.total(lines, way),
            "sign": laws.surety(lines),
            "bound": least,
            "test": total(test, way) / parties / tests,
        }
    row["trips"], row["trips_with_keys"] = trips(run, False)
    row |= {"trips_law": laws.trips(bill.training), "trips_test": trips(run, True)[0]}
    row |= {"messages": messages, "test_messages": of_tests}
    row["wrong"] = [message["wrong"] for message in (*messages, *of_tests) if message["wrong"]]
    if row["trips"] != row["trips_law"]:
        row["wrong"].append(f"{row['trips']} trips, by the law {row['trips_law']}")
    return row


def compare(lines: Iterable[laws.Line], counts: Counts, taking_part: int) -> list[dict]:
    """Each message of the law beside the ledger, with what is wrong about it. `taking_part`: parties times rounds, or tests."""
    rows, left = [], dict(counts)
    for line in _joined(lines):
        found = left.pop((str(line.phase), line.message, line.direction), Count(0, 0, 0.0))
        each = found.payload / max(1, found.messages)
        rows.append(
            {"phase": str(line.phase), "message": line.message, "direction": line.direction, "number": found.messages}
            | {"payload": each, "law": line.payload, "sign": line.sign, "ratio": each / line.payload}
            | {"wrong": _wrong(line, found, taking_part)}
        )
    for (phase, message, direction), found in left.items():
        rows.append(
            {"phase": phase, "message": message, "direction": direction, "number": found.messages}
            | {"payload": found.payload / found.messages}
            | {"wrong": f"{message} {direction}: {found.messages} that the law does not know"}
        )
    return rows


def _joined(lines: Iterable[laws.Line]) -> list[laws.Line]:
    """A line for each message: one of keys has several, by how many rounds they are for, and becomes their mean."""
    found: dict[tuple[str, str], laws.Line] = {}
    for line in lines:
        key = line.message, line.direction
        if before := found.get(key):
            often = before.often + line.often
            payload = (before.often * before.payload + line.often * line.payload) / often
            line = dataclasses.replace(before, often=often, payload=payload)
        found[key] = line
    return list(found.values())


def _wrong(line: laws.Line, found: Count, taking_part: int) -> str:
    wanted, each = line.share * line.often * line.number * taking_part, found.payload / max(1, found.messages)
    if not math.isclose(found.messages, wanted, rel_tol=1e-9):
        return f"{line.message} {line.direction}: {found.messages} messages, by the law {wanted:g}"
    holds = {
        laws.EXACT: math.isclose(each, line.payload, rel_tol=1e-12),  # equal, but for the mean over batches of keys
        laws.EXPECTED: abs(each - line.payload) <= max(HEAD, OFF * line.payload, found.chance),
        laws.MOST: each <= line.payload,
    }[line.sign]
    return "" if holds else f"{line.message} {line.direction}: {each:g} bytes, by the law {line.sign}{line.payload:g}"
