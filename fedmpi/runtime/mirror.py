"""A client rank's own copy of the shared model, which it moves by the sums that rank 0 sends, as the server moved it.

The first one it draws for itself, and each Delta brings the next: the method's step is a function of the model, of the sum and of what
`server_state` holds. Whether the result is the model that everybody is told of is seen by its digest, before anything is done with it.
"""

import numpy as np

from fedmpi.aggregation.protocol import digest
from fedmpi.algorithm import Algorithm
from fedmpi.errors import ProtocolError, WireError
from fedmpi.log import log
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.wire.arrays import read_arrays
from fedmpi.wire.messages import Delta, Evaluate, Model, Train
from fedmpi.wire.phases import Phase
from fedmpi.wire.sums import decode_sum
from fedmpi.wire.support import decode_support


def move(
    algorithm: Algorithm,
    mechanism: Mechanism,
    theta: np.ndarray,
    total: np.ndarray,
    rate: float,
    support: np.ndarray | None,
    round: int = 0,
) -> np.ndarray:
    """theta after the server's step by this round's sum of encodings; `support`: its coordinates, if the round has found them."""
    values = mechanism.of_round(round).decode(total)
    if support is None and len(values) < algorithm.dimension:
        support = algorithm.public_support(theta)
    # A copy: a step that writes into what it is given must not change the model that others still have.
    return frozen(algorithm.step(theta.copy(), values, rate, support))


def frozen(theta: np.ndarray) -> np.ndarray:
    """A model that nobody writes into: parties of one rank work from it one after the other, and a digest of it is kept."""
    kept = np.array(theta)
    kept.setflags(write=False)
    return kept


class Mirror:
    def __init__(self, algorithm: Algorithm, mechanism: Mechanism):
        self._algorithm, self._mechanism = algorithm, mechanism
        self._set(frozen(algorithm.initial()), 0)

    def _set(self, theta: np.ndarray, version: int) -> None:
        self.theta, self.version, self._digest = theta, version, digest(theta)

    def is_of(self, task: Train | Evaluate) -> bool:
        """Whether this is the model that the task is about."""
        return (task.version, task.model) == (self.version, self._digest)

    def replace(self, model: Model) -> None:
        if len(model.theta) != self._algorithm.dimension:
            raise ProtocolError(
                f"rank 0 sent a model of {len(model.theta)} coordinates, expected {self._algorithm.dimension}",
                phase=Phase.MODEL,
            )
        if model.state:
            self._algorithm.load_server_state(read_arrays(model.state))
        self._set(model.theta, model.round)

    def follow(self, delta: Delta) -> None:
        """The next version, if that is what it is. One that cannot be read leaves the model as it is, which then is not the one that
        rank 0 asks for: see `is_of`."""
        if delta.base != self.version or delta.round <= delta.base:
            return
        try:
            total, support = self._read(delta)
        except WireError as error:
            return log.debug("the sum of round %d cannot be read: %s", delta.round, error)
        moved = move(self._algorithm, self._mechanism, self.theta, total, delta.rate, support, delta.round)
        self._set(moved, delta.round)

    def _read(self, delta: Delta) -> tuple[np.ndarray, np.ndarray | None]:
        dimension, sent = self._algorithm.dimension, self._mechanism.encoding.dimension
        if self._mechanism.block:  # turned vectors are whole, and with their padding may be longer than the model
            if delta.count != sent or delta.support:
                raise WireError(f"Delta: {delta.count} values, expected {sent} of a rotation")
            return decode_sum(delta.values, delta.count), None
        if delta.count > dimension:
            raise WireError(f"Delta: {delta.count} values, the model has {dimension}")
        total = decode_sum(delta.values, delta.count)
        if not delta.support:
            if delta.count not in (dimension, self._algorithm.support_size()):
                raise WireError(f"Delta: {delta.count} values, expected {self._algorithm.support_size()}")
            return total, None
        support = decode_support(delta.support, dimension)
        if len(support) != delta.count:
            raise WireError(f"Delta: {delta.count} values for {len(support)} coordinates")
        if not delta.scattered:
            return total, support
        everywhere = np.zeros(dimension, np.int64)
        everywhere[support] = total
        return everywhere, None
