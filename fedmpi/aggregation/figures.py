"""Test figures as sums: `metrics: securesum` adds them up through the protocol, so that no party's own reach the server.

Such a sum is a session of its own beside the training rounds, with keys of its own. Everybody takes part, also who shares
updates in the clear, and no dropout is planned for it.
"""

import numpy as np

from fedmpi.privacy.encoding import Encoding

# Fixed point with 20 bits behind the point: figures are counts, shares and summed errors, at most 2^43 over all parties.
FRACTION = 20


def encoding(columns: int) -> Encoding:
    return Encoding(clip=1.0, steps=1 << FRACTION, bits=64, dimension=columns)


def encode(row: np.ndarray) -> np.ndarray:
    """One party's figures in Z_{2^64}."""
    return encoding(len(row)).wrap(np.rint(np.asarray(row, np.float64) * (1 << FRACTION)))
