"""Ratings drawn from a known model: no files, any size, and the error of the best possible prediction is known.

    r_ui = clip(round(mu + b_u + b_i + g_u . genre_i + p_u . q_i + noise))

for user u and item i: a common mean mu, how high u rates (b_u) and i is rated (b_i), u's taste g_u for the genres of i, and
hidden factors p_u and q_i. g_u is the taste of the user's group plus the user's own, so profile and attributes both tell
something. A few users rate much, most little (five ratings at least), and a few items are rated by many. The hidden
parameters depend on `data_seed` alone; a run's seed only decides the split.
"""

from __future__ import annotations

import numpy as np

from fedmpi.data.prepared import keyed_rng
from fedmpi.data.ratings.features import one_hot
from fedmpi.data.ratings.source import RatingSet, Scale
from fedmpi.errors import ConfigError

#: Fewest ratings of a user.
FEWEST = 5

_GENRES = 8
_GROUPS = 5
_MEAN = 3.5
_BIAS_SD = 0.4
_GROUP_TASTE_SD = 0.3
_OWN_TASTE_SD = 0.4
_FACTORS_SD = 0.4  # of p_u . q_i
_TAIL_SD = 1.0  # of the logarithm of a user's share of the ratings
_CHUNK = 256  # users drawn from one generator


def generate_ratings(
    *, users: int, items: int, ratings: int, rank: int, noise: float, data_seed: int, scale: Scale
) -> RatingSet:
    def rng(*purpose: object) -> np.random.Generator:
        return keyed_rng(data_seed, "generated", *purpose)

    draw = rng("items")
    # one to three genres an item; the vector has length 1, so that every item has the same share of taste
    labels = [draw.choice(_GENRES, size=count, replace=False) for count in draw.integers(1, 4, size=items)]
    item_features = one_hot("genre", labels, range(_GENRES))
    genre = item_features.values / np.sqrt(item_features.values.sum(axis=1, keepdims=True))
    item_bias = draw.normal(0, _BIAS_SD, items)
    # a product of two standard normals summed over the rank has variance `rank`
    factor_sd = np.sqrt(_FACTORS_SD / np.sqrt(max(rank, 1)))
    q = draw.normal(0, factor_sd, (items, rank))
    popularity = 1 / (draw.permutation(items) + 10.0)

    draw = rng("users")
    group = draw.integers(0, _GROUPS, users)
    group_taste = draw.normal(0, _GROUP_TASTE_SD, (_GROUPS, _GENRES))
    taste = group_taste[group] + draw.normal(0, _OWN_TASTE_SD, (users, _GENRES))
    user_bias = draw.normal(0, _BIAS_SD, users)
    p = draw.normal(0, factor_sd, (users, rank))
    counts = _share_out(ratings, draw.lognormal(0, _TAIL_SD, users), FEWEST, items)

    which_user = np.repeat(np.arange(users, dtype=np.int32), counts)
    which_item = np.empty(ratings, dtype=np.int32)
    values = np.empty(ratings, dtype=np.float32)
    expected = np.empty(ratings, dtype=np.float32)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    for first in range(0, users, _CHUNK):
        last = min(first + _CHUNK, users)
        here = slice(offsets[first], offsets[last])
        draw = rng("ratings", first // _CHUNK)
        chosen = np.concatenate([_choose(popularity, count, draw) for count in counts[first:last]])
        user = which_user[here]
        signal = _MEAN + user_bias[user] + item_bias[chosen]
        signal += np.einsum("rk,rk->r", taste[user], genre[chosen]) + np.einsum("rk,rk->r", p[user], q[chosen])
        which_item[here] = chosen
        values[here] = _on_scale(signal + draw.normal(0, 1, len(signal)) * noise, scale)
        expected[here] = _mean_rating(signal, noise, scale)
    return RatingSet(
        scale=scale,
        users=which_user,
        items=which_item,
        values=values,
        user_ids=np.arange(users, dtype=np.int64),
        item_ids=np.arange(items, dtype=np.int64),
        user_features=one_hot("group", group[:, None].tolist(), range(_GROUPS)),
        item_features=item_features,
        expected=expected,
    )


def check_sizes(users: int, items: int, ratings: int) -> None:
    if items < FEWEST:
        raise ConfigError(f"items = {items}: must be at least {FEWEST}, the fewest that a user rates")
    if not FEWEST * users <= ratings <= users * items:
        raise ConfigError(
            f"ratings = {ratings}: must be {FEWEST * users} to {users * items}, {FEWEST} to {items} for each of {users} users"
        )


def _share_out(total: int, weights: np.ndarray, fewest: int, most: int) -> np.ndarray:
    """Whole numbers from fewest to most that sum to the total, as nearly in proportion to the weights as possible."""
    counts = np.full(len(weights), fewest, dtype=np.int64)
    while left := total - int(counts.sum()):
        below = np.flatnonzero(counts < most)
        wanted = left * weights[below] / weights[below].sum()
        add = np.minimum(wanted.astype(np.int64), most - counts[below])
        if not add.any():
            # what rounding left over, one each to the largest fractions
            add[np.argsort(-wanted, kind="stable")[:left]] = 1
        counts[below] += add
    return counts


def _choose(popularity: np.ndarray, count: int, draw: np.random.Generator) -> np.ndarray:
    """`count` different items, ascending: drawn one after the other in proportion to their popularity.

    Item i arrives after an exponential time with rate popularity_i; the first `count` to arrive are such a draw.
    """
    arrival = draw.standard_exponential(len(popularity), dtype=np.float32) / popularity
    if count == len(popularity):
        return np.arange(count)
    return np.sort(np.argpartition(arrival, count)[:count])


def _on_scale(x: np.ndarray, scale: Scale) -> np.ndarray:
    lowest, highest, step = scale
    return np.clip(lowest + step * np.floor((x - lowest) / step + 0.5), lowest, highest)


def _mean_rating(signal: np.ndarray, noise: float, scale: Scale) -> np.ndarray:
    """E[r_ui] given everything but the noise: each level is reached with a probability that the normal law gives."""
    from scipy.special import ndtr

    lowest, highest, step = scale
    thresholds = np.arange(lowest + step / 2, highest, step)
    spread = max(noise, 1e-12)
    steps: np.ndarray = sum(ndtr((signal - threshold) / spread) for threshold in thresholds)
    return lowest + step * steps
