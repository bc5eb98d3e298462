"""The endpoint over MPI. The only file that imports mpi4py.

Nothing here blocks inside MPI: receives are matched probes, sends are Isend + Test, and waiting is done asleep. With more
ranks than cores a rank that blocks in MPI spins, and takes the core from one that works.
"""

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import mpi4py
import numpy as np
import psutil

mpi4py.rc.thread_level = "single"

from mpi4py import MPI  # noqa: E402  (initialises MPI, after rc is set)

from fedmpi.errors import TransportError  # noqa: E402
from fedmpi.transport.endpoint import CHUNK, SHORTEST_NAP, Endpoint  # noqa: E402

TAG = 7
# Open MPI's own sign of `--with-ft ulfm`: the launcher then takes the end of a rank for something that the others live with.
SURVIVES = os.environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() not in ("0", "false", "no")
JOB = os.environ.get("PMIX_NAMESPACE", "")  # the job's name at its launcher
GRACE = 10  # seconds within which the processes of a failed job are gone, far more than the kernel needs


class MpiEndpoint(Endpoint):
    def __init__(self, chunk: int = CHUNK):
        world = MPI.COMM_WORLD
        super().__init__(world.Get_rank(), world.Get_size(), chunk)
        self._comm = world
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # a dead rank is an exception here, not the end of this one
        self._outgoing: list[tuple[int, MPI.Request, memoryview]] = []
        self._status = MPI.Status()
        self._name: socket.socket | None = None

    def _post(self, rank: int, piece: memoryview) -> None:
        with self._blame(rank):
            self._outgoing.append((rank, self._comm.Isend([piece, MPI.BYTE], dest=rank, tag=TAG), piece))

    def _take(self) -> tuple[int, memoryview] | None:
        self._unsent()
        with self._blame(None):
            matched = self._comm.improbe(MPI.ANY_SOURCE, TAG, self._status)
            if matched is None:
                return None
            source, size = self._status.Get_source(), self._status.Get_count(MPI.BYTE)
        piece = np.empty(size, np.uint8).data
        with self._blame(source):
            request = matched.Irecv([piece, MPI.BYTE])
            while not request.Test():
                time.sleep(SHORTEST_NAP)  # the sender is sending: every look moves a part of it
        return source, piece

    def _unsent(self) -> int:
        still = []
        for entry in self._outgoing:
            with self._blame(entry[0]):
                if not entry[1].Test():
                    still.append(entry)
        self._outgoing = still
        return len(still)

    @contextlib.contextmanager
    def _blame(self, rank: int | None) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_REVOKED:
                self._end_job(None)  # a rank on another host has failed, and said why
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

    def speak_first(self) -> None:
        # A name that only one process of a host can hold, and that goes with it. Without a launcher that names the job,
        # as MPICH's, everybody is the first.
        if self._name is None and JOB:
            try:
                self._name = socket.socket(socket.AF_UNIX)
                self._name.bind(f"\0fedmpi {JOB}")
            except OSError as error:
                if error.errno == errno.EADDRINUSE:  # anything else is part of what failed here
                    time.sleep(GRACE)

    def abort(self, code: int) -> None:
        self.speak_first()
        for stream in sys.stdout, sys.stderr:
            with contextlib.suppress(OSError):
                stream.flush()
        # The last words travel through the launcher's pipes; give them a moment before it kills the job.
        time.sleep(0.2)
        if SURVIVES:
            self._end_job(code)
        MPI.COMM_WORLD.Abort(code)

    def _end_job(self, code: int | None) -> None:
        """What MPI_Abort does where the launcher does not: under ULFM it ends the rank that calls it, and the others wait.

        This host's ranks are killed, because one that is busy looks at MPI only when its work is done; those of other
        hosts find the communicator revoked and do the same there. `code` None: leave without one, by a signal, so that
        the launcher reports the code of the rank that failed.
        """
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self.speak_first()  # two ranks that kill each other would leave nobody's exit code
            with contextlib.suppress(MPI.Exception):
                self._comm.Revoke()
            others = _processes_of_job()
            for process in others:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(others, timeout=GRACE)
        finally:  # without memory or files of its own it cannot look for others, but leave it can
            if code is not None:
                os._exit(code)
            os.kill(os.getpid(), signal.SIGKILL)


def _processes_of_job() -> list[psutil.Process]:
    """All on this host but for this one and those above it, as a shell that waits for its exit code."""
    own = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if JOB and process.pid not in own and process.environ().get("PMIX_NAMESPACE") == JOB:
                found.append(process)
    return found


def library() -> str:
    """The MPI in use, one line, for the run's record."""
    return MPI.Get_library_version().replace("\x00", "").splitlines()[0].strip().rstrip(",")
