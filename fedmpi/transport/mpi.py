"""The endpoint over MPI. The only file that imports mpi4py.

Nothing here blocks inside MPI: receives are matched probes, sends are Isend + Test, and waiting is done asleep. With more
ranks than cores a rank that blocks in MPI spins, and takes the core from one that works. Nor does a rank that begins a message
and stops in the middle of it keep the others' from being read.

What is larger than anything that its sender may send is received into a sink: 64 kB that are written over and over. A receive
that is cut short (MPI_ERR_TRUNCATE) is no way to do that: Open MPI 5 writes beyond the buffer if the message is a large one.
"""

import atexit
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator

import mpi4py
import numpy as np
import psutil

mpi4py.rc.thread_level = "serialized"  # the heart is a thread of its own

from mpi4py import MPI  # noqa: E402  (initialises MPI, after rc is set)

from fedmpi.errors import TransportError  # noqa: E402
from fedmpi.transport.endpoint import CHUNK, LONGEST_NAP, SHORTEST_NAP, Endpoint, FrameError  # noqa: E402
from fedmpi.transport.heartbeat import BEAT, Silence  # noqa: E402
from fedmpi.wire.frame import FRAMING  # noqa: E402

TAG, BEAT_TAG, QUIT = 7, 8, 9
LISTEN = BEAT / 4  # seconds between two looks for beats
UNHEARD = 4  # times the deadline of a rank is what rank 0 may be silent: with it everything ends
SINK = 1 << 16  # bytes
LOOKS = 100  # at a message that has begun to arrive, before others are looked for
# Open MPI's own sign of `--with-ft ulfm`: the launcher then takes the end of a rank for something that the others live with.
SURVIVES = os.environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() not in ("0", "false", "no")
JOB = os.environ.get("PMIX_NAMESPACE", "")  # the job's name at its launcher
LAUNCHERS: tuple[str, ...] = ("prterun", "mpirun", "mpiexec", "orterun")
if JOB.startswith("prterun-"):  # and not prte-, a launcher of many jobs: a host's daemon is there for this one alone
    LAUNCHERS += ("prted",)
NEIGHBOURS = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)  # who tells how many there are on this host
GRACE = 10  # seconds within which the processes of a failed job are gone, far more than the kernel needs
PATIENCE = 20  # seconds for a launcher to end its job
CALL = 2  # seconds that a call to MPI may take which tells others of the end, should they be out of reach
SHORT = 3  # seconds for a launcher that will wait in vain, for a host that is out of reach


class MpiEndpoint(Endpoint):
    def __init__(self, chunk: int = CHUNK):
        world = MPI.COMM_WORLD
        super().__init__(world.Get_rank(), world.Get_size(), chunk, _crowd())
        self._comm = world
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # a dead rank is an exception here, not the end of this one
        self._outgoing: list[tuple[int, MPI.Request, memoryview, float]] = []  # and when it was given to MPI
        self._open = 0  # how many of these, at the last look, to ranks that are waited for
        self._incoming: dict[int, tuple[MPI.Request, memoryview]] = {}  # by sender
        self._sunk: dict[int, MPI.Request] = {}  # by sender
        self._drain: MPI.Datatype | None = None
        self._dead: set[int] = set()  # as MPI says (ULFM)
        self._silence: Silence | None = None
        self._listened = 0.0
        self._access = threading.RLock()  # to MPI, of this thread and the heart
        self._still = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._heart.start()
        atexit.register(self._rest)  # before MPI_Finalize, which mpi4py leaves for the very end
        self._turn = 0
        self._status = MPI.Status()
        self._name: socket.socket | None = None

    # ---- heartbeats: empty messages, in no ledger ----

    def _beat(self) -> None:
        peers = range(1, self.size) if self.rank == 0 else range(min(1, self.size - 1))
        sent: dict[int, MPI.Request] = {}
        while not self._still.wait(BEAT):
            for peer in peers:
                with self._access, contextlib.suppress(MPI.Exception):
                    if peer not in self._dead and not self._still.is_set() and (peer not in sent or sent[peer].Test()):
                        sent[peer] = self._comm.Isend([b"", MPI.BYTE], dest=peer, tag=BEAT_TAG)

    def _rest(self) -> None:
        self._still.set()
        if threading.current_thread() is not self._heart:
            self._heart.join()

    def watch(self, deadline: float) -> None:
        peers = range(1, self.size) if self.rank == 0 else (0,)
        self._silence = Silence(peers, deadline if self.rank == 0 else UNHEARD * deadline)

    def welcome(self, rank: int) -> None:
        super().welcome(rank)
        if self._silence is not None:
            self._silence.watch(rank)

    def _listen(self) -> None:
        silence, now = self._silence, time.monotonic()
        if silence is None or now < self._listened + LISTEN:
            return
        self._listened = now
        for _ in range(4 * self.size):
            with self._blame(None):
                matched = self._comm.improbe(MPI.ANY_SOURCE, BEAT_TAG, self._status)
                if matched is None:
                    break
                matched.Recv([np.empty(0, np.uint8), MPI.BYTE])
                source = self._status.Get_source()
                silence.heard(source)
                if source in self.lost:
                    self.returned.add(source)
        for rank in self.parted if self.closing else ():
            silence.forget(rank)  # it is about to leave, without another word
        named, lost = silence.look()
        for rank in set(named) - set(lost):
            self.spoken_of(f"rank {rank} has not been heard of for {silence.notice:g} s")
        for rank in lost:
            silence.forget(rank)
            self.lose(rank, f"has not been heard of for {silence.deadline:g} s")

    # ---- messages ----

    def _post(self, rank: int, piece: memoryview) -> None:
        if rank in self._dead:
            return
        with self._access:
            try:
                request = self._comm.Isend([piece, MPI.BYTE], dest=rank, tag=TAG)
                self._outgoing.append((rank, request, piece, time.monotonic()))
                self._open += 1
            except MPI.Exception as error:
                self._explain(error, rank)

    def _take(self) -> tuple[int, memoryview] | None:
        # An idle rank comes here two hundred times a second, and with it twenty more on the same cores: nothing is done that need not be.
        with self._access:
            if self._silence is not None:
                self._listen()
            if self._outgoing or self._sunk:
                self._test_all()
            return self._next()

    def _next(self) -> tuple[int, memoryview] | None:
        for source in self._look():
            matched = None
            try:
                matched = self._comm.improbe(source, TAG, self._status)
            except MPI.Exception as error:
                self._explain(error, None if source == MPI.ANY_SOURCE else source)
            if matched is not None:
                sender, size = self._status.Get_source(), self._status.Get_count(MPI.BYTE)
                if self.limits is not None and size > FRAMING + self.limits.largest(sender):
                    self._sink(sender, matched, size)
                    if sender not in self.muted:
                        what = f"message of {size} bytes, at most {FRAMING + self.limits.largest(sender)} are due"
                        raise FrameError(sender, what, lost=True)
                    return None
                piece = self._places.take(size)
                with self._blame(sender):
                    self._incoming[sender] = matched.Irecv([piece, MPI.BYTE]), piece
                return self._arrived(sender, LOOKS)
        for source in list(self._incoming):
            if (arrived := self._arrived(source, 1)) is not None:
                return arrived
        return None

    def _look(self) -> Iterable[int]:
        """Whose messages to look for: anybody's, as they come. Where some are muted, the others' in turn and those last, or a flood
        would bury what comes in between; and none of a rank whose last one is still on its way, which keeps each rank's order."""
        if not (self.muted or self._incoming or self._sunk):
            return (MPI.ANY_SOURCE,)
        self._turn = (self._turn + 1) % self.size
        others = [(self._turn + step) % self.size for step in range(self.size)]
        busy = {self.rank, *self._incoming, *self._sunk, *self._dead}
        return sorted((rank for rank in others if rank not in busy), key=self.muted.__contains__)

    def _arrived(self, source: int, looks: int) -> tuple[int, memoryview] | None:
        """The message that is on its way from this rank, if so many looks are enough: each of them moves a part of it."""
        for look in range(looks):
            if source not in self._incoming:
                break  # it died over it
            request, piece = self._incoming[source]
            if look:
                time.sleep(SHORTEST_NAP)
            try:
                if request.Test():
                    del self._incoming[source]
                    return source, piece
            except MPI.Exception as error:
                self._explain(error, source)
        return None

    def _sink(self, source: int, matched: MPI.Message, size: int) -> None:
        """Let a message in without a place for it: its parts all go to the same one."""
        if self._drain is None:
            self._drain = MPI.BYTE.Create_contiguous(SINK).Create_resized(0, 0).Commit()
        with self._blame(source):
            self._sunk[source] = matched.Irecv([np.empty(SINK, np.uint8), -(-size // SINK), self._drain])

    def _unsent(self) -> int:
        with self._access:
            return self._test_all()

    def _sending(self) -> bool:
        return self._open > 0

    def _test_all(self) -> int:
        still = []
        for entry in self._outgoing:
            try:
                if not entry[1].Test():
                    still.append(entry)
            except MPI.Exception as error:
                self._explain(error, entry[0])
        self._outgoing = still  # without what a rank died over
        if self._sunk:
            self._test_sunk()
        self._open = sum(rank not in self.muted for rank, *_ in still) if self.muted else len(still)
        return self._open

    def _test_sunk(self) -> None:
        for source, request in list(self._sunk.items()):
            with self._blame(source):
                if request.Test():
                    del self._sunk[source]

    def behind(self, age: float) -> set[int]:
        self._unsent()
        latest = time.monotonic() - age
        return {rank for rank, _, _, sent in self._outgoing if sent <= latest} - self.muted

    @contextlib.contextmanager
    def _blame(self, rank: int | None) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            self._explain(error, rank)

    def _explain(self, error: MPI.Exception, rank: int | None) -> None:
        """What a call that concerned this rank, or nobody in particular, has failed over: returns if that is a rank that has died."""
        kind = error.Get_error_class()
        if kind == MPI.ERR_REVOKED:
            self._end_job(None)  # a rank on another host has failed, and said why
        if kind in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING) and self._bury():
            return
        who = "a rank" if rank is None else f"rank {rank}"
        raise TransportError(f"{who} is gone or out of reach ({error.Get_error_string().strip()})") from None

    def _bury(self) -> bool:
        """Write down who is dead, where the MPI can name them and goes on without them (ULFM). A client has one peer alone."""
        try:
            group = self._comm.Get_failed()
            dead = set(group.Translate_ranks(range(group.size), self._comm.group))
            self._comm.Ack_failed()
        except (MPI.Exception, NotImplementedError):
            return False
        if self.rank and 0 in dead:
            raise TransportError("rank 0 is gone")
        for rank in sorted(dead - self._dead):
            self._dead.add(rank)
            self.returned.discard(rank)
            self._incoming.pop(rank, None)
            self._sunk.pop(rank, None)
            if self._silence is not None:
                self._silence.forget(rank)
            if self.rank == 0:
                self.lose(rank, "is gone")
        return bool(dead)

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
        insist(_launcher())
        MPI.COMM_WORLD.Abort(code)

    # ---- the end of a run ----
    #
    # MPI_Finalize waits for everybody, and a rank that is killed or stopped then is waited for by all others, spinning, or fails them.
    # With ULFM it should do without the dead, and was seen not to. There ranks may also leave without it, as long as all do: when rank 0
    # says so.

    def _close(self, grace: float, code: int, in_order: bool) -> None:
        if SURVIVES:
            self._let_go(grace)
            self._kill(self.lost.keys() - self._dead | self.muted)  # they cannot read it, or will not
            self._wait_for_ends(grace)
            self._kill(set(range(1, self.size)) - self._dead)  # stopped after its last word
            self._quit(code)
        if not self.muted:
            return
        if not (in_order and self.muted.isdisjoint(self.lost)):
            return self.abort(code)
        late = threading.Timer(grace, self.abort, [code])  # MPI_Finalize lets other threads run
        late.daemon = True
        late.start()
        self._rest()
        MPI.Finalize()
        late.cancel()

    def _let_go(self, grace: float) -> None:
        for rank in range(1, self.size):
            if rank not in self._dead:
                with self._access, contextlib.suppress(MPI.Exception):
                    request = self._comm.Isend([b"", MPI.BYTE], dest=rank, tag=QUIT)
                    self._outgoing.append((rank, request, memoryview(b""), time.monotonic()))
        with contextlib.suppress(TransportError):
            self.flush(grace)

    def _wait_for_ends(self, grace: float) -> None:
        """Who sees rank 0 leave first would call that a failure. Who was lost is not waited for: on a host that is out of reach nobody
        is ever seen to leave."""
        deadline = time.monotonic() + grace
        while len(self._dead | self.lost.keys()) < self.size - 1 and time.monotonic() < deadline:
            with self._access, self._blame(None):
                self._comm.improbe(MPI.ANY_SOURCE, QUIT, self._status)
            time.sleep(SHORTEST_NAP * 100)

    def _kill(self, ranks: Collection[int]) -> None:
        """Those of them that are on this host."""
        for process in _processes_of_job(ranks) if ranks else ():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def part(self, at_once: bool = False) -> None:
        while SURVIVES:
            with self._access, self._blame(0):
                if at_once or self._comm.improbe(0, QUIT, self._status) is not None:
                    self._quit(0)
            with self._access:
                self._listen()
            if self._news:
                raise self._news.popleft()[1]
            time.sleep(LONGEST_NAP)

    def _quit(self, code: int) -> None:
        """Without a word to MPI."""
        for stream in sys.stdout, sys.stderr:
            with contextlib.suppress(OSError):
                stream.flush()
        if self.rank == 0:
            insist(_launcher(), self._patience())
        os._exit(code)

    def _patience(self) -> int:
        """The launcher waits for each host to say that its ranks have ended, which one that is out of reach never does; and nobody ends
        the daemon of a host that rank 0's is out of reach of."""
        return SHORT if self.lost.keys() - self._dead else PATIENCE

    def _end_job(self, code: int | None) -> None:
        """What MPI_Abort does where the launcher does not: under ULFM it ends the rank that calls it, and the others wait.

        This host's ranks are killed, because one that is busy looks at MPI only when its work is done; those of other
        hosts find the communicator revoked and do the same there. `code` None: leave without one, by a signal, so that
        the launcher reports the code of the rank that failed.
        """
        try:
            with contextlib.suppress(ValueError):  # of a thread
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            self.speak_first()  # two ranks that kill each other would leave nobody's exit code
            self._revoke()
            others = _processes_of_job()
            for process in others:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(others, timeout=GRACE)
            insist(_launcher(), self._patience())
        finally:  # without memory or files of its own it cannot look for others, but leave it can
            if code is not None:
                os._exit(code)
            os.kill(os.getpid(), signal.SIGKILL)

    def _revoke(self) -> None:
        """Open MPI's does not return while a rank that it has to tell is on a host that is out of reach: in a thread of its own, for a
        moment. Nobody else speaks to MPI after that."""

        def revoke() -> None:
            with contextlib.suppress(MPI.Exception):
                self._comm.Revoke()

        self._still.set()
        told = threading.Thread(target=revoke, daemon=True)
        told.start()
        told.join(CALL)


def _crowd() -> float:
    """Ranks of this host to each of its cores, as far as the launcher tells; 1 at least."""
    told = next((os.environ[name] for name in NEIGHBOURS if os.environ.get(name, "").isdigit()), "1")
    return max(1.0, int(told) / len(os.sched_getaffinity(0)))


def _processes_of_job(ranks: Collection[int] | None = None) -> list[psutil.Process]:
    """All on this host, or those of some ranks, but for this one and those above it, as a shell that waits for its exit code."""
    own = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if JOB and process.pid not in own and process.environ().get("PMIX_NAMESPACE") == JOB:
                if ranks is None or process.environ().get("PMIX_RANK") in {str(rank) for rank in ranks}:
                    found.append(process)
    return found


def _launcher() -> int | None:
    """The process above this one that started it, if it is one that MPI_Abort speaks to."""
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            if process.name() in LAUNCHERS:
                return process.pid
    return None


def insist(launcher: int | None, patience: int = PATIENCE) -> None:
    """See to it that a launcher which was told to end its job does, within so many seconds. Open MPI's, without ULFM, was seen to
    wait for ever, once in some hundred times, when it was told by one rank while others were about to leave. What it started goes
    with it, as an ssh to a host that is out of reach."""
    if launcher is not None:
        started = []
        with contextlib.suppress(psutil.Error):
            started = [process.pid for process in psutil.Process(launcher).children() if process.pid != os.getpid()]
        looks = f"for _ in $(seq {patience}); do sleep 1; kill -0 {launcher} || exit; done"
        kills = f"kill {launcher}; sleep 2; kill -9 {launcher} {' '.join(map(str, started))}"
        with contextlib.suppress(OSError):  # then without it
            subprocess.Popen(
                ["/bin/sh", "-c", f"{looks}; {kills}"],
                env={"PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


def library() -> str:
    """The MPI in use, one line, for the run's record."""
    return MPI.Get_library_version().replace("\x00", "").splitlines()[0].strip().rstrip(",")
