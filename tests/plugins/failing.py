"""Methods that go wrong on purpose: --method failing:Raises with this folder on PYTHONPATH."""

import os
import signal

from fedmpi.vision.methods.dp_pfeddsu import Method


class Raises(Method):
    def local_work(self, party, theta, round):
        if party == 1:
            raise ZeroDivisionError("something inside party 1")
        return super().local_work(party, theta, round)


class ServerDies(Method):
    """The server's own half: it steps once per round."""

    def step(self, theta, total, rate, support):
        os.kill(os.getpid(), signal.SIGKILL)


class Dies(Method):
    """As a rank that the kernel kills for its memory: no exception, no goodbye."""

    def local_work(self, party, theta, round):
        if party == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_work(party, theta, round)
