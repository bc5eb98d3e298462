"""CENTAUR (Shen 2023): FedRep with differential privacy on the representation only.

Shared: the whole extractor, dense. Local: head and running statistics. Noised: the extractor's update.
"""

import numpy as np

from fedmpi.vision.methods._extractor import ExtractorMethod


class Method(ExtractorMethod):
    supports = ("own", "union", "shared", "dense")  # all the same here: every coordinate is sent

    def public_support(self, theta: np.ndarray) -> None:
        return None

    def support_size(self) -> int:
        return self.dimension

    def train_extractor(self, data, head, theta, rng):
        net, rate = self.net, self.settings.ext_lr
        net.load(theta)
        loss = self.train(
            data,
            rng,
            scores=lambda images: head(net.module(images)),
            move=lambda gradient: net.weights.sub_(gradient, alpha=rate),
            epochs=self.settings.ext_epochs,
        )
        return net.to_numpy(net.weights - theta), None, {"loss": loss, "penalty": 0.0}
