"""The README's picture: the closing table of a run that was done, as a terminal shows it.

mpirun -n 21 python -m fedmpi.main
python -m benchmarks.demo_picture runs/demo-dp-pfeddsu-s0 launch/demo.svg
"""

import argparse
import io
import json
import re
from pathlib import Path

from rich.console import Console

from fedmpi.privacy.statement import FIGURES, Statement
from fedmpi.report.terminal import WIDTH, Terminal


def picture(run: Path, title: str) -> str:
    """The SVG; in the reader's own monospaced font, because a README must not fetch one from elsewhere."""
    summary = json.loads((run / "summary.json").read_text())
    said = {name: summary[name] for name in (*FIGURES, "epsilon_kind", "private", "delta")}
    statement = Statement(**said, reason=summary["epsilon_reason"], trust=[], released=[])
    terminal = Terminal()
    terminal._console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, no_color=True)
    terminal.table(summary, statement, run)
    svg = terminal._console.export_svg(title=title, unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)
    return re.sub(r"[ \t]+\n", "\n", svg.replace("Fira Code", "monospace"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_picture", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("svg", type=Path, help="where the picture goes")
    parser.add_argument(
        "--title", default="mpirun -n 21 python -m fedmpi.main", help="the command that is shown over it"
    )
    options = parser.parse_args()
    options.svg.write_text(picture(options.run, options.title), encoding="utf-8")
