"""Any benchmark here against the same one at another commit: run in turns, one ratio for every figure.

    python -m benchmarks.against REV [--times 3] [--json FILE] -- secagg_cost --n 100 --d 100000

REV is checked out into a temporary folder, and its benchmark runs with its own fedmpi. Both sides run in turns in one go, because
a machine is never as quiet as it was before; the figure is the ratio of medians, here over REV, of every number in the raw
rows that is not the same on both sides. Times below 1 are faster here. A ratio within the spread of the runs says nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.common import arguments, machine, save, show_machine

ROOT = Path(__file__).parent.parent


def numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Every float of the raw rows by where it stands."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name != "machine":
                yield from numbers(part, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from numbers(part, f"{path}[{index}]")
    elif isinstance(value, float):
        yield path, value


def run(root: Path, words: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:], "--json", str(file)]
        environment = os.environ | {"PYTHONPATH": str(root)}
        found = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if found.returncode:
            raise SystemExit(f"{' '.join(words)} in {root}: {found.stderr.decode().strip().splitlines()[-1]}")
        return dict(numbers(json.loads(file.read_text())))


def main() -> None:
    parser = arguments("against", __doc__)
    parser.add_argument("rev", help="the commit to compare with")
    parser.add_argument("--times", type=int, default=3, help="runs of each side")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, words = sys.argv[1:at], sys.argv[at + 1 :]
    asked = parser.parse_args(own)
    if not words:
        parser.error("name a benchmark and its options behind --")
    facts = machine()
    show_machine(facts)
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, asked.rev], cwd=ROOT, check=True)
        try:
            runs: list[tuple[dict[str, float], dict[str, float]]] = []
            for number in range(asked.times):  # who goes first changes
                sides = [run(root, words) for root in ((other, ROOT) if number % 2 else (ROOT, other))]
                runs.append((sides[1], sides[0]) if number % 2 else (sides[0], sides[1]))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    rows = []
    for name in runs[0][0]:
        here, there = ([side.get(name) for side in sides] for sides in zip(*runs))
        if None in here or None in there or here == there or not median(there):
            continue
        ratios = sorted(one / base for one, base in zip(here, there) if base)
        rows.append(
            {"figure": name, "here": here, "there": there, "ratio": median(here) / median(there), "pairs": ratios}
        )
        print(f"{name:<70} {median(here) / median(there):7.3f}   {ratios[0]:.3f} to {ratios[-1]:.3f}")
    save(asked.json, facts, rev=asked.rev, benchmark=words, rows=rows)


if __name__ == "__main__":
    main()
