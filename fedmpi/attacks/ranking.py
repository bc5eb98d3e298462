"""The ranking attack, MMF 4.2.2 and table 3: take the items with the highest masked ratings for the best-liked ones.

The observer marks the top proportion h of a party's items by masked rating. The hit ratio is the share of the marked
items that are in the true top h by rating.

Ratings have few values, so the border of the true top h usually runs through a tie, and MMF does not say who is in:

    inclusive   every item rated as high as the last one that fits. No item that the party liked as much as one in the
                set counts as a miss, so the attacker never looks worse than it is. The default.
    random      exactly the top h; the tied items share the places that are left, and the ratio is the expected one.

Marked items that tie at the border are always dealt with in the second way: the attacker has to pick.

A ranking that knows nothing also hits: with h = 0.9 at least nine times in ten. What it reaches, the size of the true
set over the number of items, is given beside every hit ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedmpi.attacks.parties import Floats, Ints, layout, reduce_by_party, shares_by_bin
from fedmpi.errors import ConfigError

TOPS = (0.1, 0.3, 0.5, 0.7, 0.9)
TIES = ("inclusive", "random")


@dataclass(frozen=True)
class HitRatios:
    """(tops, parties); NaN for a party without ratings."""

    hit: Floats
    chance: Floats


@dataclass(frozen=True)
class RankingTable:
    """A row for each h: the proportion of parties in each of the five bins, and the mean over parties."""

    tops: tuple[float, ...]
    hit: Floats
    chance: Floats
    mean_hit: Floats
    mean_chance: Floats


def hit_ratios(
    offsets: Ints,
    masked: Floats,
    ratings: Floats,
    tops: Sequence[float] = TOPS,
    ties: str = "inclusive",
) -> HitRatios:
    """The hit ratio of every party at every top proportion, and that of a random ranking. The top h of n items are the
    first ceil(h n)."""
    if ties not in TIES:
        raise ConfigError(f"rule for ties {ties!r}: must be one of {', '.join(TIES)}")
    if not all(0.0 < top <= 1.0 for top in tops):
        raise ConfigError(f"top proportions {tuple(tops)}: must be above 0 and at most 1")
    offsets, masked, ratings = layout(offsets, masked, ratings)
    counts = np.diff(offsets)
    some = counts > 0
    by_mask, by_rating = _sorted_by_party(offsets, masked), _sorted_by_party(offsets, ratings)
    hit = np.full((len(tops), counts.size), np.nan)
    chance = np.full((len(tops), counts.size), np.nan)
    for row, top in enumerate(tops):
        # 0.3 * 10 is a little above 3 in floating point; the top three tenths of ten items are three.
        places = np.ceil(top * counts - 1e-9).astype(np.int64)
        marked = _membership(offsets, masked, by_mask, places, shared=True)
        high = _membership(offsets, ratings, by_rating, places, shared=ties == "random")
        hits = reduce_by_party(np.add, offsets, marked * high, 0.0)
        hit[row, some] = hits[some] / places[some]
        chance[row, some] = reduce_by_party(np.add, offsets, high, 0.0)[some] / counts[some]
    return HitRatios(hit, chance)


def _sorted_by_party(offsets: Ints, values: Floats) -> Floats:
    # Sorting each short piece in place beats one sort by (party, value) of everything by an order of magnitude.
    ordered = values.copy()
    bounds = offsets.tolist()
    for first, last in zip(bounds, bounds[1:]):
        ordered[first:last].sort()
    found: Floats = ordered
    return found


def _membership(offsets: Ints, values: Floats, ordered: Floats, places: Ints, shared: bool) -> Floats:
    """How far each item belongs to the top `places` of its party: 1, 0, or for items that tie at the border 1 or, if
    the places are shared, the probability of getting one."""
    counts = np.diff(offsets)
    border = np.zeros(counts.size)
    some = counts > 0
    border[some] = ordered[offsets[1:][some] - places[some]]
    border = np.repeat(border, counts)
    if not shared:
        return (values >= border).astype(np.float64)
    above = values > border
    tied = values == border
    left = places - reduce_by_party(np.add, offsets, above.astype(np.int64), 0)
    part = left / np.maximum(reduce_by_party(np.add, offsets, tied.astype(np.int64), 0), 1)
    return np.where(tied, np.repeat(part, counts), above)


def ranking_table(
    offsets: Ints,
    masked: Floats,
    ratings: Floats,
    tops: Sequence[float] = TOPS,
    ties: str = "inclusive",
) -> RankingTable:
    """MMF table 3, with the same table for a random ranking. Parties without ratings are left out."""
    ratios = hit_ratios(offsets, masked, ratings, tops, ties)
    some = np.diff(np.asarray(offsets, dtype=np.int64)) > 0
    hit, chance = ratios.hit[:, some], ratios.chance[:, some]
    ones = np.ones(hit.shape[1])
    return RankingTable(
        tuple(tops),
        np.stack([shares_by_bin(row, ones) for row in hit]),
        np.stack([shares_by_bin(row, ones) for row in chance]),
        hit.mean(axis=1),
        chance.mean(axis=1),
    )
