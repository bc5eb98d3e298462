"""Wall and CPU seconds by phase. CPU time, because ranks outnumber cores and wall time then says little.

Phases nest, and what an inner one takes is not counted again in the outer one: the figures add up.
"""

import time
from collections import defaultdict
from contextlib import contextmanager

from fedmpi.wire.phases import Cost

# As a round goes; a phase that is not listed comes after these.
ORDER = (
    "setup",
    "references",
    "send model",
    Cost.LOCAL_WORK,
    Cost.ENCODE,
    Cost.DH,
    Cost.SHAMIR_SPLIT,
    Cost.AEAD,
    Cost.PRG,
    Cost.MPI,
    "wait for updates",
    Cost.AGGREGATE,
    Cost.SHAMIR_COMBINE,
    "step",
    "evaluation",
    "checkpoint",
    "keep parties",
)


class Stopwatch:
    def __init__(self):
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self._inner = [[0.0, 0.0]]  # what the phases inside the current one took

    @contextmanager
    def __call__(self, phase: str):
        self._inner.append([0.0, 0.0])
        wall, cpu = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            wall, cpu = time.monotonic() - wall, time.process_time() - cpu
            inner = self._inner.pop()
            self.wall[phase] += wall - inner[0]
            self.cpu[phase] += cpu - inner[1]
            self._inner[-1][0] += wall
            self._inner[-1][1] += cpu

    @contextmanager
    def charge(self, account: dict, key, phase: str):
        """As a call, and what it took in CPU seconds is charged to `account[key]` as well."""
        before = self.cpu[phase]
        with self(phase):
            yield
        account[key] += self.cpu[phase] - before

    def add(self, seconds: dict[str, float]) -> None:
        """Another rank's CPU seconds."""
        for phase, value in seconds.items():
            self.cpu[phase] += value

    def as_dict(self) -> dict[str, dict[str, float]]:
        phases = sorted(
            {*self.wall, *self.cpu}, key=lambda phase: (ORDER.index(phase) if phase in ORDER else 99, phase)
        )
        return {
            phase: {"wall": round(self.wall.get(phase, 0.0), 3), "cpu": round(self.cpu.get(phase, 0.0), 3)}
            for phase in phases
        }
