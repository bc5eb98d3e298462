"""Wall and CPU seconds by phase. CPU time, because ranks outnumber cores and wall time then says little."""

import time
from collections import defaultdict
from contextlib import contextmanager

# As a round goes; a phase that is not listed comes after these.
ORDER = "setup|references|send model|local work|encode|send|wait for updates|aggregate|step|evaluation|checkpoint".split("|")


class Stopwatch:
    def __init__(self):
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str):
        wall, cpu = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            self.wall[phase] += time.monotonic() - wall
            self.cpu[phase] += time.process_time() - cpu

    def add(self, seconds: dict[str, float]) -> None:
        """Another rank's CPU seconds."""
        for phase, value in seconds.items():
            self.cpu[phase] += value

    def as_dict(self) -> dict[str, dict[str, float]]:
        phases = sorted({*self.wall, *self.cpu}, key=lambda phase: (ORDER.index(phase) if phase in ORDER else 99, phase))
        return {
            phase: {"wall": round(self.wall.get(phase, 0.0), 3), "cpu": round(self.cpu.get(phase, 0.0), 3)}
            for phase in phases
        }
