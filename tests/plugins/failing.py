"""Methods that go wrong on purpose: --method failing:Raises --dataset none with this folder on PYTHONPATH."""

import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

from benchmarks import toy
from fedmpi.errors import DataError


class Raises(toy.Method):
    def work(self, party, theta, round):
        if party == 1:
            raise ZeroDivisionError("something inside party 1")
        return super().work(party, theta, round)


class RaisesAlone(toy.Method):
    """While the others are deep in their work, where nobody looks at MPI."""

    def work(self, party, theta, round):
        if party == 1:
            time.sleep(1)
            raise ZeroDivisionError("something inside party 1")
        for _ in range(600 if party > 1 else 0):
            time.sleep(0.1)
        return super().work(party, theta, round)


class AllRaise(toy.Method):
    def work(self, party, theta, round):
        raise ZeroDivisionError(f"something inside party {party}")


class BadData(toy.Method):
    """What is said in one line, with exit code 2."""

    def work(self, party, theta, round):
        if party == 1:
            raise DataError("party 1's file is damaged")
        return super().work(party, theta, round)


class Leaves(toy.Method):
    """A library that calls sys.exit."""

    def work(self, party, theta, round):
        if party == 1:
            sys.exit(0)
        return super().work(party, theta, round)


class ServerRaises(toy.Method):
    """The server's own half: it steps once per round."""

    def step(self, theta, total, rate, support):
        raise ZeroDivisionError("something inside the server")


class FullDisk(toy.Method):
    """The kernel refuses every byte that party 1's rank writes into a file."""

    def states(self, parties):
        if 1 in parties:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return super().states(parties)


class GoneDisk(toy.Method):
    """A file stands where the checkpoints were."""

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        self.folder = Path(config.out) / "checkpoint"

    def states(self, parties):
        while 1 in parties and not self.folder.is_file():  # the other ranks make it again while they write
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.touch()
        return super().states(parties)


class NoFiles(toy.Method):
    """Party 1's rank has as many open files as it may have, and tries one more."""

    def work(self, party, theta, round):
        if party == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        while party == 1:
            self.files = [*getattr(self, "files", ()), open(os.devnull)]
        return super().work(party, theta, round)


class ServerDies(toy.Method):
    def step(self, theta, total, rate, support):
        os.kill(os.getpid(), signal.SIGKILL)


class Dies(toy.Method):
    """As a rank that the kernel kills for its memory: no exception, no goodbye."""

    def work(self, party, theta, round):
        if party == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().work(party, theta, round)


class Interrupted(toy.Method):
    """Ctrl-C, twice, as rank 0 hears of it in its step; the first one would have it finish the round."""

    def step(self, theta, total, rate, support):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.2)
        return super().step(theta, total, rate, support)
