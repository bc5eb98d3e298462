"""One round is enough where a party's factors are an exact minimiser and an item bias is shared.

The gradient of the bias is -e_i, so errors are seen as they are. The factors minimise the squared error plus a penalty, so
they satisfy W' e = D z with the public item rows W and the public penalties D: z is known, and with it every rating,
r_i = e_i + b_i + w_i . z. No grid and no second round are needed, and the covariance that a party adds to its other
gradients does not matter, because they are not looked at.
"""

from __future__ import annotations

import numpy as np

from fedmpi.attacks.gradient_leak import Undetermined
from fedmpi.attacks.parties import Floats


def leak_from_errors(rows: Floats, bias: Floats, errors: Floats, penalties: Floats) -> Floats:
    """The party's ratings (or masked ratings) from the errors that its bias gradients show.

    `rows` (ratings, 1 + k): [1, q_i], the first for the party's own offset; `penalties` (1 + k,): the ridge of each.
    """
    penalties = np.asarray(penalties, np.float64)
    if not np.all(penalties > 0.0):
        raise Undetermined("a factor without a penalty is not determined by the errors it leaves")
    factors = (np.asarray(rows, np.float64).T @ errors) / penalties
    found: Floats = errors + bias + rows @ factors
    return found
