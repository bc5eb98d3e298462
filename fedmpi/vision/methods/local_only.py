"""Each party alone: what federation has to beat. A reference without differential privacy.

Shared: nothing; every party starts from the same drawn extractor. Local: everything. Noised: nothing; --epsilon must be inf.

A party does the local work of `rounds` rounds of FedRep, `head_epochs` on the head and `ext_epochs` on the extractor in
each, and goes on from its own extractor where FedRep would go on from the mean: the same start, batches and number of
steps, so that the difference between the two accuracies is what sharing brought. The run is one evaluation, which takes as
long as all rounds together: --round-deadline has to allow for it. (`accuracy_local_only` in the table of other methods is
cheaper and another thing: --local-epochs of joint training.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedmpi.vision.base import NOT_PRIVATE
from fedmpi.vision.methods import centaur

if TYPE_CHECKING:
    from fedmpi.vision.training import Head


class Method(centaur.Method):
    sends = NOT_PRIVATE
    shares = False
    reference_scores = ("accuracy_untrained",)

    def make_ready(self, party: int, theta: np.ndarray, round: int) -> Head:
        return self.make_ready_at_home(party, theta, round, self.config.run.rounds, "train")

    def _train_alone(self, party, data, theta) -> None:
        return None

    def summarise_references(self, rows):
        return {"accuracy_untrained": super().summarise_references(rows)["accuracy_untrained"]}
