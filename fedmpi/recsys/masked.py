"""FedMMF: matrix factorisation on what each party's private model leaves of its ratings. MMF algorithm 2, (11) and (12)."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from fedmpi.config import Count, NonNegative, Positive
from fedmpi.privacy.mechanism import ExactRows
from fedmpi.recsys.base import RatingMethod
from fedmpi.recsys.factorisation import Factorisation
from fedmpi.recsys.models import ModelSettings, make
from fedmpi.recsys.private import Fit, Predictions, fit_all, item_features
from fedmpi.recsys.rule import ClearRule


class PrivateModels(RatingMethod):
    """Fitting and scoring private models, for the methods that have them."""

    @dataclass(frozen=True)
    class Settings(ModelSettings, RatingMethod.Settings):
        mask_reg: NonNegative = 20.0
        """private model: penalty of the weights of item attributes, or of hidden units; small ones hide ratings better"""
        mask_offset_reg: NonNegative = 10.0
        """private model: penalty of its constant term"""
        mask_inner_reg: NonNegative = 15.0
        """private model: penalty of the pairs of a factorisation machine, or of a hidden layer's distance from its start"""
        mask_epochs: Count = 30
        """private factorisation machine or neural network: passes over the party's ratings"""
        mask_lr: Positive = 0.03
        """private factorisation machine or neural network: Adam's rate"""

    settings: Settings
    kind: str  # lr, fm, nn
    private: Predictions  # of the hosted parties
    reference_columns = 6
    reference_scores: tuple[str, ...] = ("rmse_private_model", "rmse_party_mean")

    def fit(self) -> Predictions:
        settings = self.settings
        x = item_features(self.store)
        model = make(self.kind, x.shape[1], settings.mask_rank, settings.mask_hidden)
        fit = Fit(
            settings.mask_offset_reg,
            settings.mask_reg,
            settings.mask_inner_reg,
            settings.rating_centre,
            settings.mask_epochs,
            settings.mask_lr,
        )
        found = fit_all(model, self.block, x, fit, self.rng("private model"))
        return found if self.config.run.keep_parties else dataclasses.replace(found, models=None)

    def model_facts(self):
        return super().model_facts() | {"private_model": self.kind}

    def model_arrays(self, theta):
        return super().model_arrays(theta) | {"item_features": item_features(self.store)}

    def own_parts(self, parties, theta, round):
        assert self.private.models is not None
        return super().own_parts(parties, theta, round) | {"private_model": self.private.models[self.local(parties)]}

    def references_all(self, parties, theta):
        alone = self._errors(self.private.test)[self.local(parties)]
        return np.concatenate((super().references_all(parties, theta), alone), axis=1)

    def summarise_references(self, total):
        return {"rmse_private_model": self.summarise(total[3:])["rmse"]} | super().summarise_references(total)


class Masked(PrivateModels, Factorisation):
    @dataclass(frozen=True)
    class Settings(PrivateModels.Settings, Factorisation.Settings):
        pass

    settings: Settings
    unmasked = False
    chooses_clear = True

    def __init__(self, config, store, device="cpu"):
        super().__init__(config, store, device)
        self.clear_rule = ClearRule.parse(config.aggregation.clear_rule)

    def fit_private_models(self):
        self.private = self.fit()
        self.targets = self.block.train_values - self.private.train
        self.test_mask = self.private.test

    def clear_parties(self):
        if not self.clear_rule.most:
            return ()
        chosen = self.clear_rule.holds(
            self.block.train_offsets, self.targets, self.block.train_values, self.store.scale
        )
        return tuple((np.flatnonzero(chosen) + self.block.first).tolist())


class Alone(PrivateModels):
    """A private model for each party and nothing else: what the mask is worth by itself."""

    shares = False
    reference_columns = 3
    reference_scores = ("rmse_party_mean",)
    sends = ExactRows(1)
    dimension = 1

    def initial(self):
        return np.zeros(1, np.float32)

    def shared_arrays(self, theta):
        return {}

    def host(self, parties):
        super().host(parties)
        self.private = self.fit()

    def predictions(self, theta):
        return self.private.test

    def references_all(self, parties, theta):
        return RatingMethod.references_all(self, parties, theta)

    def summarise_references(self, total):
        return RatingMethod.summarise_references(self, total)

    def row_updates(self, parties, theta, round):
        raise NotImplementedError("a method that shares nothing is not asked for updates")
