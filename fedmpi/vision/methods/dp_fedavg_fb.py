"""DP-FedAvg-fb: one model for all, whose head each party fine-tunes for itself.

Shared: the whole network, extractor and head, dense. Local: nothing between rounds; for a test each party tunes a copy of
the shared head on its own data, `head_epochs` on the features of the current extractor. Noised: the whole update.
"""

import numpy as np

from fedmpi.algorithm import LocalUpdate
from fedmpi.vision.methods._whole import WholeMethod


class Method(WholeMethod):
    def work(self, party: int, theta: np.ndarray, round: int) -> LocalUpdate:
        received = self.net.from_numpy(theta)
        self.net.load(received)
        loss = self.train_all(party, round, self.descend)
        return LocalUpdate(party, self.net.to_numpy(self.net.weights - received), None, {"loss": loss})
