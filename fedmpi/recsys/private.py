"""Private models: each party fits one on its own ratings alone, MMF (10), and masks its ratings with it, MMF (11).

How each is fitted, all parties of a bucket at once:

    lr   exactly, by ridge regression
    fm   Adam from the ridge solution of its linear part and a small common start of its pairs
    nn   the output layer exactly at every step, Adam on the hidden layer, which starts at the principal directions of the
         public item attributes and is pulled back to them (variable projection, Golub and Pereyra 1973)

A party has some tens of ratings and its model as many weights, so what matters is what the model falls back to where the
ratings say nothing. Every start and every pull is a function of public attributes, the same for all parties.
"""

from dataclasses import dataclass

import numpy as np

from fedmpi.data.ratings.store import RatingBlock, RatingStore
from fedmpi.recsys.buckets import buckets, padded
from fedmpi.recsys.models import FactorisationMachine, Model, Network
from fedmpi.recsys.steps import Adam


@dataclass(frozen=True)
class Fit:
    """How private models are fitted; the same for all parties. Penalties are in units of one rating's squared error."""

    offset_reg: float  # of the constant term, which is measured from `centre`
    weight_reg: float  # of the weights of attributes, or of hidden units
    inner_reg: float  # of pairs, or of the hidden layer's distance from its start
    centre: float
    epochs: int
    rate: float


@dataclass(frozen=True)
class Predictions:
    """What a rank's private models say of their own parties' ratings."""

    train: np.ndarray
    test: np.ndarray
    parameters: int  # of one model
    models: np.ndarray | None = None  # (parties, parameters); None: they were only for these predictions


def item_features(store: RatingStore) -> np.ndarray:
    """Item attributes, centred over the catalogue, on one common scale on which a row has length 1 in the mean: a penalty
    then means the same for every data set."""
    values = store.item_features.astype(np.float64)
    values -= values.mean(axis=0)
    return values / max(np.sqrt(np.square(values).sum(axis=1).mean()), 1e-9)


def fit_all(model: Model, block: RatingBlock, x: np.ndarray, fit: Fit, rng: np.random.Generator) -> Predictions:
    """One private model for each party of the block, fitted in batches; `x`: the features of every item."""
    start = _start(model, x, rng)
    x = padded(x)
    items = padded(block.train_items.astype(np.int64), len(x) - 1)
    ratings = padded(block.train_values.astype(np.float64))
    train, parameters = np.empty(len(block.train_items)), np.empty((block.parties, model.size))
    for bucket in buckets(block.train_offsets):
        features, valid = x[bucket.take(items)], bucket.valid
        wanted = np.where(valid, bucket.take(ratings) - fit.centre, 0.0)
        found = _fit(model, features, valid, wanted, fit, start)
        parameters[bucket.members] = found
        bucket.put(train, fit.centre + model.predict(found, features))
    return Predictions(train, _predict_test(model, block, x, parameters, fit.centre), model.size, parameters)


def _predict_test(model: Model, block: RatingBlock, x: np.ndarray, parameters: np.ndarray, centre: float) -> np.ndarray:
    items = padded(block.test_items.astype(np.int64), len(x) - 1)
    test = np.empty(len(block.test_items))
    for bucket in buckets(block.test_offsets):
        bucket.put(test, centre + model.predict(parameters[bucket.members], x[bucket.take(items)]))
    return test


def _start(model: Model, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Parameters before fitting, from public attributes alone."""
    start = model.start(rng)
    if isinstance(model, Network):
        directions = np.linalg.svd(x, full_matrices=False)[2][: model.hidden].T
        # A direction's sign is the library's choice: the largest entry is made positive.
        directions = directions * np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(directions.shape[1])])
        inner = np.zeros((model.features, model.hidden))
        inner[:, : directions.shape[1]] = 0.8 * directions  # where tanh begins to bend
        start = np.concatenate((np.zeros(1 + 2 * model.hidden), inner.ravel()))
    return start


def _fit(model: Model, x: np.ndarray, valid: np.ndarray, wanted: np.ndarray, fit: Fit, start: np.ndarray) -> np.ndarray:
    if isinstance(model, Network):
        return _project(model, x, valid, wanted, fit, start)
    linear = _ridge(x, valid, wanted, fit)
    if not isinstance(model, FactorisationMachine):
        return linear
    parameters = np.concatenate((linear, np.tile(start[linear.shape[1] :], (len(x), 1))), axis=1)
    penalties = np.full(model.size, fit.inner_reg)
    penalties[0], penalties[1 : linear.shape[1]] = fit.offset_reg, fit.weight_reg

    def slope(parameters):
        error = np.where(valid, model.predict(parameters, x) - wanted, 0.0)
        return model.gradient(parameters, x, error) + penalties * parameters

    return _adam(parameters, slope, fit)


def _ridge(x: np.ndarray, valid: np.ndarray, wanted: np.ndarray, fit: Fit) -> np.ndarray:
    """[constant, weights] that minimise the squared error plus the penalties."""
    ones = np.concatenate((valid[:, :, None].astype(np.float64), x), axis=2)
    gram = np.matmul(ones.transpose(0, 2, 1), ones)
    diagonal = np.arange(ones.shape[2])
    # A penalty of 0 with fewer ratings than weights has no unique solution: the least addition makes it the smallest one.
    gram[:, diagonal[:1], diagonal[:1]] += max(fit.offset_reg, 1e-9)
    gram[:, diagonal[1:], diagonal[1:]] += max(fit.weight_reg, 1e-9)
    return np.linalg.solve(gram, np.matmul(ones.transpose(0, 2, 1), wanted[:, :, None]))[:, :, 0]


def _project(
    model: Network, x: np.ndarray, valid: np.ndarray, wanted: np.ndarray, fit: Fit, start: np.ndarray
) -> np.ndarray:
    outer = 1 + model.hidden  # parameters of the output layer, the constant included

    def with_output(inner):
        active = np.where(valid[:, :, None], model.active(inner, x), 0.0)
        return np.concatenate((_ridge(active, valid, wanted, fit), inner), axis=1)

    def slope(inner):
        parameters = with_output(inner)
        error = np.where(valid, model.predict(parameters, x) - wanted, 0.0)
        # At the output layer's minimum its own derivative is zero, so that of the hidden layer is all there is.
        return model.gradient(parameters, x, error)[:, outer:] + fit.inner_reg * (inner - start[outer:])

    return with_output(_adam(np.tile(start[outer:], (len(x), 1)), slope, fit))


def _adam(parameters: np.ndarray, slope, fit: Fit) -> np.ndarray:
    """Full passes over each party's ratings, the rate falling to zero along a cosine."""
    optimizer = Adam(fit.rate, second_decay=0.99, tiny=1e-6)  # for a few tens of steps
    for epoch in range(fit.epochs):
        optimizer.rate = fit.rate * 0.5 * (1 + np.cos(np.pi * epoch / fit.epochs))
        parameters = optimizer.step(parameters, slope(parameters), None)
    return parameters
