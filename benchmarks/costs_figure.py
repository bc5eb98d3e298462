"""The figure of benchmarks.all: bytes of the main settings, and what grows with the parties."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedmpi.bill import laws

COLOURS = {laws.UP: "#2a6f97", laws.DOWN: "#e09f3e"}


def draw(rows: list[dict], found: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (of_bytes, of_party, of_server) = pyplot.subplots(
        1, 3, figsize=(14, 4.6), layout="constrained", width_ratios=(1.5, 1, 1)
    )
    _bytes(of_bytes, rows)
    _growth(
        of_party, found, "A party, a round", "linear", ("client_cpu", 1e3, "CPU [ms]"), (laws.UP, 1e-3, "bytes up [kB]")
    )
    _growth(
        of_server, found, "Rank 0, a round", "log", ("server_cpu", 1.0, "CPU [s]"), ("server_pss", 1e-9, "memory [GB]")
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bytes(axes, rows: list[dict]) -> None:
    """A bar each way, as a share of what dense FedAvg sends; a black line where the entropy of the content is."""
    places = np.arange(len(rows))[::-1]
    for way, shift in ((laws.UP, 0.2), (laws.DOWN, -0.2)):
        shares = [100 * row[way]["counted"] / row["fedavg"] for row in rows]
        axes.barh(places + shift, shares, 0.38, color=COLOURS[way], label=way)
        for place, share, row in zip(places + shift, shares, rows):
            axes.text(share + 1, place, f"{row[way]['counted'] / 1e3:.3g} kB", va="center", fontsize=7)
            if row[way]["bound"] is not None:
                least = 100 * row[way]["bound"] / row["fedavg"]
                axes.plot([least, least], [place - 0.19, place + 0.19], color="black", lw=1.6)
    axes.plot([], [], color="black", lw=1.6, label="entropy of the content")
    axes.axvline(100, color="grey", ls=":", lw=1)
    names = [f"{row['name'].strip()} ({row['parties']})" for row in rows]
    axes.set_yticks(places, names, fontsize=8)
    axes.set(xlabel="% of dense FedAvg in float32", title="Bytes of a party and training round (of so many parties)")
    axes.set_xlim(right=1.15 * max(axes.get_xlim()[1], 100))  # for the labels
    axes.legend(fontsize=8, loc="center right", framealpha=0.9)


def _growth(axes, found: dict, title: str, scale: str, *curves: tuple[str, float, str]) -> None:
    """Measured as dots; a dashed line along what was extrapolated."""
    for (name, unit, label), colour in zip(curves, COLOURS.values()):
        measured, beyond = ([(row["parties"], unit * row[name]) for row in found[rows]] for rows in ("rows", "path"))
        axes.plot(*zip(*measured), "o-", color=colour, label=label, ms=4)
        axes.plot(*zip(measured[-1], *beyond), "--", color=colour)
        last, text = beyond[-1], f"{beyond[-1][1]:,.0f}"
        axes.plot(*last, "o", mfc="white", color=colour)
        axes.annotate(text, last, (-6, 6), textcoords="offset points", ha="right", fontsize=8)
    axes.set(xscale="log", yscale=scale, xlabel="parties (dashed: extrapolated)", title=title)
    if scale == "linear":
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.legend(fontsize=8, loc="upper left")
    axes.grid(alpha=0.3)
