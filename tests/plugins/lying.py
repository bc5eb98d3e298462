"""Methods whose first rank breaks the rules: --method lying:Garbage --dataset none with this folder on PYTHONPATH.

They write to rank 0 past the endpoint, as a program could that is not fedmpi.
"""

import time

import numpy as np

from benchmarks import toy
from fedmpi.wire.frame import Header
from fedmpi.wire.messages import PlainInput, encode

TAG = 7  # fedmpi.transport.mpi.TAG, which is not imported before MPI is started


class Lying(toy.Method):
    def work(self, party, theta, round):
        if party == 0:
            self.lie(round)
        return super().work(party, theta, round)

    def lie(self, round):
        raise NotImplementedError

    def write(self, data):
        from mpi4py import MPI

        self.sent = [*getattr(self, "sent", ())[-100:], MPI.COMM_WORLD.Isend([data, MPI.BYTE], dest=0, tag=TAG)]

    def for_ever(self, act):
        while True:
            act()


class Garbage(Lying):
    def lie(self, round):
        self.write(np.random.default_rng(round).bytes(1000))


class Huge(Lying):
    """A message of MPI that is larger than anything that may come, and what would follow it."""

    def lie(self, round):
        self.block = np.zeros(100_000_000, np.uint8)
        self.block[:20] = np.frombuffer(Header(PlainInput.TYPE, round, 0, 1 << 40).pack(), np.uint8)
        self.write(self.block)
        while not self.sent[-1].Test():  # rank 0 lets it in, or this rank would never be done with it
            time.sleep(0.001)
        self.write(b"more of it")


class Floods(Lying):
    """Does nothing else any more, and never ends."""

    def lie(self, round):
        old = bytes(encode(PlainInput(99, 0, b"", bytes(200))))
        self.for_ever(lambda: (self.write(old), self.sent[0].Test()))


class Sleeps(Lying):
    """Says one word that cannot be, and is not heard of again."""

    def lie(self, round):
        self.write(b"FM")
        self.for_ever(lambda: time.sleep(1))
