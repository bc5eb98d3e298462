"""mpirun -n N python tests/mpi/run.py: pytest-mpi on every rank, one report, and no rank left waiting for a failed one."""

import contextlib
import io
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

arguments = ["-q", "-x", "--only-mpi", "-p", "no:cacheprovider", str(Path(__file__).parent), *sys.argv[1:]]
rank = MPI.COMM_WORLD.Get_rank()
said = io.StringIO()
with contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(said):
    code = int(pytest.main(arguments))
if code:
    if rank:
        print(f"rank {rank}:\n{said.getvalue()}", flush=True)
    MPI.COMM_WORLD.Abort(code)
