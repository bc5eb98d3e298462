"""Federated context models: one model of a rating from item attributes and user profile, the same for all parties."""

from dataclasses import dataclass

import numpy as np

from fedmpi.algorithm import RowUpdates
from fedmpi.errors import ConfigError
from fedmpi.privacy.mechanism import ExactRows
from fedmpi.recsys.base import RatingMethod
from fedmpi.recsys.buckets import Bucket, buckets, padded
from fedmpi.recsys.models import ModelSettings, make
from fedmpi.recsys.private import item_features
from fedmpi.recsys.steps import Adam, Sgd, StepSettings


class Context(RatingMethod):
    """The shared vector is one row, the model's parameters; each party sends the gradient of its summed squared error."""

    kind: str
    supports = ("own", "dense")

    @dataclass(frozen=True)
    class Settings(StepSettings, ModelSettings, RatingMethod.Settings):
        pass

    settings: Settings

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        settings, server = self.settings, config.server
        if settings.optimizer == "counted":
            raise ConfigError(
                f"optimizer = counted: {config.run.method} has no items whose raters it counts; take adam or sgd"
            )
        if server.denominator != "none":
            raise ConfigError(f"denominator = {server.denominator}: {config.run.method} adds gradients up; take none")
        self.item_x = padded(item_features(store))
        features = self.item_x.shape[1] + len(store.user_feature_names)
        self.model = make(self.kind, features, settings.mask_rank, settings.mask_hidden)
        self.sends = ExactRows(self.model.size)
        self.centre = settings.rating_centre
        self.optimizer = Adam(server.server_lr) if settings.optimizer == "adam" else Sgd(server.server_lr)

    @property
    def dimension(self) -> int:
        return self.model.size

    def initial(self):
        return self.model.start(self.rng("initial")).astype(np.float32)

    def host(self, parties):
        super().host(parties)
        self.user_x = self.block.user_features.astype(np.float64)
        self.train = buckets(self.block.train_offsets)
        self.train_items = padded(self.block.train_items.astype(np.int64), len(self.item_x) - 1)
        self.wanted = padded(self.block.train_values.astype(np.float64) - self.centre)

    def _features(self, bucket: Bucket, items: np.ndarray) -> np.ndarray:
        of_items = self.item_x[bucket.take(items)]
        of_users = np.broadcast_to(self.user_x[bucket.members][:, None, :], (*of_items.shape[:2], self.user_x.shape[1]))
        return np.concatenate((of_items, of_users), axis=2)

    def row_updates(self, parties, theta, round):
        errors, gradients = np.empty(len(self.wanted) - 1), np.empty((self.block.parties, self.model.size))
        for bucket in self.train:
            x = self._features(bucket, self.train_items)
            shared = np.tile(theta.astype(np.float64), (len(x), 1))
            error = np.where(bucket.valid, self.model.predict(shared, x) - bucket.take(self.wanted), 0.0)
            gradients[bucket.members] = self.model.gradient(shared, x, error)
            bucket.put(errors, error)
        local = self.local(parties)
        # A party's mean gradient: within a bound that does not depend on how much it rated. Adam does not mind the scale.
        values = (gradients / np.diff(self.block.train_offsets)[:, None]).astype(np.float32)[local]
        figures = self.training_figures(errors)[local]
        return RowUpdates(parties, np.ones(len(local), np.int64), np.zeros(len(local), np.int64), values, figures)

    def step(self, theta, total, rate, support):
        return self.optimizer.step(theta.astype(np.float64), total, None).astype(np.float32)

    def predictions(self, theta):
        out = np.empty(len(self.block.test_items))
        items = padded(self.block.test_items.astype(np.int64), len(self.item_x) - 1)
        for bucket in buckets(self.block.test_offsets):
            x = self._features(bucket, items)
            bucket.put(out, self.centre + self.model.predict(np.tile(theta.astype(np.float64), (len(x), 1)), x))
        return out

    def shared_arrays(self, theta):
        return self.model.named(theta)

    def model_facts(self):
        return super().model_facts() | {"shared_model": self.kind}

    def model_arrays(self, theta):
        return super().model_arrays(theta) | {"item_features": self.item_x[:-1]}

    def own_parts(self, parties, theta, round):
        return {"user_features": self.user_x[self.local(parties)]}

    def states(self, parties):
        return {}

    def load_states(self, parties, stacked):
        pass

    def server_state(self):
        return self.optimizer.state()

    def load_server_state(self, state):
        self.optimizer.load(state)
