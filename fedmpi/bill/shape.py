"""What the size laws ask of a method: how long its vectors are. Found without a run, and as a rule without data.

A data set's catalogue entry says how large an image is and how many items there are to rate, which is all that a network or a matrix
of factors takes its size from. So the method is built over a store that holds nothing. Only models of item attributes look further:
for them the data must be there, and are prepared as for a run.

No network is made, and torch is not imported: a method for images knows its size by its architecture.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.data.images.catalog import get as image_source
from fedmpi.data.images.store import Store
from fedmpi.data.ratings.catalog import RATING_SETS
from fedmpi.data.ratings.catalog import get as rating_source
from fedmpi.data.ratings.spec import RatingSpec
from fedmpi.data.ratings.store import RatingStore
from fedmpi.errors import ConfigError, DataError
from fedmpi.privacy.calibrations import calibrated
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.runtime import build
from fedmpi.wire.arrays import pack_arrays
from fedmpi.wire.support import encode_support

NOWHERE = Path(os.devnull)  # of a store that holds nothing


@dataclass(frozen=True)
class Shape:
    """Of a method under its settings, whatever the number of parties."""

    dimension: int  # of the shared vector
    coordinates: int  # that a party sends; under union at most
    proposed: int  # that a party would send by itself, under union
    support_bytes: int  # of such a support, coded; 0 where all know the coordinates
    report_columns: int  # of a party's figures of its work, the engine's included
    score_columns: int  # of its test figures
    state_bytes: int  # that a whole model brings along: what the server's steps keep
    rows: float  # of a matrix that a party touches, in the mean
    shares: bool  # whether anything is sent at all


class Setting:
    """A configuration with its method, built once; the mechanism depends on the number of parties and is made for each."""

    def __init__(self, config: Config):
        build.check_method(config)
        self.config = config
        privacy = config.privacy
        target = privacy.epsilon, privacy.delta, privacy.sampling, config.run.rounds, privacy.accountant
        self.multiplier = calibrated(build.calibrations(config), *target)
        self.method = _method(config)
        self.shape = _shape(config, self.method)

    def mechanism(self, config: Config) -> Mechanism:
        """Of the same setting among another number of parties."""
        return build.mechanism(build.Orders(config, self.multiplier), self.method)


def _method(config: Config) -> Algorithm:
    kind = build.check_method(config)
    try:
        return kind(config, _empty_store(config), "cpu")
    except DataError:  # it looked for an array
        data = config.data
        if data.dataset != "generated" and data.data_dir is None:
            raise ConfigError(
                f"dataset = {data.dataset}: the size of {config.run.method} follows from the items' attributes; "
                "say where the data are with --data-dir DIR"
            ) from None
    return kind(config, build.open_store(config), "cpu")


def _empty_store(config: Config) -> Any:
    """A store that knows its sizes and holds nothing."""
    dataset = config.data.dataset
    if dataset == "none":
        return None
    if dataset in RATING_SETS:
        return _empty_ratings(config)
    source, shrink = image_source(dataset), config.data.shrink
    channels, height, width = source.shape
    if height % shrink or width % shrink:
        raise ConfigError(f"shrink = {shrink}: must divide the {height} x {width} pixels of {dataset}")
    return Store(
        path=NOWHERE,
        dataset=dataset,
        checksums={},
        num_classes=source.num_classes,
        image_shape=(channels, height // shrink, width // shrink),
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        classes=(),
        train_offsets=(0,),
        test_offsets=(0,),
    )


def _empty_ratings(config: Config) -> RatingStore:
    source = rating_source(config.data.dataset)
    return RatingStore(
        path=NOWHERE,
        dataset=config.data.dataset,
        checksums={},
        parties=config.run.parties,
        num_items=source.counts.items or config.data.items,
        scale=source.scale,
        evaluate_on="test",
        edges=None,
        optimum_rmse=None,
        rescued=0,
        item_feature_names=(),
        user_feature_names=(),
    )


def _shape(config: Config, method: Algorithm) -> Shape:
    own = config.aggregation.support in ("own", "union")
    support = _typical_support(config) if own else None
    coded = b"" if support is None else encode_support(support, method.dimension)
    if support is None and config.aggregation.support == "union":  # everything, and said so
        coded = encode_support(np.arange(method.dimension), method.dimension)
    return Shape(
        dimension=method.dimension,
        coordinates=method.support_size(),
        proposed=method.dimension if support is None else len(support),
        support_bytes=len(coded),
        report_columns=len(method.report_columns) + 2,
        score_columns=method.score_columns,
        state_bytes=len(pack_arrays(_state(method))),
        rows=_rows(config),
        shares=method.shares,
    )


def _typical_support(config: Config) -> np.ndarray | None:
    """What a party would choose by itself is known to it alone. It is as large, and lies as scattered, as the one that the method
    chooses by a model of random weights, where it can choose by a model; None: all coordinates."""
    kind = build.check_method(config)
    if "shared" not in kind.supports:
        return None
    by_model = dataclasses.replace(config, aggregation=dataclasses.replace(config.aggregation, support="shared"))
    method = kind(by_model, _empty_store(config), "cpu")
    return method.public_support(np.random.default_rng(0).standard_normal(method.dimension))


def _state(method: Algorithm) -> dict[str, np.ndarray]:
    """What steps keep once they have been made; the first one may only count."""
    if not method.server_state():
        return {}
    theta, total = method.initial(), np.ones(method.dimension)
    with np.errstate(all="ignore"):  # the figures mean nothing
        for _ in range(2):
            theta = method.step(theta, total, 0.0, None)
    return method.server_state()


def _rows(config: Config) -> float:
    """Ratings of a party to train with, in the mean: what there are over who rates, less those for tests."""
    if config.data.dataset not in RATING_SETS:
        return 0.0
    spec, counts = build.data_spec(config), rating_source(config.data.dataset).counts
    assert isinstance(spec, RatingSpec)
    each = counts.ratings / counts.users if counts.users else spec.ratings_generated / spec.users_generated
    return each * (1 - spec.test_fraction) * (1 - spec.validation_fraction)
