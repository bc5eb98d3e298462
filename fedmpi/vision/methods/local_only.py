"""Each party alone: what federation has to beat. A reference without differential privacy.

Shared: nothing; every party starts from the same drawn extractor. Local: everything. Noised: nothing; --epsilon must be inf.

A party does the local work of `rounds` rounds of FedRep, `head_epochs` on the head and `ext_epochs` on the extractor in
each, and goes on from its own extractor where FedRep would go on from the mean: the same start, batches and number of
steps, so that the difference between the two accuracies is what sharing brought. The run is one evaluation, which takes as
long as all rounds together: --round-deadline has to allow for it. (`accuracy_local_only` in the table of other methods is
cheaper and another thing: --local-epochs of joint training.)
"""

import numpy as np

from fedmpi.algorithm import Score
from fedmpi.vision.methods import centaur
from fedmpi.vision.methods._unnoised import Unnoised


class Method(Unnoised, centaur.Method):
    shares = False
    reference_scores = ("accuracy_untrained",)

    def evaluate(self, party: int, theta: np.ndarray, round: int) -> Score:
        data, head = self._party(party)
        head, own = head.copy(), self.net.from_numpy(theta)
        for step in range(1, self.config.run.rounds + 1):
            rng = self._rng("train", party, step)
            self._tune_head(head, data, own, rng)
            update, _, _ = self.train_extractor(data, head, own, rng)
            own += self.net.from_numpy(update)
        self._tune_head(head, data, own, self._rng("evaluate", party, round))
        correct, loss = self._test(head, data)
        return Score(correct, len(data.test_y), loss)

    def _train_alone(self, party, data, theta) -> int:
        return -1

    def summarise_references(self, rows):
        return {"accuracy_untrained": super().summarise_references(rows)["accuracy_untrained"]}
