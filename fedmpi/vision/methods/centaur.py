"""CENTAUR (Shen 2023): FedRep with differential privacy on the representation only.

Shared: the whole extractor, dense. Local: head and running statistics. Noised: the extractor's update.
"""

import numpy as np
from torch.nn import functional as F

from fedmpi.vision.methods._extractor import ExtractorMethod
from fedmpi.vision.training import batches


class Method(ExtractorMethod):
    supports = ("own", "union", "shared", "dense")  # all the same here: every coordinate is sent

    def public_support(self, theta: np.ndarray) -> None:
        return None

    def support_size(self) -> int:
        return self.dimension

    def forward_weights(self, theta):
        return theta

    def train_extractor(self, data, head, theta, rng):
        net, settings = self.net, self.training
        net.load(theta)
        net.module.train()
        total, seen = 0.0, 0
        for epoch in range(settings.ext_epochs):
            for batch in batches(len(data.train_y), settings.batch_size, rng):
                net.gradients.zero_()
                images = self.augmented(data.train_x[batch], rng)
                loss = F.cross_entropy(head(net.module(images)), data.train_y[batch])
                loss.backward()
                net.weights.sub_(net.gradients, alpha=settings.ext_lr)
                if epoch == settings.ext_epochs - 1:
                    total, seen = total + float(loss.detach()) * len(batch), seen + len(batch)
        update = net.to_numpy(net.weights - theta)
        return update, None, {"loss": total / max(seen, 1), "penalty": 0.0}
