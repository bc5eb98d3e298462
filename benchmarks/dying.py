"""A toy method whose ranks fail when they are told to, by FEDMPI_FAULT=RANK:WHAT:ROUND:HOW, several separated by commas.

WHAT: the type of a message, as it is about to be sent or has just come, or `work` or `evaluate`, in the midst of that, or `part`, once it has said its last word; of that round,
or of the first there is (0). HOW: kill, stop (SIGSTOP), or a number of seconds to be stopped for.
"""

import os
import signal
import subprocess
import sys
import time
import zlib

import numpy as np

from benchmarks.toy import Method as Toy
from fedmpi.algorithm import LocalUpdate
from fedmpi.files import append_line
from fedmpi.randomness.words import SeededWords
from fedmpi.runtime.server import Server
from fedmpi.transport.endpoint import Endpoint

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
FAULTS = [fault.split(":") for fault in os.environ.get("FEDMPI_FAULT", "").split(",") if fault]


def strike(name: str, round: int) -> None:
    for fault in FAULTS:
        rank, what, when, how = fault
        if int(rank) == RANK and what == name and int(when) in (0, round):
            FAULTS.remove(fault)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how != "stop":
                subprocess.Popen(["sh", "-c", f"sleep {how}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)


def _dispatch(self, rank, message, dispatch=Endpoint._dispatch):
    strike(type(message).__name__, message.round)
    return dispatch(self, rank, message)


def poll(self, timeout=None, poll=Endpoint.poll):
    arrived = poll(self, timeout)
    if arrived is not None and self.rank:
        strike(type(arrived[1]).__name__, arrived[1].round)
    return arrived


def step(self, round, found, drawn, step=Server.step):
    """Leaves a mark of every sum that was opened, to be held against those of a run without protocol and faults."""
    if isinstance(self.algorithm, Method):
        append_line(self.config.out / "sums", f"{zlib.crc32(np.ascontiguousarray(found.total).tobytes()):08x}")
    return step(self, round, found, drawn)


# Only in a process that was told to run this method.
Endpoint._dispatch, Endpoint.poll, Server.step = _dispatch, poll, step
if (mpi := sys.modules.get("fedmpi.transport.mpi")) is not None:  # and not where ranks are threads

    def part(self, at_once=False, part=mpi.MpiEndpoint.part):
        strike("part", 0)
        return part(self, at_once)

    mpi.MpiEndpoint.part = part


class Method(Toy):
    """What a party sends depends on all that it did before: work that is lost, or done twice, shows in the model."""

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        self.past = {}

    def work(self, party, theta, round):
        time.sleep(float(os.environ.get("FEDMPI_PACE", "0")))  # seconds, for a run that lasts
        strike("work", round)
        self.past[party] = zlib.crc32(theta.tobytes(), self.past.get(party, 0) * 31 + round & 0xFFFFFFFF)
        values = SeededWords(self.seed, "dying", party, self.past[party]).generator().standard_normal(100, np.float32)
        return LocalUpdate(party, np.resize(values, self.dimension), None, dict.fromkeys(self.report_columns, 0.0))

    def evaluate(self, party, theta, round):
        strike("evaluate", round)
        return super().evaluate(party, theta, round)

    def party_state(self, party):
        return {"past": np.array(self.past.get(party, 0))}

    def load_party_state(self, party, state):
        self.past[party] = int(state["past"])
