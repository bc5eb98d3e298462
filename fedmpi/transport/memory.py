"""An endpoint inside one process: the same server and client code, driven by threads, in plain pytest."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from fedmpi.errors import TransportError
from fedmpi.transport.endpoint import CHUNK, Endpoint
from fedmpi.wire.frame import Buffer

PASSED_OVER = 10_000  # messages of muted ranks within one look for another's


class Disconnected(TransportError):
    """The job ended under this rank; the rank that ended it has the reason."""


class Killed(TransportError):
    """In place of a signal that a thread cannot be sent: the rank says nothing more, and rank 0 finds it gone."""


class Hub:
    """The queues between the endpoints of one job."""

    def __init__(self, size: int, chunk: int = CHUNK):
        self.queues: list[queue.SimpleQueue[tuple[int, Buffer]]] = [queue.SimpleQueue() for _ in range(size)]
        self.broken = threading.Event()
        self.dead: set[int] = set()
        self.silent: set[int] = set()  # for as long as they are in it
        self.endpoints = [MemoryEndpoint(self, rank, size, chunk) for rank in range(size)]


class MemoryEndpoint(Endpoint):
    def __init__(self, hub: Hub, rank: int, size: int, chunk: int):
        super().__init__(rank, size, chunk)
        self._hub = hub

    def _post(self, rank: int, piece: memoryview) -> None:
        self._hub.queues[rank].put((self.rank, bytes(piece)))

    def _take(self) -> tuple[int, Buffer] | None:
        if self.rank in self._hub.dead:
            raise Killed(f"rank {self.rank} is dead")
        if self.rank == 0:
            for rank in self._hub.dead - self.lost.keys():
                self.lose(rank, "is gone")
            for rank in self._hub.silent - self.lost.keys():
                self.lose(rank, "has not been heard of")
            self.returned |= self.lost.keys() - self._hub.dead - self._hub.silent
        if self._hub.broken.is_set():
            raise Disconnected("another rank ended the job")
        try:
            for _ in range(PASSED_OVER):
                source, piece = self._hub.queues[self.rank].get_nowait()
                if source not in self.muted or source in self._expected:
                    return source, piece
                self._throw_away(source, piece)
        except queue.Empty:
            pass
        return None

    def _unsent(self) -> int:
        return 0

    def die(self) -> None:
        """As SIGKILL ends a process."""
        self._hub.dead.add(self.rank)
        raise Killed(f"rank {self.rank} is dead")

    def fall_silent(self, until: threading.Event) -> None:
        """As SIGSTOP and SIGCONT, once the others have noticed."""
        self._hub.silent.add(self.rank)
        until.wait()
        self._hub.silent.discard(self.rank)

    def abort(self, code: int) -> None:
        self._hub.broken.set()


def run_ranks(size: int, target: Callable[[Endpoint], Any], chunk: int = CHUNK) -> list[Any]:
    """Call target(endpoint) once per rank, each in a thread; the results by rank, or the first exception raised."""
    hub = Hub(size, chunk)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = target(hub.endpoints[rank])
        except Killed:
            pass
        except BaseException as error:  # every kind of failure must reach the caller, not die with the thread
            errors.append(error)
            hub.broken.set()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, Disconnected)), errors[0])
    return results
