"""fedmpi attack: the attacks that once worked, played against a run of the real code.

  fedmpi attack                       lists them
  fedmpi attack NAME [OPTIONS]        plays one, all ranks as threads of this process
  fedmpi attack all [OPTIONS]         plays every one, and prints a table
  mpirun -n 4 python -m fedmpi.main attack NAME [OPTIONS]
                                      plays it among the ranks of the job; rank 0 lies, or rank 1

Without OPTIONS the run is a small one, without data and training; with --preset, --config or --method it is yours, and any other option
of a run changes it. Each attack is tried without identities (passive) and with (active: made for it in a temporary folder, unless --pki
is given). Exit code 0: everything held as promised; 1: something is BROKEN; 2: bad input.
"""

import argparse
import difflib
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from fedmpi.cli import resolve
from fedmpi.config import Config
from fedmpi.errors import ConfigError
from fedmpi.files import write_text
from fedmpi.liars import clients, orders, protocol, rounds
from fedmpi.liars.base import LEAST_RANKS, Attack
from fedmpi.secagg import pki
from fedmpi.transport.endpoint import Endpoint
from fedmpi.transport.memory import Disconnected, run_ranks
from fedmpi.wire.messages import Tally

ATTACKS: dict[str, type[Attack]] = {
    attack.name: attack
    for attack in (
        orders.Downgrade,
        orders.Unsigned,
        orders.Sigma,
        orders.Paths,
        orders.Module,
        rounds.Models,
        rounds.Replay,
        rounds.Again,
        protocol.Puppets,
        protocol.Survivors,
        clients.Garbage,
        clients.ShortFrame,
        clients.Foreign,
        clients.Huge,
        clients.Flood,
        clients.FalseReport,
        clients.FalseTally,
        clients.Dealer,
        clients.Complainer,
    )
}
SMALL = (
    "--preset demo-20 --method fedmpi.liars.toy:Method --dataset none --support dense --parties 6 --rounds 2 --clip 1 "
    "--epsilon 8 --entropy os --metrics none --checkpoint-every 1 --round-deadline 20 --phase-deadline 5"
)
PATIENT = "--round-deadline 300 --phase-deadline 20"  # a run of one's own may train
WHOLE = ("--preset", "--config", "--method")  # options that make it a run of one's own
PKI = "pki"  # among the facts of the tally with which rank 0 says where identities are
RANKS = 4
BROKEN = 1

Row = dict[str, Any]
Company = Callable[[Callable[[Endpoint], None]], None]  # has every rank do it


def main(argv: list[str], endpoint: Endpoint | None = None) -> int:
    """`endpoint`: this rank of a job over MPI; None: all ranks are threads of this process."""
    name, asked, options = read(argv)
    if not name:
        print(listing())
        return 0
    if name != "all" and name not in ATTACKS:
        raise ConfigError(unknown(name))
    chosen = list(ATTACKS) if name == "all" else [name]
    ranks = endpoint.size if endpoint is not None else asked.ranks
    if ranks < LEAST_RANKS:
        raise ConfigError(f"{ranks} ranks are not enough for an attack; take {LEAST_RANKS} or more")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedmpi-attack-")))
        stage = Stage(options, ranks, folder, endpoint)
        rows = [row for name in chosen for row in stage.play(ATTACKS[name])]
        if endpoint is not None and endpoint.rank:
            return 0
        code = tell(rows, table=name == "all")
        if asked.json:
            write_text(Path(asked.json), json.dumps(rows, indent=1) + "\n")
    if stage.stuck and endpoint is not None:
        endpoint.abort(code)  # or this rank would wait for those at the end of MPI
    return code


def read(argv: list[str]) -> tuple[str, argparse.Namespace, list[str]]:
    """(the attack, this command's own options, those of the run)"""
    parser = _Parser(
        prog="fedmpi attack",
        usage="fedmpi attack [NAME | all] [--ranks N] [--json FILE] [options of a run]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="N", help=f"threads, rank 0 included ({RANKS})")
    parser.add_argument("--json", metavar="FILE", help="the rows go here as well")
    name = argv[0] if argv and not argv[0].startswith("-") else ""
    asked, options = parser.parse_known_args(argv[1:] if name else argv)
    if not name and options:
        raise ConfigError(f"{options[0]}: name the attack first, as in fedmpi attack all {options[0]} ...")
    if any(word.partition("=")[0] == "--resume" for word in options):
        raise ConfigError("--resume: an attack is played against a run of its own")
    return name, asked, options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def listing() -> str:
    width = max(map(len, ATTACKS))
    lines = [f"{name:<{width}}  {attack.side}  {attack.tries}" for name, attack in ATTACKS.items()]
    return "\n".join([*lines, "", "fedmpi attack NAME plays one, fedmpi attack all every one; --help says how"])


def unknown(name: str) -> str:
    near = difflib.get_close_matches(name, [*ATTACKS, "all"], n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(ATTACKS)}"
    return f"attack = {name}: unknown; {meant}"


class Stage:
    """Plays attacks against one run: among threads, or as one rank of a job."""

    def __init__(self, options: list[str], ranks: int, folder: Path, endpoint: Endpoint | None):
        self._options, self._ranks, self._folder, self._endpoint = options, ranks, folder, endpoint
        self._identities: Path | None = None
        self._plays = 0
        self.stuck = False  # whether a rank never came to an end

    def play(self, kind: type[Attack]) -> list[Row]:
        """A row for each adversary that it is tried under; on a rank that is not rank 0, none that means anything."""
        return [self._under(kind, adversary) for adversary in kind.adversaries if adversary in self._adversaries()]

    def _adversaries(self) -> tuple[str, ...]:
        config = resolve(self._flags(""))
        if config.aggregation.pki is not None or self._said("--adversary", "active"):
            return ("active",)
        return ("passive",) if self._said("--adversary", "passive") else ("passive", "active")

    def _said(self, option: str, value: str) -> bool:
        pairs = zip(self._options, [*self._options[1:], ""])
        return (option, value) in pairs or f"{option}={value}" in self._options

    def _flags(self, more: str) -> list[str]:
        own = any(word.partition("=")[0] in WHOLE for word in self._options)
        options = [word for word in self._options if word != "--adversary=active"]
        while ("--adversary", "active") in zip(options, options[1:]):  # it needs identities, which are not there yet
            at = list(zip(options, options[1:])).index(("--adversary", "active"))
            del options[at : at + 2]
        return [*(PATIENT if own else SMALL).split(), *more.split(), *options]

    def _under(self, kind: type[Attack], adversary: str) -> Row:
        begun = time.monotonic()
        attack = kind(adversary)
        row: Row = {"attack": kind.name, "side": kind.side, "adversary": adversary, "tries": kind.tries}
        try:
            attack.untried = attack.fits(self._config(attack, 0))
        except ConfigError as error:
            attack.untried = str(error)
        for act in range(0 if attack.untried else attack.acts):
            config = self._config(attack, act)

            def part(endpoint: Endpoint, config: Config = config, act: int = act) -> None:
                (attack.follow if endpoint.rank else attack.lead)(endpoint, config, act)
                if attack.silent and self._endpoint is None:
                    endpoint.abort(1)  # threads that nobody could end otherwise

            self._together(part)
        self._plays += 1
        if self._endpoint is not None and self._endpoint.rank:
            return row
        self.stuck |= bool(attack.silent)
        verdict = None if attack.untried else attack.verdict()
        if verdict is None or attack.untried:
            got, word = f"not tried: {attack.untried}", "not tried"
            return row | {"tried": False, "answers": [], "got": got, "broken": False, "verdict": word}
        return row | {
            "tried": True,
            "answers": attack.answers(),
            "got": verdict.got,
            "broken": verdict.broken,
            "verdict": verdict.word,
            "seconds": round(time.monotonic() - begun, 2),
        }

    def _config(self, attack: Attack, act: int) -> Config:
        """What this rank is started for, in a folder of its own."""
        config = resolve(self._flags(attack.flags))
        root = Path(config.run.out) if config.run.out else self._folder
        flags = [*self._flags(attack.flags), "--out", str(root / f"{attack.name}-{self._plays}-{act}")]
        if attack.active and config.aggregation.pki is None:
            flags += ["--pki", str(self._made_identities(config.run.parties))]
        return attack.own(resolve(flags))

    def _made_identities(self, parties: int) -> Path:
        """Of everybody, on this host's disk, made once and before anybody lies. In a job the ranks are told where."""
        if self._identities is None:
            path = self._folder / "identities"
            if self._endpoint is None or self._endpoint.rank == 0:
                pki.make(path, parties)
                for rank in range(1, self._endpoint.size if self._endpoint is not None else 0):
                    assert self._endpoint is not None
                    self._endpoint.send(rank, Tally(facts={PKI: str(path)}))
            else:
                arrived = self._endpoint.poll()
                assert arrived is not None and isinstance(arrived[1], Tally)
                path = Path(arrived[1].facts[PKI])
            self._identities = path
        return self._identities

    def _together(self, part: Callable[[Endpoint], None]) -> None:
        if self._endpoint is not None:
            part(_another(self._endpoint))
            return
        try:
            run_ranks(self._ranks, part)
        except Disconnected:
            pass  # rank 0 gave up on somebody, and says so


def _another(endpoint: Endpoint) -> Endpoint:
    """For the next act, in which nothing is left of the one before."""
    made: Callable[[], Endpoint] = type(endpoint)
    return made()


# ---- what a person sees ----


def tell(rows: list[Row], table: bool) -> int:
    """Print what came of it; returns the exit code."""
    if not rows:
        raise ConfigError("this attack is on ranks with identities (--adversary active)")
    console = Console(width=WIDTH, highlight=False, no_color=True, soft_wrap=False)
    if table:
        console.print(as_table(rows))
    else:
        print("\n".join(line for row in rows for line in as_lines(row, first=row is rows[0])))
    if not any(row["tried"] for row in rows):
        raise ConfigError(rows[0]["got"])
    broken = [f"{row['attack']} ({row['adversary']})" for row in rows if row["broken"]]
    print(f"BROKEN: {', '.join(broken)}" if broken else "everything held as promised")
    return BROKEN if broken else 0


WIDTH = 130


def as_lines(row: Row, first: bool) -> list[str]:
    lines = [f"{row['attack']}: {LIES[row['side']]}", f"  it {row['tries']}", ""] if first else []
    lines.append(f"{row['adversary']}:")
    lines += [f"  {answer}" for answer in row["answers"]]
    return [*lines, f"  the liar: {row['got']}", f"  {WORDS.get(row['verdict'], row['verdict'])}"]


WORDS = {
    "not promised": "not promised: passive trusts rank 0 to keep to the protocol; with --pki it need not be trusted"
}
LIES = {"server": "the server lies, rank 0", "client": "a client lies, rank 1"}


def as_table(rows: list[Row]) -> Table:
    table = Table(show_lines=False)
    for column in ("attack", "who lies", "tried with"):
        table.add_column(column, no_wrap=True)
    table.add_column("what the liar got", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        table.add_row(row["attack"], row["side"], row["adversary"], row["got"], row["verdict"])
    return table
