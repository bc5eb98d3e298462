"""A method of a user's own that sends rows of a shared matrix: --method toy_rows:Rows with this folder on PYTHONPATH."""

import numpy as np

from fedmpi.algorithm import LocalUpdate, RowAlgorithm, RowUpdates
from fedmpi.privacy.mechanism import ClippedVector, ExactRows


class Rows(RowAlgorithm):
    task = "none"
    sends = ExactRows(2)
    scores, reference_scores, report_columns = ("accuracy",), (), ()
    score_columns = reference_columns = 1
    data_fingerprint = 0
    dimension = 8

    def __init__(self, config, store, device="cpu"):
        pass

    def initial(self):
        return np.zeros(8, np.float32)

    def row_updates(self, parties, theta, round):
        each = len(parties)
        rows = np.tile(np.arange(4), each)
        return RowUpdates(parties, np.full(each, 4), rows, np.ones((4 * each, 2), np.float32), np.zeros((each, 0)))

    def evaluate_all(self, parties, theta, round):
        return np.ones((len(parties), 1))

    def references_all(self, parties, theta):
        return np.ones((len(parties), 1))

    def summarise(self, total):
        return {"accuracy": float(total[0])}

    def summarise_references(self, total):
        return {}


class Claims(Rows):
    """Declares what is noised, and sends exact rows."""

    sends = ClippedVector()


class Vectors(Rows):
    """Declares rows, and sends a vector."""

    def local_work(self, parties, theta, round):
        return (LocalUpdate(party, np.ones(8)) for party in parties)


class Wrong(Rows):
    """Rows that cannot be."""

    numbers, counts, columns = (0, 1, 2, 3), 4, 2

    def row_updates(self, parties, theta, round):
        each = len(parties)
        counts = np.full(each, 4)
        counts[-1] = self.counts
        values = np.ones((4 * each, self.columns), np.float32)
        return RowUpdates(parties, counts, np.tile(self.numbers, each), values, np.zeros((each, 0)))


class Repeated(Wrong):
    numbers = (0, 1, 1, 3)


class Negative(Wrong):
    numbers = (-1, 0, 1, 2)


class Beyond(Wrong):
    numbers = (0, 1, 2, 4)


class Uncounted(Wrong):
    counts = 3


class Narrow(Wrong):
    columns = 1
