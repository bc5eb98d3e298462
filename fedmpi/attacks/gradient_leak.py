"""Ratings out of the gradients of one party, MMF 2.2.2: what plain federated matrix factorisation gives away.

The server sent Q and received for each item i that party u rated

    eta_i = lambda q_i - e_i p,    e_i = r_i - q_i . p        MMF (5), (6)

so lambda q_i - eta_i = e_i p: every row is a multiple of the party's factors p. Their direction d and the multiples
a_i are at once known; p = c d with a single unknown number c, and

    r_i(c) = a_i / c + c q_i . d

Whatever tells c tells every rating of the party. Three things do, each enough alone:

    rounds   ratings do not change, so r_i(c_1) of one round equals r_i(c_2) of another for every item: two unknowns, as
             many equations as ratings. How the party moved p in between does not matter, MMF (7) or anything else; that
             it moved does.
    grid     ratings are on a known grid (1, 2, ... 5), and only the right c puts all of them there. One round will do.
    fixed    some coordinate of p has a known value: an item bias in Q stands beside a constant 1 in p. One round will
             do, for any number of ratings.

Gradients do not change when p and all ratings change their sign, so that without `grid` and `fixed` the ratings come
with an unknown common sign. True ratings are positive, so there it does not matter. Of FedMMF in the clear the same
function gives the masked ratings; their mean is about zero and the sign a guess, unless the private model shrinks its
constant and leaves them a positive mean. What masked ratings in turn say about ratings: `recovery`, `ranking`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpi.attacks.parties import Floats
from fedmpi.errors import DataError, FedmpiError

# Scales tried: errors from a millionth to a million times the predictions.
_DECADES = 3.0
_COARSE = 121
_FINE = 6001
_STARTS = 12
_GRID_STARTS = 40
_GLANCE = 6  # steps of refinement that tell which starts are worth more
_SCAN_ITEMS = 256  # of a party's ratings, looked at to rank the scales; all of them decide in the end

# A relative error of the scale beyond which the ratings are not worth the name.
_HOPELESS = 0.3


class Undetermined(FedmpiError):
    """The observations do not determine the ratings: too few of them, or nothing in them."""


@dataclass(frozen=True)
class Observation:
    """One round of one party as the server sees it: the rows of Q that it sent and the gradients that came back, both
    (ratings, k), in the same order of items in every round."""

    q_rows: Floats
    gradients: Floats


@dataclass(frozen=True)
class Direction:
    """lambda q_i - eta_i = multiples[i] * unit, up to noise; both known up to a common sign."""

    unit: Floats
    multiples: Floats
    purity: float  # how much of the square is explained by one direction; 1 is all
    noise: float  # root mean square of what is not explained, an entry


@dataclass(frozen=True)
class Leak:
    ratings: Floats
    factors: Floats  # p of each round, (rounds, k); NaN for a round that said nothing
    residual: float  # root mean square disagreement of the rounds about the ratings, in rating units; 0 for one round
    misfit: float  # root mean square distance to the grid; NaN without one
    scale_error: float  # the relative error of p that noise in the multiples explains; more if errors are tiny
    sign_known: bool  # False: the ratings may be the negatives of these, which have a positive mean


def factor_direction(observation: Observation, regularisation: float | Floats) -> Direction:
    """The direction of the party's factors from one round. `regularisation` is lambda, or one for each column."""
    q_rows, gradients = checked(observation)
    rows = np.asarray(regularisation, dtype=np.float64) * q_rows - gradients
    largest = np.abs(rows).max(initial=0.0)
    # What is left of a difference of equal numbers is their rounding, not a direction.
    if not largest > 1e-12 * max(np.abs(gradients).max(initial=0.0), np.finfo(float).tiny):
        raise Undetermined("every error of the party is zero: its gradients say nothing about its factors")
    _, sizes, directions = np.linalg.svd(rows / largest, full_matrices=False)
    unit = directions[0]
    energy = np.square(sizes)
    free = max((rows.shape[0] - 1) * (rows.shape[1] - 1), 1)
    noise = float(np.sqrt(energy[1:].sum() / free))
    # The largest singular value of noise alone is about noise (sqrt(ratings) + sqrt(k)).
    if sizes[0] < 2.0 * noise * (np.sqrt(rows.shape[0]) + np.sqrt(rows.shape[1])):
        raise Undetermined("the gradients of the party have no common direction: there is only noise beside lambda Q")
    noise *= largest
    return Direction(unit, rows @ unit, float(energy[0] / energy.sum()), noise)


def checked(observation: Observation) -> tuple[Floats, Floats]:
    q_rows = np.asarray(observation.q_rows, dtype=np.float64)
    gradients = np.asarray(observation.gradients, dtype=np.float64)
    if q_rows.ndim != 2 or q_rows.shape != gradients.shape:
        raise DataError(f"item factors of shape {q_rows.shape} do not go with gradients of shape {gradients.shape}")
    if not (np.isfinite(q_rows).all() and np.isfinite(gradients).all()):
        raise DataError("an observation holds numbers that are not finite")
    return q_rows, gradients


def leak(
    observations: Sequence[Observation],
    regularisation: float | Floats,
    grid: Floats | None = None,
    fixed: Mapping[int, float] | None = None,
) -> Leak:
    """The party's ratings, from one or more rounds of its gradients.

    `grid`: the values that a rating may have; None for masked ratings. If predictions have a known constant added,
    subtract it from the grid. `fixed`: coordinates of p with a known value, as {0: 1.0} where column 0 of Q is the item
    bias. The ratings are answered as estimated, not moved to the grid.
    """
    rounds = _Rounds(observations, regularisation)
    grid = None if grid is None else np.unique(np.asarray(grid, dtype=np.float64))
    if fixed:
        return rounds.conclude(rounds.scales_from_fixed(fixed), grid, fixed=True)
    several = len(rounds.of) > 1
    if rounds.items < 3:
        raise Undetermined(f"{rounds.items} ratings do not determine the scale of the factors: at least 3 do")
    if not several and grid is None:
        raise Undetermined("one round of gradients does not determine the scale of the factors: two do, or a grid")
    candidates = rounds.agreeing() if several else []
    if grid is None:
        found = rounds.conclude(min(candidates, key=rounds.disagreement), None)
        if not found.scale_error < _HOPELESS:
            raise Undetermined("the rounds are too much alike: their gradients agree with any scale of the factors")
        return found
    # A scale near enough for the rounds may be off by more than the grid forgives, and the other way round.
    candidates = [sign * scales for scales in candidates for sign in (1.0, -1.0)] + rounds.starts_from_grid(grid)
    if not candidates:
        raise Undetermined("no scale of the factors puts the ratings anywhere near the grid")
    candidates = [rounds.snap(scales, grid) for scales in candidates]
    return rounds.conclude(min(candidates, key=lambda scales: rounds.off_grid(scales, grid)), grid)


class _Rounds:
    """The rounds of one party, reduced to what depends on the scales: r_t(c_t) = multiples_t / c_t + c_t spans_t.

    The noise of the multiples is the same in every round, that of the ratings is divided by the scale. Distances between
    ratings are therefore measured times the scale, in units of gradients: ratings that a large scale makes look precise,
    because it leaves no room for errors, are not favoured.
    """

    def __init__(self, observations: Sequence[Observation], regularisation: float | Floats):
        if not observations:
            raise Undetermined("there is no round to look at")
        if len({np.shape(observation.q_rows) for observation in observations}) > 1:
            raise DataError("the rounds of a party must hold the same items and as many factors")
        seen = []
        for t, observation in enumerate(observations):
            try:
                seen.append((t, np.asarray(observation.q_rows), factor_direction(observation, regularisation)))
            except Undetermined:
                if t + 1 == len(observations) and not seen:
                    raise
        # The clearest round comes first: the others are fitted to it.
        seen.sort(key=lambda one: one[2].purity, reverse=True)
        self.of, self.among = [t for t, _, _ in seen], len(observations)
        self.units = np.stack([direction.unit for _, _, direction in seen])
        self.multiples = np.stack([direction.multiples for _, _, direction in seen])
        self.noise = float(np.sqrt(np.mean([direction.noise**2 for _, _, direction in seen])))
        self.spans = np.stack([q_rows @ direction.unit for _, q_rows, direction in seen]).astype(np.float64)
        self.items = self.multiples.shape[1]
        sizes = np.linalg.norm(self.spans, axis=1)
        if not np.all(sizes > 0.0):
            raise Undetermined("the item factors are at right angles to the party's: its predictions are all zero")
        # Where errors and predictions are equally large; scans are centred there.
        self.balance = np.sqrt(np.linalg.norm(self.multiples, axis=1) / sizes)

    def ratings(self, scales: Floats) -> Floats:
        """What each round says the ratings are, (rounds, items)."""
        return self.multiples / scales[:, None] + scales[:, None] * self.spans

    def merged(self, scales: Floats) -> Floats:
        """The mean over the rounds, weighted with the squares of the scales."""
        return (scales @ self.multiples + scales**3 @ self.spans) / (scales @ scales)

    def off(self, scales: Floats, ratings: Floats) -> Floats:
        """What the rounds say minus the given ratings, in units of gradients."""
        return self.multiples + scales[:, None] * (scales[:, None] * self.spans - ratings)

    def distance(self, scales: Floats, ratings: Floats) -> float:
        off = self.off(scales, ratings).ravel()
        return float(np.sqrt(off @ off / off.size))

    def disagreement(self, scales: Floats) -> float:
        return self.distance(scales, self.merged(scales))

    def off_grid(self, scales: Floats, grid: Floats) -> float:
        """Of the rounds from each other and from the grid, in one."""
        return self.distance(scales, _nearest(grid, self.merged(scales)))

    def scales_from_fixed(self, fixed: Mapping[int, float]) -> Floats:
        where = np.fromiter(fixed.keys(), dtype=np.int64)
        value = np.fromiter(fixed.values(), dtype=np.float64)
        known = self.units[:, where]
        square = np.square(known).sum(axis=1)
        if not np.all(square > 0.0) or not np.any(value):
            raise Undetermined("the fixed coordinates are zero in the direction of the factors: they give no scale")
        found: Floats = known @ value / square
        return found

    def follow(self, ratings: Floats, t: int, near: float | None = None) -> float:
        """The scale of round t that comes closest to the given ratings; if `near` is given, the one next to it."""
        a, s = self.multiples[t], self.spans[t]
        # Half the derivative of |a + c^2 s - c r|^2.
        cubic = (
            2.0 * float(s @ s),
            -3.0 * float(s @ ratings),
            float(2.0 * (a @ s) + ratings @ ratings),
            -float(a @ ratings),
        )
        if near is not None:
            for _ in range(8):
                value = ((cubic[0] * near + cubic[1]) * near + cubic[2]) * near + cubic[3]
                slope = (3.0 * cubic[0] * near + 2.0 * cubic[1]) * near + cubic[2]
                reach = 0.1 * abs(near)  # never as far as the other sign
                near -= min(max(value / slope, -reach), reach) if slope > 0.0 else 0.0
            return near
        roots = np.roots(cubic)
        real = roots.real[(np.abs(roots.imag) <= 1e-6 * np.abs(roots)) & (roots.real != 0.0)]
        return float(min(real, key=lambda c: np.sum(np.square(a + c * (c * s - ratings))), default=self.balance[t]))

    def agreeing(self) -> list[Floats]:
        """Scales at which the rounds disagree least, locally; the best few."""
        found = [self._refine(start, _GLANCE) for start in self._starts_from_rounds()]
        return [self._refine(scales, 60) for scales in sorted(found, key=self.disagreement)[:3]]

    def _starts_from_rounds(self) -> list[Floats]:
        steps = np.logspace(-_DECADES, _DECADES, _COARSE)
        first = self.balance[0] * steps[:, None]
        second = np.broadcast_to(self.balance[1] * np.concatenate([steps, -steps]), (_COARSE, 2 * _COARSE))
        # For every scale of the first round the best of the second. The more the rounds are alike, the narrower is the
        # valley: look closer and closer.
        for width in (1.0, 0.1, 1e-2, 1e-3, 1e-4, 0.0):
            table = self._first_two(first, second)
            best = np.argmin(table, axis=1)[:, None]
            second = np.take_along_axis(second, best, axis=1) * (steps[1] / steps[0]) ** np.linspace(-width, width, 21)
        profile = np.take_along_axis(table, best, axis=1)[:, 0]
        starts = []
        for i in _lowest_valleys(profile, _STARTS):
            scales = np.array([first[i, 0], second[i, 0], *self.balance[2:]])
            middle = self.ratings(scales)[:2].mean(axis=0)
            scales[2:] = [self.follow(middle, t) for t in range(2, len(scales))]
            starts.append(scales)
        return starts

    def _first_two(self, first: Floats, second: Floats) -> Floats:
        """The squared disagreement of the first two rounds at many scales, from products that are the same for all."""
        columns = np.stack([self.multiples[0], self.spans[0], self.multiples[1], self.spans[1]])
        p = columns @ columns.T
        one, two, ratio = np.square(first), np.square(second), first / second
        squares = p[0, 0] / one + 2.0 * p[0, 1] + p[1, 1] * one + p[2, 2] / two + 2.0 * p[2, 3] + p[3, 3] * two
        squares = squares - 2.0 * (
            p[0, 2] / (first * second) + p[0, 3] / ratio + p[1, 2] * ratio + p[1, 3] * first * second
        )
        found: Floats = squares / (1.0 / one + 1.0 / two)
        return found

    def _slopes(self, scales: Floats, ratings: Floats) -> Floats:
        """What a relative change of each scale does to its round's distance from the given ratings."""
        return 2.0 * np.square(scales)[:, None] * self.spans - scales[:, None] * ratings

    def _normal(self, scales: Floats, ratings: Floats, free: bool) -> Floats:
        slopes = self._slopes(scales, ratings)
        normal: Floats = slopes @ slopes.T
        if free:
            # The ratings give way: what all rounds do in proportion to their scales costs nothing.
            normal *= np.eye(len(scales)) - np.outer(scales, scales) / np.sum(np.square(scales))
        else:
            normal *= np.eye(len(scales))
        return normal

    def _refine(self, scales: Floats, steps: int) -> Floats:
        # Gauss-Newton on the logarithms of the scales, the ratings eliminated.
        current, damping, tiny = self.disagreement(scales), 1e-6, np.finfo(float).tiny
        for _ in range(steps):
            merged = self.merged(scales)
            normal = self._normal(scales, merged, free=True)
            pull = np.sum(self._slopes(scales, merged) * self.off(scales, merged), axis=1)
            while True:
                step = -np.linalg.solve(normal + np.diag(damping * np.diag(normal) + tiny), pull)
                proposed = scales * np.exp(np.clip(step, -0.5, 0.5))
                reached = self.disagreement(proposed)
                if reached < current:
                    break
                damping *= 10.0
                if damping > 1e6:
                    return scales
            scales, current, damping = proposed, reached, max(damping / 30.0, 1e-10)
            if np.abs(step).max() < 1e-10:
                break
        return scales

    def starts_from_grid(self, grid: Floats) -> list[Floats]:
        """Scales at which the ratings of the clearest round lie near the grid, from a fine scan."""
        some = np.linspace(0, self.items - 1, min(self.items, _SCAN_ITEMS)).astype(np.int64)
        a, s = self.multiples[0, some], self.spans[0, some]
        positive = self.balance[0] * np.logspace(-_DECADES, _DECADES, _FINE)
        scales = np.concatenate([positive, -positive])
        mean = a.mean() / scales + scales * s.mean()
        square = np.square(a).mean() / scales**2 + 2.0 * (a * s).mean() + scales**2 * np.square(s).mean()
        # Only where the mean and the size of the ratings are those of ratings.
        slack = 0.02 * np.abs(grid).max()
        allowed = (mean >= grid[0] - slack) & (mean <= grid[-1] + slack)
        scales = scales[allowed & (square <= (np.abs(grid).max() + slack) ** 2)]
        ratings = a / scales[:, None] + scales[:, None] * s
        off = np.square(scales) * np.square(ratings - _nearest(grid, ratings)).mean(axis=1)
        starts = []
        for first in scales[_lowest_valleys(off, _GRID_STARTS)]:
            guess = _nearest(grid, self.multiples[0] / first + first * self.spans[0])
            starts.append(np.array([first, *(self.follow(guess, t) for t in range(1, len(self.units)))]))
        return starts

    def snap(self, scales: Floats, grid: Floats) -> Floats:
        """Move the ratings to the grid, take the scales that come closest, and again, until nothing moves."""
        before = None
        for _ in range(20):
            snapped = _nearest(grid, self.merged(scales))
            if before is not None and np.array_equal(snapped, before):
                break
            scales = np.array([self.follow(snapped, t, near=c) for t, c in enumerate(scales.tolist())])
            before = snapped
        return scales

    def conclude(self, scales: Floats, grid: Floats | None, fixed: bool = False) -> Leak:
        merged = self.merged(scales)
        sign_known = fixed or grid is not None
        if not sign_known and merged.mean() < 0.0:
            scales, merged = -scales, -merged
        factors = np.full((self.among, self.units.shape[1]), np.nan)
        factors[self.of] = scales[:, None] * self.units
        residual = np.sqrt(np.mean(np.square(self.ratings(scales) - merged))) if len(scales) > 1 else 0.0
        misfit = np.nan if grid is None else np.sqrt(np.mean(np.square(merged - _nearest(grid, merged))))
        noise = max(self.noise, self.disagreement(scales), 1e-13 * float(np.abs(self.multiples).max()))
        normal = self._normal(scales, merged, free=not sign_known)
        weakest = max(float(np.linalg.eigvalsh(normal)[0]), 0.0)
        error = noise / np.sqrt(weakest) if weakest > 1e-24 * np.trace(normal) else np.inf
        return Leak(merged, factors, float(residual), float(misfit), float(error), sign_known)


def _nearest(grid: Floats, values: Floats) -> Floats:
    return grid[np.searchsorted((grid[1:] + grid[:-1]) / 2.0, values)]


def _lowest_valleys(profile: Floats, at_most: int) -> NDArray[np.intp]:
    """Where the profile is lower than on both sides, the lowest first."""
    padded = np.concatenate([[np.inf], profile, [np.inf]])
    valleys = np.flatnonzero((profile <= padded[:-2]) & (profile <= padded[2:]))
    return valleys[np.argsort(profile[valleys], kind="stable")][:at_most]


def place_on_grid(ratings: Floats, grid: Floats) -> Floats:
    """Ratings that are known up to a common constant, moved to an evenly spaced grid.

    Where predictions hold a bias of the party, which the server never sees a gradient of, `leak` with `fixed` on the
    other columns is off by that constant. The grid gives it up to whole steps. The party's highest rating is taken for
    the top of the grid: right for whoever gave the top mark once, too high by some steps for everybody else.
    """
    ratings, grid = np.asarray(ratings, dtype=np.float64), np.unique(np.asarray(grid, dtype=np.float64))
    if grid.size < 2 or not np.allclose(np.diff(grid), grid[1] - grid[0]):
        raise DataError("ratings can only be placed on a grid of at least two values, evenly spaced")
    if not ratings.size:
        return np.empty(0)
    step = grid[1] - grid[0]
    turns = (ratings - grid[0]) / step
    # Between two steps the constant goes round in a circle: the mean direction is it.
    turns -= np.angle(np.mean(np.exp(2j * np.pi * turns))) / (2.0 * np.pi)
    found: Floats = grid[-1] + step * (turns - np.rint(turns.max()))
    return found


def exactly_recovered(
    found: Leak | Floats, ratings: Floats, tolerance: float = 0.5, either_sign: bool = False
) -> float:
    """The share of ratings that were recovered to within `tolerance`; half a step of the scale is enough to name them.
    `either_sign`: of the two signs that the observer cannot tell apart, take the right one."""
    guess = found.ratings if isinstance(found, Leak) else np.asarray(found, dtype=np.float64)
    ratings = np.asarray(ratings, dtype=np.float64)
    if guess.shape != ratings.shape:
        raise DataError(f"{guess.size} recovered ratings cannot be compared with {ratings.size}")
    if not ratings.size:
        return float("nan")
    shares = [float(np.mean(np.abs(sign * guess - ratings) < tolerance)) for sign in (1.0, -1.0)]
    return max(shares) if either_sign else shares[0]
