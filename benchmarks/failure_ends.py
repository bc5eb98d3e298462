"""Any failure ends the job: how long after its first words the last process is gone.

    python -m benchmarks.failure_ends [--json FILE] [--mpich BIN] [--ranks 3 6 21] [--cases Raises AllRaise ...]

Every case of tests/plugins/failing.py under launch/local.sh (Open MPI with ULFM), plain mpirun of Open MPI and, where --mpich
names a folder with MPICH's mpirun and a python beside it, MPICH. Of each: the exit code, the seconds from the first line of
the failure to the end of the last process, ranks and launcher, and how many lines fedmpi itself said. A job that lives on
for a minute is ended from here and is a failure of this claim.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.launch import ROOT, environment

# Case of tests/plugins/failing.py -> what somebody must have said of it; "" where nobody may.
CASES = {
    "Raises": "something inside party 1",
    "AllRaise": "something inside party",
    "RaisesAlone": "something inside party 1",
    "BadData": "party 1's file is damaged",
    "Leaves": "SystemExit",
    "ServerRaises": "something inside the server",
    "FullDisk": "File too large",
    "GoneDisk": "cannot be written",
    "NoFiles": "Too many open files",
    "Dies": "",
    "ServerDies": "",
    "Interrupted": "",
}
TOY = "--dataset none --support dense --metrics none --rounds 2 --checkpoint-every 1".split()
PATIENCE, START = 60, 180  # seconds after the first words; seconds until there are some


def marked(mark: str) -> list[psutil.Process]:
    """The job's processes that still run, found by what they inherited."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FEDMPI_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


class Words(threading.Thread):
    """What the job says on stderr, and when its failure was first heard of."""

    def __init__(self, stream):
        super().__init__(daemon=True)
        self.stream, self.lines, self.first = stream, [], None

    def run(self):
        for line in self.stream:
            self.lines.append(line.rstrip("\n"))
            if self.first is None and ("fedmpi: " in line or "Traceback" in line):
                self.first = time.monotonic()

    def own(self) -> int:
        return sum(line.startswith("fedmpi: ") for line in self.lines)


def measure(command: list, ranks: int, case: str, folder: str, environ: dict) -> dict:
    mark = f"fedmpi-failure-{time.monotonic_ns()}"
    settings = ["--method", f"failing:{case}", "--parties", max(ranks - 1, 4), "--out", Path(folder) / mark]
    process = subprocess.Popen(
        [*map(str, [*command, *TOY, *settings])],
        env=environ | {"FEDMPI_MARK": mark},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    words = Words(process.stderr)
    words.start()
    started = time.monotonic()
    left, hung = marked(mark), False
    while left or process.poll() is None:
        if time.monotonic() > (words.first + PATIENCE if words.first else started + START):
            hung = True
            for one in left:
                one.kill()
        time.sleep(0.05)
        left = marked(mark)
    gone = time.monotonic()  # after the look that found nobody: late by one look, never early
    words.join(5)
    return {
        "ranks": ranks,
        "case": case,
        "exit_code": None if hung else process.wait(),
        "seconds": round(gone - (words.first or gone), 2),
        "heard": words.first is not None,
        "as_meant": not CASES[case] or any(CASES[case] in line for line in words.lines),
        "lines": words.own(),
        "hung": hung,
        "stderr": words.lines[:200],
    }


def main() -> None:
    parser = arguments("failure_ends", __doc__)
    parser.add_argument("--mpich", type=Path, metavar="BIN", help="folder of MPICH's mpirun and of a python")
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 6, 21])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--launchers", nargs="+", choices=("local.sh", "mpirun", "mpich"))
    options = parser.parse_args()
    bin = Path(sys.executable).parent
    commands = {
        "local.sh": lambda ranks: ["bash", "launch/local.sh", "-n", ranks],
        "mpirun": lambda ranks: [bin / "mpirun", "-n", ranks, sys.executable, "-m", "fedmpi.main"],
    }
    if options.mpich:
        mpich = options.mpich
        commands["mpich"] = lambda ranks: [mpich / "mpirun", "-n", ranks, mpich / "python", "-m", "fedmpi.main"]
    facts = machine("mpi4py", "psutil")
    show_machine(facts)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environ = environment(bin / "mpirun", folder) | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'plugins'}"
        }
        for launcher in options.launchers or commands:
            for ranks in options.ranks:
                for case in options.cases:
                    row = {"launcher": launcher} | measure(commands[launcher](ranks), ranks, case, folder, environ)
                    rows.append(row)
                    ended = "HANGS" if row["hung"] else f"exit code {row['exit_code']}"
                    when = f"{row['seconds']:5.1f} s" if row["heard"] else "silent "
                    other = "" if row["as_meant"] else "  ended by something else"
                    print(
                        f"{launcher:<9} {ranks:>3} ranks  {case:<13} {ended:<14} {when}  {row['lines']} lines{other}",
                        flush=True,
                    )
    save(options.json, facts, rows=rows)
    sys.exit(any(row["hung"] or row["exit_code"] == 0 or not row["as_meant"] for row in rows))


if __name__ == "__main__":
    main()
