"""What every benchmark needs: its arguments, the machine's description, the raw rows."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from time import perf_counter

from fedmpi.files import write_json


def arguments(module: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=about.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw rows to FILE")
    return parser


def machine(*packages: str) -> dict[str, object]:
    """Enough to judge a figure by, and nothing that names a host."""
    return {
        "processor": processor(),
        "system": platform.system(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def processor() -> str:
    # platform.processor() is empty or just the architecture on many Linux systems.
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def show_machine(facts: dict[str, object]) -> None:
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))


def save(path: Path | None, facts: dict[str, object], **rows) -> None:
    if path:
        write_json(path, {"machine": facts, **rows})


def seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Times of several calls after one warm-up call."""
    call()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return times
