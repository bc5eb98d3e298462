"""Private models: each party fits one on its own ratings alone, MMF (10), and masks its ratings with it, MMF (11)."""

from dataclasses import dataclass

import numpy as np

from fedmpi.data.rating_store import RatingBlock, RatingStore
from fedmpi.recsys.buckets import buckets, padded
from fedmpi.recsys.models import Linear, Model


@dataclass(frozen=True)
class Fit:
    """How private models are fitted; the same for all parties."""

    offset_reg: float  # penalty of the constant term, which is measured from `centre`
    weight_reg: float
    centre: float
    epochs: int  # full passes of gradient descent; a linear model is solved exactly instead
    rate: float


@dataclass(frozen=True)
class Predictions:
    """What a rank's private models say of their own parties' ratings."""

    train: np.ndarray
    test: np.ndarray


def item_features(store: RatingStore) -> np.ndarray:
    """Item attributes for a model with a ridge: centred over the catalogue; tag components on one common scale of unit
    size, because principal components of TF-IDF rows come out at a tenth of that."""
    return _scaled(store.item_features, store.item_feature_names)


def user_features(features: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """Profiles, for the models that all parties share; a private model has no use for what never changes."""
    tags = np.array([name.startswith("tag:") for name in names], bool)
    values = features.astype(np.float64)
    values[:, tags] *= 10.0
    return values


def _scaled(features: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    values = features.astype(np.float64)
    values -= values.mean(axis=0)
    tags = np.array([name.startswith("tag:") for name in names], bool)
    if tags.any():
        values[:, tags] /= max(values[:, tags].std(), 1e-9)
    return values


def fit_all(model: Model, block: RatingBlock, x: np.ndarray, fit: Fit, rng: np.random.Generator) -> Predictions:
    """One private model for each party of the block, fitted in batches; `x`: the features of every item."""
    x = padded(x)
    items = padded(block.train_items.astype(np.int64), len(x) - 1)
    ratings = padded(block.train_values.astype(np.float64))
    train, parameters = np.empty(len(block.train_items)), np.empty((block.parties, model.size))
    start = model.start(rng)
    for bucket in buckets(block.train_offsets):
        features, valid = x[bucket.take(items)], bucket.valid
        wanted = np.where(valid, bucket.take(ratings) - fit.centre, 0.0)
        if type(model) is Linear:
            found = _ridge(model, features, valid, wanted, fit)
        else:
            found = _descend(model, features, valid, wanted, fit, start)
        parameters[bucket.members] = found
        bucket.put(train, fit.centre + model.predict(found, features))
    return Predictions(train, _predict_test(model, block, x, parameters, fit.centre))


def _predict_test(model: Model, block: RatingBlock, x: np.ndarray, parameters: np.ndarray, centre: float) -> np.ndarray:
    items = padded(block.test_items.astype(np.int64), len(x) - 1)
    test = np.empty(len(block.test_items))
    for bucket in buckets(block.test_offsets):
        bucket.put(test, centre + model.predict(parameters[bucket.members], x[bucket.take(items)]))
    return test


def _ridge(model: Linear, x: np.ndarray, valid: np.ndarray, wanted: np.ndarray, fit: Fit) -> np.ndarray:
    """The exact minimiser of the squared error plus the penalties."""
    ones = np.concatenate((valid[:, :, None].astype(np.float64), x), axis=2)
    gram = np.matmul(ones.transpose(0, 2, 1), ones)
    diagonal = np.arange(model.size)
    # A penalty of 0 with fewer ratings than weights has no unique solution: the least addition makes it the smallest one.
    gram[:, diagonal, diagonal] += np.maximum(model.penalties(fit.offset_reg, fit.weight_reg), 1e-9)
    right = np.matmul(ones.transpose(0, 2, 1), wanted[:, :, None])
    return np.linalg.solve(gram, right)[:, :, 0]


FIRST, SECOND, TINY = 0.9, 0.999, 1e-8


def _descend(
    model: Model, x: np.ndarray, valid: np.ndarray, wanted: np.ndarray, fit: Fit, start: np.ndarray
) -> np.ndarray:
    """Adam over all ratings of each party at once, on the mean squared error plus penalties over the number of ratings."""
    number = valid.sum(axis=1)[:, None]
    penalties = model.penalties(fit.offset_reg, fit.weight_reg)
    parameters = np.tile(start, (len(x), 1))
    parameters[:, 0] = wanted.sum(axis=1) / (
        number[:, 0] + fit.offset_reg
    )  # the shrunken mean is a good first constant
    first, second = np.zeros_like(parameters), np.zeros_like(parameters)
    for epoch in range(1, fit.epochs + 1):
        error = np.where(valid, model.predict(parameters, x) - wanted, 0.0)
        gradient = (model.gradient(parameters, x, error) + penalties * parameters) / number
        first = FIRST * first + (1 - FIRST) * gradient
        second = SECOND * second + (1 - SECOND) * np.square(gradient)
        root = np.sqrt(second / (1 - SECOND**epoch)) + TINY
        parameters = parameters - fit.rate * (first / (1 - FIRST**epoch)) / root
    return parameters
