"""python -m fedmpi.audit RUN: what the messages of a rating run give away, attacked as an observer would.

The run's parties and its rounds are repeated here from its settings, which is exact in seeded mode, so that the attacks have
what rank 0 (or whoever sees its sums) had, and so that their success can be scored against the truth. A late round is repeated
without one party, for a few parties, as a dropout would have it. Nothing of this happens in a run itself.
"""

import argparse
import collections
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fedmpi.attacks.differencing import items_from_counts, level_on_grid, missing_gradients, rated_rows
from fedmpi.attacks.exact_solver import leak_from_errors
from fedmpi.attacks.gradient_leak import Observation, Undetermined, exactly_recovered, leak, place_on_grid
from fedmpi.attacks.indicator import bound_in_words, indicator, within_assumption
from fedmpi.attacks.parties import BIN_LABELS
from fedmpi.attacks.ranking import TOPS, ranking_table
from fedmpi.attacks.recovery import LEVELS, recovery_table
from fedmpi.attacks.sums import exposure_by_raters, leak_from_sum
from fedmpi.config import Config
from fedmpi.errors import ConfigError, FedmpiError
from fedmpi.files import write_json
from fedmpi.privacy.mechanism import Cut
from fedmpi.recsys.factorisation import Factorisation
from fedmpi.recsys.layout import curvature
from fedmpi.recsys.masked import Masked
from fedmpi.runtime import build

# A later round than this is not repeated: sums are as still as they get.
LATEST = 60


class Replay:
    """The rounds of a run, one after the other."""

    def __init__(self, method: Factorisation, config: Config):
        self.method, self.config = method, config
        mechanism = build.mechanism(build.Orders(config, 0.0), method)
        assert isinstance(mechanism, Cut), "a factorisation sends rows"
        self.mechanism = mechanism
        self.theta, self.round = method.initial(), 0
        self.sums: collections.deque[np.ndarray] = collections.deque(maxlen=3)  # of the last rounds

    @property
    def rows(self) -> np.ndarray:
        """What the server sends next."""
        return self.method.layout.rows(self.theta).astype(np.float64)

    def play(self, missing: int | None = None) -> np.ndarray:
        """The next round, without the party that is `missing` once its work is done; (ratings, columns) as they are sent."""
        self.round += 1
        updates = self.method.row_updates(tuple(range(self.config.run.parties)), self.theta, self.round)
        steps, _ = self.mechanism.encode_rows(updates.values)
        there = np.ones(len(steps), bool) if missing is None else self.method.train_users != missing
        total = np.zeros((self.method.layout.items, self.method.layout.width))
        np.add.at(total, updates.rows[there], steps[there])
        self.sums.append(total / self.mechanism.encoding.scale)
        self.theta = self.method.step(self.theta, self.sums[-1].reshape(-1), 1.0, None)
        return steps / self.mechanism.encoding.scale

    def state(self) -> tuple:
        return self.theta, self.round, self.method.parties.z, self.method.server_state(), tuple(self.sums)

    def back_to(self, state: tuple) -> None:
        self.theta, self.round, self.method.parties.z, server, sums = state
        self.method.load_server_state(server)
        self.sums = collections.deque(sums, maxlen=self.sums.maxlen)


class Observed:
    """Two consecutive rounds as rank 0 saw them: the rows that it sent, and what came back for every rating."""

    def __init__(self, replay: Replay):
        self.rows, self.sent, self.sums = [], [], []
        if replay.method.settings.min_raters > 1:
            replay.play()  # it only counts
        for _ in range(2):
            self.rows.append(replay.rows)
            self.sent.append(replay.play())
            self.sums.append(replay.sums[-1])
        self.step = 1.0 / replay.mechanism.encoding.scale


def audit(config: Config, parties: int, missing: int = 3) -> dict:
    """Every figure, by the name of its table; `parties`: how many the gradient attack is tried on; `missing`: for how many a
    late round is repeated without them."""
    method = build.algorithm(config)
    if not isinstance(method, Factorisation):
        raise ConfigError(f"method = {config.run.method}: only factorisation methods send gradients to attack")
    method.host(tuple(range(config.run.parties)))
    found = {"method": config.run.method, "dataset": config.data.dataset, "parties": config.run.parties}
    if isinstance(method, Masked):
        found["mask"] = mask_figures(method)
    replay = Replay(method, config)
    observed = Observed(replay)
    found["gradients"] = gradient_figures(method, observed, parties)
    found["sums"] = sum_figures(method, observed)
    # Nobody is missing in the three rounds before, nor in the one after.
    if missing and replay.round + 2 <= min(config.run.rounds, LATEST) - 1:
        found["differencing"] = differencing_figures(method, replay, missing)
    return found


def mask_figures(method: Masked) -> dict:
    """Tables 2 and 3 of the paper, and the indicator: what masked ratings show to whoever has them."""
    block, scale = method.block, method.store.scale
    within = (scale.lowest, scale.highest)
    offsets, ratings = block.train_offsets, block.train_values.astype(np.float64)
    held_out = block.test_values - method.private.test
    j, j_test = indicator(offsets, method.targets, within), indicator(block.test_offsets, held_out, within)
    ranks = ranking_table(offsets, method.targets, ratings)
    typical = int(np.median(np.diff(offsets)))
    return {
        "indicator_train": _quartiles(j),
        "indicator_held_out": _quartiles(j_test),
        "within_assumption": within_assumption(method.targets, within),
        "bound": bound_in_words(typical, method.private.parameters),
        "recovery": recovery_table(offsets, method.targets, ratings, step=scale.step).tolist(),
        "recovery_by_range_alone": recovery_table(offsets, 0 * method.targets, ratings, step=scale.step).tolist(),
        "ranking": ranks.hit.tolist(),
        "ranking_mean": ranks.mean_hit.tolist(),
        "ranking_chance": ranks.mean_chance.tolist(),
    }


def gradient_figures(method: Factorisation, observed: Observed, parties: int) -> dict:
    """MMF 2.2.2 on parties that share in the clear: the share of their ratings that is recovered to within half a step."""
    block, scale = method.block, method.store.scale
    chosen = np.linspace(0, block.parties - 1, min(parties, block.parties)).astype(int)
    true, masked, number = 0.0, 0.0, 0
    for party in np.unique(chosen):
        own = slice(block.train_offsets[party], block.train_offsets[party + 1])
        ratings = block.train_values[own].astype(np.float64)
        number += ratings.size
        try:
            recovered = attack_party(
                method, block.train_items[own], observed.rows, [sent[own] for sent in observed.sent]
            )
        except Undetermined:
            continue
        true += ratings.size * exactly_recovered(recovered, ratings, tolerance=scale.step / 2)
        masked += ratings.size * exactly_recovered(recovered, method.targets[own], tolerance=scale.step / 2)
    return {"parties": len(np.unique(chosen)), "ratings": number, "ratings_recovered": true / number} | (
        {"masked_ratings_recovered": masked / number} if isinstance(method, Masked) else {}
    )


def attack_party(
    method: Factorisation, items: np.ndarray, rows_sent: list[np.ndarray], gradients: list[np.ndarray]
) -> np.ndarray:
    """What one party's gradients of these items show, round by round: its ratings, or its masked ones."""
    layout, solver, settings = method.layout, method.solver, method.settings
    first = layout.width - layout.factors
    if layout.biased and solver.kind != "steps":
        rows, sent = rows_sent[0][items], gradients[0]
        w = np.column_stack((np.ones(len(items)), layout.q(rows)))
        penalties = solver.penalties(w.shape[1])
        if solver.kind == "posterior":
            penalties[1:] += solver.variances(layout.counts(rows)).sum()
        return leak_from_errors(w, layout.bias(rows), -sent[:, first - 1], penalties)
    regularisation = settings.item_reg if solver.kind == "steps" else 0.0
    columns = slice(first - layout.biased, None)
    seen = [Observation(rows[items][:, columns], sent[:, columns]) for rows, sent in zip(rows_sent, gradients)]
    grid = None if isinstance(method, Masked) else _grid(method)
    found = leak(seen, regularisation, None if layout.biased else grid, {0: 1.0} if layout.biased else None).ratings
    return place_on_grid(found, grid) if layout.biased and grid is not None else found


def sum_figures(method: Factorisation, observed: Observed) -> dict:
    """What secure sums show: rows that one party alone contributed to."""
    counts = method.store.rater_counts
    trained = counts >= max(1, method.least_raters)
    exposure = [
        {"raters": row.raters, "items": row.items, "ratings": row.ratings}
        for row in exposure_by_raters(np.where(trained, counts, 0))
    ]
    found = {"exposure": exposure, "min_raters": method.settings.min_raters}
    found["rows_of_one_rater"] = int(np.sum(trained & (counts == 1)))
    if method.solver.kind == "steps" and not method.layout.biased:
        columns = slice(method.layout.counted, None)
        seen = [Observation(r[:, columns], s[:, columns]) for r, s in zip(observed.rows, observed.sums)]
        grid = None if isinstance(method, Masked) else _grid(method)
        read = leak_from_sum(seen, counts, method.settings.item_reg, grid, noise=observed.step / 3)
        truth = np.zeros(len(counts))
        truth[method.block.train_items] = method.targets  # of items with one rater, its rating, or its masked one
        right = (
            exactly_recovered(read.ratings, truth[read.items], method.store.scale.step / 2) if read.items.size else 0.0
        )
        found["masked_ratings_read" if isinstance(method, Masked) else "ratings_read"] = round(right * read.items.size)
    return found


def differencing_figures(method: Factorisation, replay: Replay, missing: int) -> dict:
    """One party missing in one late round, for a few parties in turn: the share of its items and ratings in the sums of that
    round and of those beside it."""
    while replay.round + 2 < min(replay.config.run.rounds, LATEST):
        replay.play()
    before, block = replay.state(), method.block
    most_lost = method.most_lost(replay.theta)
    opened = most_lost is None or most_lost >= 1
    chosen = np.unique(np.linspace(0, block.parties - 1, min(missing, block.parties)).astype(int))
    total: collections.Counter[str] = collections.Counter()
    for party in chosen if opened else ():
        replay.back_to(before)
        total.update(_difference(method, replay, int(party)))
    number = sum(int(np.diff(block.train_offsets)[party]) for party in chosen)
    found = {"parties": len(chosen), "round": before[1] + 1, "ratings": number, "opened": opened}
    found["wrong_items"] = total["wrong_items"]
    shares = ("items_from_counts", "items_recovered", "ratings_recovered", "masked_ratings_recovered")
    return found | {name: total[name] / number for name in (shares if isinstance(method, Masked) else shares[:-1])}


def _difference(method: Factorisation, replay: Replay, party: int) -> dict[str, int]:
    """How many of the missing party's items and ratings are recovered."""
    block, layout, config = method.block, method.layout, method.config
    own = slice(block.train_offsets[party], block.train_offsets[party + 1])
    rows, quiet = replay.rows, missing_gradients(*replay.sums)[:, layout.counted :]
    before = replay.sums[-1]
    replay.play(missing=party)
    during = replay.sums[-1]
    replay.play()
    answer = 0.0
    if method.settings.optimizer == "counted":
        counts = layout.counts(rows)
        answer = config.server.server_lr * counts / curvature(counts, method.settings.item_reg)
    gradients = missing_gradients(before, during, replay.sums[-1], answer)
    items = rated_rows(gradients[:, layout.counted :], quiet)
    try:
        read = attack_party(method, items, [rows], [gradients[items]])
        if layout.biased and method.solver.kind != "steps" and not isinstance(method, Masked):
            read = level_on_grid(read, _grid(method))
    except Undetermined:
        read = np.full(len(items), np.nan)
    ratings = np.full(layout.items, np.nan)
    ratings[items] = read
    mine = block.train_items[own]
    of_counts = items_from_counts(layout.counts(before), layout.counts(during))

    def near(truth: np.ndarray) -> int:
        return int(np.sum(np.abs(ratings[mine] - truth) < method.store.scale.step / 2))

    return {
        "items_from_counts": int(np.isin(mine, of_counts).sum()),
        "items_recovered": int(np.isin(mine, items).sum()),
        "wrong_items": int((~np.isin(items, mine)).sum()),
        "ratings_recovered": near(block.train_values[own].astype(np.float64)),
        "masked_ratings_recovered": near(method.targets[own]),
    }


def _grid(method: Factorisation) -> np.ndarray:
    scale = method.store.scale
    return np.arange(scale.lowest, scale.highest + scale.step / 2, scale.step)


def _quartiles(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.nanquantile(values, (0.25, 0.5, 0.75))]


def show(found: dict, console: Console) -> None:
    console.print(f"{found['method']} on {found['dataset']}, {found['parties']} parties", highlight=False)
    if "mask" in found:
        _show_mask(found["mask"], console)
    gradients = found["gradients"]
    table = Table(title="gradients in the clear, MMF 2.2.2", title_justify="left")
    table.add_column("recovered to within half a step")
    table.add_column(f"share of {gradients['ratings']} ratings of {gradients['parties']} parties", justify="right")
    table.add_row("ratings", f"{100 * gradients['ratings_recovered']:.1f} %")
    if "masked_ratings_recovered" in gradients:
        table.add_row("masked ratings", f"{100 * gradients['masked_ratings_recovered']:.1f} %")
    console.print(table)
    sums = found["sums"]
    table = Table(title=f"secure sums, by raters of an item (min_raters {sums['min_raters']})", title_justify="left")
    for name in ("raters", "items", "ratings"):
        table.add_column(name, justify="right")
    for row in sums["exposure"]:
        table.add_row(row["raters"], str(row["items"]), str(row["ratings"]))
    console.print(table)
    line = f"{sums['rows_of_one_rater']} rows are one party's own gradient"
    for key, what in (("ratings_read", "ratings"), ("masked_ratings_read", "masked ratings")):
        if key in sums:
            line += f"; {sums[key]} {what} were read out of the sums"
    console.print(line, highlight=False)
    if "differencing" in found:
        _show_differencing(found["differencing"], console)
    else:
        console.print(
            "no late round was repeated without a party: the run is too short, or --missing 0", highlight=False
        )


def _show_differencing(found: dict, console: Console) -> None:
    table = Table(title=f"secure sums when one party misses round {found['round']}", title_justify="left")
    table.add_column("recovered by differencing")
    table.add_column(f"share of {found['ratings']} ratings of {found['parties']} parties", justify="right")
    for key, what in (
        ("items_from_counts", "items, from the counts of two rounds"),
        ("items_recovered", "items, from the sums of the rounds beside"),
        ("ratings_recovered", "ratings"),
        ("masked_ratings_recovered", "masked ratings"),
    ):
        if key in found:
            table.add_row(what, f"{100 * found[key]:.1f} %")
    console.print(table)
    console.print(
        f"{found['wrong_items']} items were taken for a missing party's and are not"
        if found["opened"]
        else "such a round ends without a sum (min_raters, rater_margin): there is nothing to compare",
        highlight=False,
    )


def _show_mask(mask: dict, console: Console) -> None:
    low, middle, high = mask["indicator_train"]
    console.print(
        f"J, quartiles over parties: {low:.4f}, {middle:.4f}, {high:.4f} on training ratings, "
        f"{mask['indicator_held_out'][1]:.4f} in the middle on held-out ones",
        highlight=False,
    )
    console.print(f"sample bound: {mask['bound']}", highlight=False, soft_wrap=True)
    for title, rows, names, extra in (
        (
            "recovery attack, MMF table 2: share of parties by recovery rate",
            mask["recovery"],
            [f"g = {g}" for g in LEVELS],
            None,
        ),
        (
            "ranking attack, MMF table 3: share of parties by hit ratio",
            mask["ranking"],
            [f"h = {h:g}" for h in TOPS],
            list(zip(mask["ranking_mean"], mask["ranking_chance"])),
        ),
    ):
        table = Table(title=title, title_justify="left")
        for name in ("", *BIN_LABELS, *(("mean", "by chance") if extra else ())):
            table.add_column(name, justify="right")
        for index, (name, row) in enumerate(zip(names, rows)):
            more = [f"{value:.2f}" for value in extra[index]] if extra else []
            table.add_row(name, *(f"{100 * share:.0f} %" for share in row), *more)
        console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fedmpi.audit", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished or running rating run")
    parser.add_argument("--parties", type=int, default=200, help="parties whose clear gradients are attacked")
    parser.add_argument(
        "--missing", type=int, default=3, help="parties for which a late round is repeated without them; 0: none"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    try:
        found = audit(build.load_config(options.run), options.parties, options.missing)
        if options.json:
            write_json(options.json, found)
    except FedmpiError as error:
        print(f"fedmpi: {error}", file=sys.stderr)
        return 2
    show(found, Console(width=110))
    return 0


if __name__ == "__main__":
    sys.exit(main())
