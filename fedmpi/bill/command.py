"""fedmpi cost [OPTIONS OF A RUN] --parties 20 200 2000: what a party and round would cost, without a run.

Bytes by phase, trips and, with --link, seconds of transfer, for each number of parties; an evaluation apart. They follow from the size
laws of the messages, which tests hold equal to the ledger of real runs, so nothing is trained and no data are read: the size of the
model follows from the data set's catalogue entry and the network's architecture.

  fedmpi cost --parties 20 200 2000                                  the demo's setting
  fedmpi cost --method centaur --support dense --graph regular --parties 200 2000 --link 4g
  fedmpi cost --preset cifar10-s5 --download full --link satellite --json bill.json
  fedmpi cost --config runs/NAME/config.yaml --link my-network.yaml

Every option of a run works (fedmpi --help), and beside them:

  --parties N [N ...]     for each of these numbers; without it the setting's own
  --link NAME|FILE        lan, wifi, 4g, satellite, or a YAML or JSON file with up, down (bits a second), latency (seconds, one way)
                          and, if it likes, jitter (seconds), device (times as slow), name
  --json FILE             the rows, a list of objects, also into this file

Sizes marked ~ are expectations (a coded sum or support has no fixed length), those marked ≤ are bounds. Seconds are of transfer alone:
what a device computes shows in a run (fedmpi project RUN --link NAME). A trip is a message down and its answer up.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedmpi.bill import laws
from fedmpi.bill.links import Link, find
from fedmpi.bill.shape import Setting
from fedmpi.cli import resolve
from fedmpi.config import Config
from fedmpi.errors import ConfigError
from fedmpi.files import write_json
from fedmpi.wire.frame import FRAMING
from fedmpi.wire.phases import Phase, Purpose


def main(argv: list[str]) -> int:
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(__doc__)
        return 0
    started = time.monotonic()
    asked, argv = take(argv, {"--parties": True, "--link": False, "--json": False})
    numbers = [_count(word) for word in asked["--parties"]]
    link = find(asked["--link"][0]) if asked["--link"] else None
    config = resolve([*argv, *(["--parties", str(numbers[0])] if numbers else [])])
    setting = Setting(config)
    bills = [laws.price(setting, parties) for parties in numbers or [config.run.parties]]
    rows: list[dict[str, Any]] = []
    for bill in bills:
        print(text_of(config, bill, link), end="\n\n")
        rows += rows_of(config, bill, link)
    if link is not None:
        print(link.said())
    print(f"without a run, from the size laws, in {time.monotonic() - started:.1f} s")
    if asked["--json"]:
        write_json(Path(asked["--json"][0]), rows)
    return 0


def take(argv: list[str], wanted: dict[str, bool]) -> tuple[dict[str, list[str]], list[str]]:
    """(what stands behind these options, the rest). True: of any number of words, otherwise one."""
    found: dict[str, list[str]] = {name: [] for name in wanted}
    rest: list[str] = []
    words = list(argv)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name not in wanted:
            rest.append(name + equals + value)
            continue
        values = [value] if equals else []
        while words and not words[0].startswith("--") and (wanted[name] or not values):
            values.append(words.pop(0))
        if not values:
            raise ConfigError(f"{name} needs a value")
        found[name] = values if not wanted[name] else found[name] + values
    return found, rest


def _count(word: str) -> int:
    if not (word.isdecimal() and int(word) >= 1):
        raise ConfigError(f"parties = {word}: must be a number >= 1, or several: --parties 20 200 2000")
    return int(word)


# ---- a table ----


def text_of(config: Config, bill: laws.Bill, link: Link | None) -> str:
    settings = config.aggregation
    lines = [
        f"{config.run.method} on {config.data.dataset}, {bill.parties} parties: {settings.aggregation} aggregation, support "
        f"{settings.support}, download {settings.download}, keys {settings.keys}",
        f"  {bill.coordinates} coordinates of {bill.bits} bits a party and round"
        + (f", {bill.degree} neighbours" if bill.hidden else "")
        + (f", {bill.taking_part:g} take part" if bill.taking_part != bill.parties else ""),
        "",
        f"  {'phase':<18}{'up':>13}{'down':>13}" + (f"{'transfer':>13}" if link else ""),
    ]
    for phase in laws.phases(bill.training):
        of_phase = [line for line in bill.training if line.phase is phase]
        ways = laws.ways((line.phase, line.direction) for line in of_phase)
        lines.append(f"  {phase:<18}" + _cells(of_phase) + (_second(_seconds(link, bill, phase, ways)) if link else ""))
    for purpose, name in ((Purpose.TRAINING, "a party and round"), (Purpose.TEST, "an evaluation")):
        of_it = bill.lines(purpose)
        seconds = _second(_whole(link, bill, purpose)) if link else ""
        number = laws.trips(of_it)
        why = "metrics stay home" if purpose is Purpose.TEST else f"{config.run.method} shares nothing"
        trips = f"   {number} trip{'' if number == 1 else 's'}" if of_it else f"   none: {why}"
        lines.append(f"  {name:<18}{_cells(of_it)}{seconds}{trips}")
    return "\n".join([*lines, *(f"  {note}" for note in (*bill.notes, *_late(config, bill, link)))])


def _late(config: Config, bill: laws.Bill, link: Link | None) -> Iterator[str]:
    """Phases that rank 0 would end before they are over: a round then has nobody left."""
    if link is None:
        return
    for phase in laws.phases(bill.training):
        number = laws.ways((line.phase, line.direction) for line in bill.training if line.phase is phase)
        took = max(seconds for _, seconds in _cases(link, bill, phase, number, Purpose.TRAINING))
        limit = laws.deadline(config, phase)
        if took > limit:
            option = "--phase-deadline" if phase in laws.LATER else "--round-deadline"
            yield f"{phase} is not over when its deadline is ({limit:g} s): raise {option} above {took:.0f}"


def _cells(lines: list[laws.Line] | tuple[laws.Line, ...]) -> str:
    text = ""
    for direction in (laws.UP, laws.DOWN):
        some = [line for line in lines if line.direction == direction]
        text += f"{laws.surety(some) + size(laws.total(some, direction)) if some else '-':>13}"
    return text


def _seconds(link: Link, bill: laws.Bill, phase: Phase, ways: int, purpose: Purpose = Purpose.TRAINING) -> float:
    """In the mean over the rounds: what only some of them have, keys of a batch, is shared out."""
    return sum(often * seconds for often, seconds in _cases(link, bill, phase, ways, purpose))


def _cases(link: Link, bill: laws.Bill, phase: Phase, ways: int, purpose: Purpose) -> list[tuple[float, float]]:
    """(how often, seconds) of the phase as it comes up, for the party that has most to move: in a hybrid one that has it at all."""
    parties = bill.taking_part if purpose is Purpose.TRAINING else bill.parties
    lines = [line for line in bill.lines(purpose) if line.phase is phase]
    found = []
    for batch in {line.batch for line in lines}:
        some = [line for line in lines if line.batch == batch]
        load = {way: sum(x.bytes for x in some if x.direction == way) for way in (laws.UP, laws.DOWN)}
        found.append((some[0].often, link.phase(ways, [(load[laws.UP], load[laws.DOWN], 0.0)], parties)))
    return found


def _whole(link: Link, bill: laws.Bill, purpose: Purpose) -> float:
    lines = bill.lines(purpose)
    pairs = {phase: {x.direction for x in lines if x.phase is phase} for phase in laws.phases(lines)}
    if Phase.MASKED_INPUT in pairs:
        pairs.pop(Phase.UPDATE, None)  # in the clear, while the others are at their keys
    return sum(
        _seconds(link, bill, phase, laws.ways((phase, way) for way in found), purpose) for phase, found in pairs.items()
    )


def size(count: float) -> str:
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB"):
        count /= 1000
        if count < 1000:
            return f"{count:.2f} {unit}"
    return f"{count / 1000:.2f} GB"


def _second(seconds: float) -> str:
    return f"{f'{seconds:.3f} s':>13}"


# ---- rows ----


def rows_of(config: Config, bill: laws.Bill, link: Link | None) -> list[dict[str, Any]]:
    """A row for each message, and one for each half of the bill."""
    about = {"method": config.run.method, "dataset": config.data.dataset, "parties": bill.parties}
    signs = {laws.EXACT: "exact", laws.EXPECTED: "expected", laws.MOST: "at most"}
    rows: list[dict[str, Any]] = []
    for purpose, name in ((Purpose.TRAINING, "training"), (Purpose.TEST, "evaluation")):
        lines = bill.lines(purpose)
        for line in lines:
            rows.append(
                about
                | {"of": name, "phase": str(line.phase), "message": line.message, "direction": line.direction}
                | {"payload": line.payload, "framing": FRAMING, "size": signs[line.sign]}
                | {"messages": line.number * line.often, "share_of_parties": line.share, "bytes": line.mean}
            )
        rows.append(
            about
            | {"of": name, "phase": "total", "bytes_up": laws.total(lines, laws.UP)}
            | {"bytes_down": laws.total(lines, laws.DOWN), "size": signs[laws.surety(lines)]}
            | {"trips": laws.trips(lines)}
            | ({"link": link.name, "transfer_seconds": _whole(link, bill, purpose)} if link else {})
        )
    return rows
