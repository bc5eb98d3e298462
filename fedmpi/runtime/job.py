"""What a launch script learns of its job: a folder of its own, FEDMPI_JOB, into which rank 0 writes where there is one.

    rank0    its process id and its host, so that signals reach it and not the launcher, which would kill every rank
    out      the run's folder, as soon as it is known
    done     rank 0 has ended well; holds the path of summary.json, or nothing where a question was answered

A launcher's exit code 0 is no proof: Open MPI's has it too when a host goes down. See launch/job.sh.
"""

import contextlib
import os
from pathlib import Path


def note(name: str, text: str = "") -> None:
    folder = os.environ.get("FEDMPI_JOB")
    if folder:
        with contextlib.suppress(OSError):  # of another host, or gone: the job is not the worse for it
            scratch = Path(folder, f".{name}.{os.getpid()}")
            scratch.write_text(f"{text}\n")
            scratch.replace(Path(folder, name))


def note_rank0() -> None:
    note("rank0", f"{os.getpid()} {os.uname().nodename}")


def command(ranks: int, rest: str) -> str:
    """What a person types to start so many ranks; a launch script has said how it was started itself."""
    return f"{os.environ.get('FEDMPI_LAUNCH') or f'mpirun -n {ranks} python -m fedmpi.main'} {rest}"
