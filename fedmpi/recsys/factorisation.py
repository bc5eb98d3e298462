"""Federated matrix factorisation over the parties' ratings, or over what a mask leaves of them. MMF algorithm 2."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from fedmpi.algorithm import RowUpdates
from fedmpi.config import Count, CountOrZero, NonNegative, Positive, Range
from fedmpi.errors import ConfigError
from fedmpi.privacy.mechanism import ExactRows
from fedmpi.recsys.base import RatingMethod
from fedmpi.recsys.factors import Parties, Solver, predict
from fedmpi.recsys.layout import COUNT, Layout, curvature
from fedmpi.recsys.private import item_features
from fedmpi.recsys.steps import Adam, Counted, Sgd, StepSettings

# Steps before the attributes are listened to: by then the factors say something that can be regressed.
PRIOR_FROM = 4


class Factorisation(RatingMethod):
    @dataclass(frozen=True)
    class Settings(StepSettings, RatingMethod.Settings):
        momentum: Annotated[float, Range(least=0, most=0.99)] = 0.5
        """optimizer counted"""
        factors: Count = 20
        """k, latent factors"""
        item_bias: bool = True
        """items have a shared bias beside their factors, and parties a private offset"""
        party_solver: Literal["steps", "ridge", "posterior"] = "posterior"
        """p_u by gradient steps as printed, MMF (7); exactly; or exactly and with its uncertainty in the gradients"""
        party_steps: Count = 2
        """party_solver steps: how many in a round"""
        party_lr: Positive = 0.5
        """party_solver steps: rate of a step over the party's mean gradient"""
        party_reg: NonNegative = 0.9
        """lambda of p_u; under posterior the variance of a rating's noise"""
        offset_reg: NonNegative = 1.0
        """lambda of a party's offset"""
        item_reg: NonNegative = 60.0
        """lambda of q_i; under steps a share of every rating's gradient as printed, MMF (6), otherwise once an item"""
        bias_reg: NonNegative = 2.0
        """lambda of an item's bias"""
        factor_start: NonNegative = 0.1
        """spread of q_i before round 1 (and of p_u, under steps)"""
        factor_mean: float = 0.0
        """mean of q_i before round 1 (and of p_u, under steps); raw ratings without biases want sqrt(3.5 / k)"""
        min_raters: CountOrZero = 0
        """items with fewer raters are not trained; above 1, the first round only counts them"""
        rater_margin: CountOrZero = 0
        """min_raters: parties that a round may lose; items with fewer than min_raters + this raters are not trained, and a
        round that loses more ends without a sum"""
        item_prior: bool = False
        """the server pulls item factors and biases to what public item attributes predict of them, not to zero; not in the
        paper"""

    settings: Settings

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        settings, server = self.settings, config.server
        if server.denominator != "none":
            raise ConfigError(f"denominator = {server.denominator}: {config.run.method} adds gradients up; take none")
        self._check_raters()
        counted = settings.optimizer == "counted" or settings.min_raters > 1
        self.layout = Layout(store.num_items, settings.factors, counted, settings.item_bias)
        self.sends = ExactRows(self.layout.width)
        self.solver = Solver(
            settings.party_solver,
            settings.party_reg,
            settings.offset_reg,
            settings.item_reg,
            settings.party_steps,
            settings.party_lr,
            settings.item_bias,
        )
        # Where item biases start and are pulled to; masked ratings have no mean to speak of.
        self.start = settings.rating_centre if settings.item_bias and self.unmasked else 0.0
        self.steps_done = 0
        self.optimizer = {
            "sgd": lambda: Sgd(server.server_lr),
            "adam": lambda: Adam(server.server_lr),
            "counted": lambda: Counted(server.server_lr, settings.momentum, settings.item_reg),
        }[settings.optimizer]()

    def _check_raters(self) -> None:
        """min_raters is about the raters in every sum that is opened: what could leave fewer there is refused."""
        config, least, margin = self.config, self.settings.min_raters, self.settings.rater_margin
        if margin and least <= 1:
            raise ConfigError(f"rater_margin = {margin}: means nothing without min_raters above 1")
        if least > 1 and config.privacy.sampling < 1:
            raise ConfigError(
                f"min_raters = {least}: needs sampling 1, not {config.privacy.sampling:g}: a sampled cohort has fewer raters "
                "of an item than were counted"
            )
        if least > 1 and config.aggregation.aggregation == "hybrid":
            raise ConfigError(
                f"min_raters = {least}: not with aggregation hybrid, whose hidden sums have fewer raters of an item than were "
                "counted; take secure"
            )

    @property
    def dimension(self) -> int:
        return self.layout.dimension

    def initial(self) -> np.ndarray:
        layout, settings = self.layout, self.settings
        rows = np.zeros((layout.items, layout.width))
        layout.bias(rows)[:] = self.start
        drawn = self.rng("initial").standard_normal((layout.items, layout.factors))
        layout.q(rows)[:] = settings.factor_mean + settings.factor_start * drawn
        return rows.astype(np.float32).reshape(-1)

    # ---- what a mask changes ----

    unmasked = True

    def fit_private_models(self) -> None:
        """Before the first round: MMF algorithm 2, lines 4 to 8. Sets `targets`, the ratings or what a mask leaves of them,
        and `test_mask`."""
        self.targets = self.block.train_values.astype(np.float64)
        self.test_mask = np.zeros(len(self.block.test_values))

    # ---- the round ----

    def host(self, parties):
        super().host(parties)
        self.fit_private_models()
        start = np.zeros((self.block.parties, self.layout.factors))
        if self.solver.kind == "steps":
            settings = self.settings
            for index, party in enumerate(parties):
                drawn = self.rng("factors", party).standard_normal(self.layout.factors)
                start[index] = settings.factor_mean + settings.factor_start * drawn
        self.parties = Parties(self.layout, self.solver, self.block.train_offsets, self.block.train_items, start)

    def row_updates(self, parties, theta, round):
        rows = self.layout.rows(theta)
        before = self.parties.z
        values, errors = self.parties.gradients(rows, self.targets)
        self._hold_back(rows, values)
        figures, counts, items = (
            self.training_figures(errors),
            np.diff(self.block.train_offsets),
            self.block.train_items,
        )
        if len(parties) < self.block.parties:
            local = self.local(parties)
            away = np.setdiff1d(np.arange(self.block.parties), local)
            self.parties.z[away] = before[away]  # who was not asked did nothing
            chosen = np.isin(self.train_users, local)
            figures, counts, items, values = figures[local], counts[local], items[chosen], values[chosen]
        return RowUpdates(parties, counts, items.astype(np.int64), values, figures)

    def _hold_back(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Raters are counted once. min_raters: the sum over few raters shows them, so they send no gradient, and before
        raters are counted nobody does."""
        if self.layout.counted and not self.layout.counting(rows):
            values[:, COUNT] = 0.0
        if self.least_raters:
            few = self.layout.counts(rows) < self.least_raters
            values[few[self.block.train_items], 1:] = 0.0

    @property
    def least_raters(self) -> int:
        """An item's raters, as they were counted, below which it is not trained; 0: every item is."""
        settings = self.settings
        return settings.min_raters + settings.rater_margin if settings.min_raters > 1 else 0

    def most_lost(self, theta):
        """min_raters: of c raters at least c - lost are in a sum that lost so many. The sum that counts them holds no
        gradient and may lose anybody: what it counts is a lower bound."""
        held = self.least_raters and not self.layout.counting(self.layout.rows(theta))
        return self.settings.rater_margin if held else None

    def step(self, theta, total, rate, support):
        layout, settings = self.layout, self.settings
        rows = layout.rows(theta).astype(np.float64)
        summed = total.reshape(rows.shape)
        counting = layout.counting(rows)
        counts = layout.counts(summed if counting else rows) if layout.counted else None
        if not (counting and self.least_raters):
            gradient = summed[:, layout.counted :].copy()
            if self.solver.kind != "steps":  # there the regularisation is in what the parties send
                self.steps_done += 1
                q, b = self.pulled_to(rows, counts)
                gradient[:, -layout.factors :] += settings.item_reg * (layout.q(rows) - q)
                if layout.biased:
                    gradient[:, 0] += settings.bias_reg * (layout.bias(rows) - b)
            rows[:, layout.counted :] = self.optimizer.step(rows[:, layout.counted :], gradient, counts)
        if layout.counted:
            rows[:, COUNT] = counts
        return rows.astype(np.float32).reshape(-1)

    def pulled_to(self, rows: np.ndarray, counts: np.ndarray | None) -> tuple[np.ndarray | float, np.ndarray | float]:
        """(q, b) that regularisation pulls to: nothing and the middle of the scale; or, with `item_prior`, what the
        server's ridge regression on public attributes and on the number of raters predicts of the item."""
        if not self.settings.item_prior or counts is None or self.steps_done <= PRIOR_FROM:
            return 0.0, self.start
        log = np.log1p(counts)
        log = (log - log.mean()) / max(log.std(), 1e-9)
        x = np.column_stack((np.ones(len(log)), item_features(self.store), log, np.square(log) - 1))
        settings = self.settings
        q = _smooth(x[:, 1:], counts / curvature(counts, settings.item_reg), self.layout.q(rows))
        b = _smooth(x, counts / curvature(counts, settings.bias_reg), self.layout.bias(rows)[:, None])[:, 0]
        return q, b

    def predictions(self, theta):
        rows = self.layout.rows(theta)
        return predict(self.layout, rows, self._factors(rows), self.test_users, self.block.test_items) + self.test_mask

    def _factors(self, rows: np.ndarray) -> np.ndarray:
        """The exact factors for the model at hand; as printed, the ones that the last round left."""
        return self.parties.z if self.solver.kind == "steps" else self.parties.solve(rows, self.targets)

    # ---- what a finished run leaves ----

    def shared_arrays(self, theta):
        layout, rows = self.layout, self.layout.rows(theta)
        found = {"item_factors": layout.q(rows)}
        if layout.biased:
            found["item_bias"] = layout.bias(rows)
        return found | {"raters": layout.counts(rows)} if layout.counted else found

    def own_parts(self, parties, theta, round):
        return {"factors": self._factors(self.layout.rows(theta))[self.local(parties)]}

    # ---- state ----

    def states(self, parties):
        return {"factors": self.parties.z[self.local(parties)]}

    def load_states(self, parties, stacked):
        self.parties.z[self.local(parties)] = stacked["factors"]

    def server_state(self):
        return self.optimizer.state() | {"steps_done": np.array(self.steps_done)}

    def load_server_state(self, state):
        self.steps_done = int(state["steps_done"])
        self.optimizer.load({name: values for name, values in state.items() if name != "steps_done"})


def _smooth(x: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What a weighted ridge regression of `values` on x predicts."""
    weighted = x * weights[:, None]
    return x @ np.linalg.solve(weighted.T @ x + np.eye(x.shape[1]), weighted.T @ values)
