"""Test figures as sums: `metrics: securesum` adds them up through the protocol, so that no party's own reach the server.

Such a sum is a session of its own beside the training rounds, with keys of its own. Everybody takes part, also who shares
updates in the clear, and no dropout is planned for it.
"""

import numpy as np

from fedmpi.errors import ProtocolError
from fedmpi.privacy.encoding import Encoding
from fedmpi.wire.phases import Phase

# Fixed point with 20 bits behind the point: figures are counts, shares and summed errors, at most 2^43 over all parties.
FRACTION, LARGEST = 20, 2.0**43 - 1


def encoding(columns: int) -> Encoding:
    return Encoding(clip=1.0, steps=1 << FRACTION, bits=64, dimension=columns)


def encode(row: np.ndarray, parties: int) -> np.ndarray:
    """The figures of one of so many parties as integers modulo 2^64; ProtocolError if their sum could wrap."""
    if not (np.isfinite(row).all() and np.abs(row).max(initial=0.0) <= LARGEST / parties):
        raise ProtocolError(
            f"a test figure is not a number, or larger than the {LARGEST / parties:.3g} that can be added up; did training diverge?",
            phase=Phase.EVALUATION,
        )
    return encoding(len(row)).wrap(np.rint(np.asarray(row, np.float64) * (1 << FRACTION)))
