"""fedmpi project RUN --link 4g: how long the rounds of a finished run would have taken on another network.

From what the run counted and measured: messages.csv has every party's bytes by phase as on a link of its own, costs.csv its CPU seconds.
Beside the projection stands what the round took here (rounds.jsonl, a test in it included).

  fedmpi project runs/demo-dp-pfeddsu-s0 --link 4g
  fedmpi project runs/demo-dp-pfeddsu-s0 --link my-network.yaml --json projected.json

Of each phase: latency on every way, bytes over bandwidth, what TCP and MPI wait for (fedmpi.bill.links), CPU times the device's factor; the
slowest party decides, jitter is that of the slowest of n in the median, and a deadline (--phase-deadline, up to a party's first answer
--round-deadline) ends a phase without who is late. Phases follow each other, so that a party which is slow at one and quick at the next is
waited for twice where it could have caught up. CPU seconds are a party's over the run, shared equally among its rounds; of an evaluation none
are known by party, so that is transfer alone. Where a run kept parties' figures home their CPU is the mean over all.

Everybody also waits for rank 0, which works between the phases as fast as it did here: its own seconds, shared equally among the rounds. And a
party that is sent a sum reads it and takes the step that rank 0 took. Unless the run has counted that for the party (costs.csv, phase
model), rank 0's step stands for it, which wrote what the party reads.
"""

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedmpi.bill.command import size
from fedmpi.bill.laws import DOWN, UP, deadline, ways
from fedmpi.bill.links import Link, find
from fedmpi.config import Config
from fedmpi.errors import ConfigError
from fedmpi.files import write_json, write_text
from fedmpi.runtime.build import load_config
from fedmpi.wire.frame import FRAMING, NOBODY
from fedmpi.wire.phases import Cost, Phase

WORK = str(Cost.LOCAL_WORK)  # stands between model and update like a phase
DOWNLOADS = ("Delta", "Model")
RANK_0, STEP = "rank 0", "step"
ITS_WORK = ("send model", Cost.PRG, Cost.AGGREGATE, Cost.SHAMIR_COMBINE, STEP)
ORDER = (str(Phase.MODEL), WORK, *(str(phase) for phase in Phase if phase is not Phase.MODEL), RANK_0)

Loads = dict[int, list[float]]  # party -> bytes up, bytes down


@dataclass(frozen=True)
class Waited:
    """One phase of one session, projected."""

    phase: str
    up: float  # bytes of the party that has most
    down: float
    cpu: float  # seconds here, of the party that has most
    seconds: float
    late: int = 0  # parties beyond the deadline


@dataclass
class Session:
    """What a round, or its test, moved."""

    loads: dict[Phase, Loads] = field(default_factory=lambda: defaultdict(lambda: defaultdict(lambda: [0.0, 0.0])))
    parties: dict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    followers: set[int] = field(default_factory=set)  # who was sent a sum in place of the model

    def add(self, phase: Phase, party: int, direction: str, count: float) -> None:
        self.loads[phase][party][0 if direction == UP else 1] += count


class Run:
    """A finished run's own figures."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.summary: dict[str, Any] = self._json("summary.json")
        self.config: Config = load_config(folder)
        self.measured = {row["round"]: row["seconds"] for row in self.rows()}
        self.training: dict[int, Session] = defaultdict(Session)
        self.tests: dict[int, Session] = defaultdict(Session)
        try:
            self._read_messages()
            self.cpu = self._read_costs()
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{folder}: messages.csv or costs.csv is damaged ({type(error).__name__}: {error}); give the folder that a run has left"
            ) from None
        self.rank_0 = {name: self._of_rank_0(name) for name in ITS_WORK}  # seconds of a round

    def _text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(
                f"{self.folder}: no finished run there ({name} is missing or cannot be read); give the folder that a run has left"
            ) from None

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self._text(name))
        except ValueError:
            raise ConfigError(f"{self.folder / name}: not JSON; is it the folder of a finished run?") from None

    def rows(self) -> list[dict[str, Any]]:
        """A round each."""
        try:
            return [json.loads(line) for line in self._text("rounds.jsonl").splitlines()]
        except ValueError:
            raise ConfigError(f"{self.folder / 'rounds.jsonl'}: a line that is not JSON") from None

    def _table(self, name: str) -> list[dict[str, str]]:
        rows = list(csv.DictReader(self._text(name).splitlines()))
        if not rows or any(None in row or None in row.values() for row in rows):
            raise ConfigError(f"{self.folder / name}: rows are missing or damaged; is it the folder of a finished run?")
        return rows

    # ---- bytes ----

    def _read_messages(self) -> None:
        rows = self._table("messages.csv")
        trained: dict[int, list[int]] = defaultdict(list)  # party -> the rounds that it was asked for
        for row in rows:
            if row["message"] == "Train" and int(row["logical_framing"]):
                trained[int(row["party"])].append(int(row["round"]))
        for asked in trained.values():
            asked.sort()
        together: dict[tuple[bool, int, Phase, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for row in rows:
            phase, framing, party = Phase(row["phase"]), int(row["logical_framing"]), int(row["party"])
            if not framing or phase in (Phase.SETUP, Phase.BOOKKEEPING):
                continue
            test, round = row["purpose"] == "test" or phase is Phase.EVALUATION, int(row["round"])
            if row["message"] in DOWNLOADS:
                # Its round is the model's version; it belongs to the party's next round, however often a test came before.
                later = [asked for asked in trained[party] if asked > round]
                if later:
                    round = later[0]
                else:  # nor is there another round: it came with the last test
                    test, phase = True, Phase.EVALUATION
            moved = int(row["logical_payload"]) + framing
            if row["message"] == "Delta":
                (self.tests if test else self.training)[round].followers.add(party)
            if party != NOBODY:
                session = (self.tests if test else self.training)[round]
                session.add(phase, party, row["direction"], moved)
            else:  # a run of very many parties has them in one row
                cell = together[test, round, phase, row["message"], row["direction"]]
                cell[0] += moved
                cell[1] += framing / FRAMING
        for (test, round, phase, _, direction), (total, number) in together.items():
            session = (self.tests if test else self.training)[round]
            session.add(phase, NOBODY, direction, total / number)
            session.parties[phase] = max(session.parties[phase], number)
        for session in (*self.training.values(), *self.tests.values()):
            for phase, loads in session.loads.items():
                session.parties[phase] = max(session.parties[phase], len(loads))

    # ---- seconds ----

    def _read_costs(self) -> dict[str, dict[int, float]]:
        """(phase, or local work) -> party -> CPU seconds here in one of its sessions. Giving bytes to MPI is the link's affair."""
        spent: dict[tuple[str, int], float] = defaultdict(float)
        for row in self._table("costs.csv"):
            if row["cost"] != Cost.MPI:
                phase = WORK if row["phase"] == Phase.UPDATE else row["phase"]  # what is encoded is the work's end
                spent[phase, int(row["party"])] += float(row["cpu_seconds"])
        if not any(phase == WORK and seconds for (phase, _), seconds in spent.items()):
            spent[WORK, NOBODY] = self.summary.get("seconds", {}).get(WORK, {}).get("cpu", 0.0)
        cpu: dict[str, dict[int, float]] = defaultdict(dict)
        for (phase, party), seconds in spent.items():
            sessions = self._sessions(phase, party)
            cpu[phase][party] = seconds / sessions if sessions else 0.0
        return cpu

    def _sessions(self, phase: str, party: int) -> float:
        """How many a party had; over all of them, for nobody in particular."""
        kind = Phase.MODEL if phase == WORK else Phase(phase)
        having = [*self.training.values(), *([] if phase == WORK else self.tests.values())]
        if party == NOBODY:
            return sum(session.parties.get(kind, 0.0) for session in having)
        return sum(party in session.loads.get(kind, ()) or NOBODY in session.loads.get(kind, ()) for session in having)

    def _of_rank_0(self, work: str) -> float:
        """The clock on rank 0 is its own; CPU seconds are everybody's. Either is more than its CPU seconds, on a busy machine or where others
        do the same."""
        spent = self.summary.get("seconds", {}).get(work, {})
        return min(spent.get("wall", 0.0), spent.get("cpu", 0.0)) / max(1, len(self.training))

    def cpu_of(self, phase: str, party: int) -> float:
        known = self.cpu.get(phase, {})
        if party == NOBODY and NOBODY not in known:
            return max(known.values(), default=0.0)
        return known.get(party, known.get(NOBODY, 0.0))

    def _spends(self, session: Session, phase: Phase, party: int) -> float:
        """CPU seconds of a party in a phase; what it makes of a sum, where nobody has counted that, is a step like rank 0's."""
        if phase in (Phase.MODEL, Phase.EVALUATION) and Phase.MODEL not in self.cpu:
            return self.rank_0[STEP] if party in session.followers else 0.0
        return self.cpu_of(phase, party)

    # ---- the projection ----

    def waited(self, session: Session, link: Link, works: bool) -> list[Waited]:
        """Phase by phase. `works`: with the local work in it."""
        found = [self._phase(session, phase, link) for phase in session.loads if self._counts(session, phase)]
        if works and Phase.MODEL in session.loads:
            limit, cpus = self.config.run.round_deadline, [self.cpu_of(WORK, p) for p in session.loads[Phase.MODEL]]
            took = [link.device * cpu for cpu in cpus]
            late = sum(seconds > limit for seconds in took)
            found.append(Waited(WORK, 0, 0, max(cpus), min(limit, max(took)), late))
            its_own = sum(self.rank_0.values())
            found.append(Waited(RANK_0, 0, 0, its_own, its_own))
        return sorted(found, key=lambda waited: ORDER.index(waited.phase))

    def _counts(self, session: Session, phase: Phase) -> bool:
        """In a hybrid, who shares in the clear does so while the others are at their keys."""
        return not (phase is Phase.UPDATE and Phase.MASKED_INPUT in session.loads)

    def _phase(self, session: Session, phase: Phase, link: Link) -> Waited:
        loads, limit = session.loads[phase], deadline(self.config, phase)
        if phase is Phase.MASKED_INPUT and not session.loads.keys() & {Phase.ADVERTISE_KEYS, Phase.SUPPORT}:
            limit = self.config.run.round_deadline  # with keys of an earlier round it is a party's first answer
        pairs = [(phase, UP)] * any(up for up, _ in loads.values()) + [(phase, DOWN)] * any(
            d for _, d in loads.values()
        )
        number = ways(pairs)
        full = [(up, down, self._spends(session, phase, party)) for party, (up, down) in loads.items()]
        seconds = link.phase(number, full, session.parties[phase])
        late = sum(link.seconds(number, *load) > limit for load in full)
        most = max(full, key=lambda load: link.seconds(number, *load))
        return Waited(str(phase), *most, min(limit, seconds), late)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="fedmpi project", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--link", required=True, metavar="NAME|FILE", help="lan, wifi, 4g, satellite, or a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a row for each round, also into this file")
    asked = parser.parse_args(argv)
    link, run = find(asked.link), Run(asked.run)
    rows = list(project(run, link))
    print(text_of(run, link, rows))
    if asked.json:
        write_json(asked.json, [_plain(row) for row in rows])
    return 0


def project(run: Run, link: Link) -> Iterator[dict[str, Any]]:
    """A row a round: what it took here, and would have taken there by phase."""
    for round, measured in sorted(run.measured.items()):
        phases = run.waited(run.training[round], link, works=True) if round in run.training else []
        tests = run.waited(run.tests[round], link, works=False) if round in run.tests else []
        training, evaluation = (sum(waited.seconds for waited in found) for found in (phases, tests))
        yield {
            "round": round,
            "link": link.name,
            "measured_seconds": measured,
            "projected_seconds": training + evaluation,
            "training_seconds": training,
            "evaluation_seconds": evaluation,
            "late": sum(waited.late for waited in phases),
            "phases": phases,
        }


def beside(folder: Path, name: str) -> str:
    """What `fedmpi project` says of a run that has just ended. Its rows and its summary say it too, beside what was measured."""
    link, run = find(name), Run(folder)
    rows = list(project(run, link))
    told = {row["round"]: {"projected_seconds": round(row["projected_seconds"], 3)} for row in rows}
    lines = (json.dumps(row | told.get(row["round"], {})) for row in run.rows())
    write_text(folder / "rounds.jsonl", "".join(f"{line}\n" for line in lines))
    by_phase: dict[str, float] = defaultdict(float)
    for row in rows:
        for waited in row["phases"]:
            by_phase[waited.phase] += waited.seconds
    totals = {name: sum(row[name] for row in rows) for name in ("projected_seconds", "measured_seconds", "late")}
    said = {"link": asdict(link), **totals, "training_seconds_by_phase": dict(by_phase)}
    write_json(folder / "summary.json", run.summary | {"projected": said})
    return text_of(run, link, rows)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    phases = {
        waited.phase: {"bytes_up": waited.up, "bytes_down": waited.down, "cpu": waited.cpu, "seconds": waited.seconds}
        for waited in row["phases"]
    }
    return {**row, "phases": phases}


def text_of(run: Run, link: Link, rows: list[dict[str, Any]]) -> str:
    config, parties = run.config, run.summary.get("parties")
    lines = [
        f"{run.folder}: {config.run.method} on {config.data.dataset}, {parties} parties, {len(rows)} rounds; of the slowest party, "
        "in the mean over rounds",
        "",
        f"  {'phase':<18}{'up':>12}{'down':>12}{'CPU here':>12}{'projected':>12}",
    ]
    by_phase: dict[str, list[Waited]] = defaultdict(list)
    for row in rows:
        for waited in row["phases"]:
            by_phase[waited.phase].append(waited)
    trained = [row["training_seconds"] for row in rows if row["phases"]]
    for phase in sorted(by_phase, key=ORDER.index):
        found = by_phase[phase]  # of the rounds that have it: keys of a batch are made in one
        up, down, cpu, seconds = (
            sum(getattr(waited, name) for waited in found) / len(trained) for name in ("up", "down", "cpu", "seconds")
        )
        cells = [
            size(up) if up else "-",
            size(down) if down else "-",
            f"{cpu:.3f} s" if cpu else "-",
            f"{seconds:.3f} s",
        ]
        late = sum(waited.late for waited in found)
        lines.append(f"  {phase:<18}" + "".join(f"{cell:>12}" for cell in cells) + (f"   {late} late" if late else ""))
    tested = [row["evaluation_seconds"] for row in rows if row["evaluation_seconds"]]
    for name, figures in (("a round", trained), ("an evaluation", tested)):
        if figures:
            each = f"{statistics.fmean(figures):.3f} s"
            lines.append(f"  {name:<18}{each:>48}   at most {max(figures):.3f} s")
    both = [sum(row[name] for row in rows) for name in ("projected_seconds", "measured_seconds")]
    lines += [
        "",
        f"  all rounds and their tests: {both[0]:.1f} s projected, {both[1]:.1f} s measured here",
        link.said(),
    ]
    return "\n".join(lines)
