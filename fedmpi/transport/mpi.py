"""The endpoint over MPI. The only file that imports mpi4py.

Nothing here blocks inside MPI: receives are matched probes, sends are Isend + Test, and waiting is done asleep. With more
ranks than cores a rank that blocks in MPI spins, and takes the core from one that works.
"""

import contextlib
import sys
import time

import mpi4py
import numpy as np

mpi4py.rc.thread_level = "single"

from mpi4py import MPI  # noqa: E402  (initialises MPI, after rc is set)

from fedmpi.errors import TransportError  # noqa: E402
from fedmpi.transport.endpoint import CHUNK, SHORTEST_NAP, Endpoint  # noqa: E402

TAG = 7


class MpiEndpoint(Endpoint):
    def __init__(self, chunk: int = CHUNK):
        world = MPI.COMM_WORLD
        super().__init__(world.Get_rank(), world.Get_size(), chunk)
        self._comm = world
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # a dead rank is an exception here, not the end of this one
        self._outgoing: list[tuple[int, MPI.Request, memoryview]] = []
        self._status = MPI.Status()

    def _post(self, rank, piece):
        with self._blame(rank):
            self._outgoing.append((rank, self._comm.Isend([piece, MPI.BYTE], dest=rank, tag=TAG), piece))

    def _take(self):
        self._unsent()
        with self._blame(None):
            matched = self._comm.improbe(MPI.ANY_SOURCE, TAG, self._status)
            if matched is None:
                return None
            source, size = self._status.Get_source(), self._status.Get_count(MPI.BYTE)
        piece = memoryview(np.empty(size, np.uint8))
        with self._blame(source):
            request = matched.Irecv([piece, MPI.BYTE])
            while not request.Test():
                time.sleep(SHORTEST_NAP)  # the sender is sending: every look moves a part of it
        return source, piece

    def _unsent(self):
        still = []
        for entry in self._outgoing:
            with self._blame(entry[0]):
                if not entry[1].Test():
                    still.append(entry)
        self._outgoing = still
        return len(still)

    @contextlib.contextmanager
    def _blame(self, rank):
        try:
            yield
        except MPI.Exception as error:
            who = f"rank {rank}" if rank is not None else self._failed_ranks()
            raise TransportError(f"{who} is gone or out of reach ({error.Get_error_string().strip()})") from None

    def _failed_ranks(self) -> str:
        """The dead, where the MPI can name them (ULFM)."""
        try:
            group = self._comm.Get_failed()
            ranks = group.Translate_ranks(range(group.size), self._comm.group)
        except (MPI.Exception, NotImplementedError):
            return "a rank"
        return f"rank {', '.join(map(str, sorted(ranks)))}" if len(ranks) else "a rank"

    def abort(self, code):
        sys.stdout.flush()
        sys.stderr.flush()
        # The last words travel through the launcher's pipes; give them a moment before it kills the job.
        time.sleep(0.2)
        MPI.COMM_WORLD.Abort(code)


def library() -> str:
    """The MPI in use, one line, for the run's record."""
    return MPI.Get_library_version().replace("\x00", "").splitlines()[0].strip().rstrip(",")
