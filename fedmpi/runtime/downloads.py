"""What each rank has of the model, and what it is sent so that it has the rest: the sums since then, or all of it, whichever is less.

--download delta   A rank that has a version gets the sums of the steps since, each coded once (wire.sums), and makes the model by itself
                   (runtime.mirror). Sums that together are as long as the model are forgotten.
--download full    It gets the model.

Either way a model that is there is not sent again, neither for a round nor for a test, and the first one never is: every rank draws it
from the seed. A rank that made something else of the sums notices by the digest and asks for all of it.

A rank with several parties gets one copy. What each party would have needed on a link of its own depends on when it was asked
last, and is kept by party: the ledger's logical column.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.arrays import pack_arrays
from fedmpi.wire.messages import Delta, Model
from fedmpi.wire.sums import encode_sum
from fedmpi.wire.support import encode_support

UNKNOWN = -1  # a version that nobody has: of a run that was resumed
TRUSTED = 2  # times that a rank may ask for all of it before it gets nothing else
KEPT = 4  # versions that are kept for a rank that asks late: it still owes the work of that round


class Downloads:
    def __init__(
        self,
        config: Config,
        endpoint: Endpoint,
        algorithm: Algorithm,
        mechanism: Mechanism,
        say: Callable[[str], object],
    ):
        self._whole_only = config.aggregation.download == "full"
        self._endpoint, self._algorithm, self._mechanism, self._say = endpoint, algorithm, mechanism, say
        self.version = 0
        self._sums: list[Delta] = []  # that together are shorter than the model, the last one up to `version`
        self._has = dict.fromkeys(range(endpoint.size), 0)  # rank -> the version that it was brought to
        self._owns = np.zeros(config.run.parties, np.int64)  # the same by party, were it alone
        self._asked: dict[int, list[int]] = {}  # rank -> the versions that it asked for all of
        self._told: dict[int, set[int]] = {}  # rank -> its parties that were brought to the version that it has
        self._models: deque[tuple[int, np.ndarray, bytes]] = deque(
            maxlen=KEPT
        )  # the last versions, with what steps kept

    def go_on(self, version: int) -> None:
        """A resumed run begins with the model of this version, which nobody has."""
        self.version = version
        self._has = dict.fromkeys(self._has, UNKNOWN)
        self._owns[:] = UNKNOWN

    def stepped(self, round: int, total: np.ndarray, rate: float, support: np.ndarray | None) -> None:
        """The model of this round was made by this sum of encodings."""
        if not self._whole_only:
            self._sums.append(self._delta(round, total, rate, support))
            whole = Model.wire_size(self._algorithm.dimension, len(pack_arrays(self._algorithm.server_state())))
            while sum(map(size, self._sums)) > whole:
                del self._sums[0]
        self.version = round

    def _delta(self, round: int, total: np.ndarray, rate: float, support: np.ndarray | None) -> Delta:
        dimension, scattered = self._algorithm.dimension, False
        if support is None and len(total) == dimension and not self._mechanism.block:
            found = np.flatnonzero(total)
            scattered = 2 * len(found) < dimension  # as where each party chose its own coordinates
            if scattered:
                total, support = total[found], found
        width = self._mechanism.width if support is None and self._mechanism.width > 1 else 0
        return Delta(
            round,
            base=self.version,
            rate=rate,
            count=len(total),
            scattered=scattered,
            support=b"" if support is None else encode_support(support, dimension),
            values=encode_sum(total, width),
        )

    def bring(self, rank: int, parties: tuple[int, ...], theta: np.ndarray) -> None:
        """To a rank whatever it lacks of the model, which is theta, for these of its parties."""
        for message in self._lacking(rank, self._has[rank], theta):
            self._endpoint.send(rank, message)
        if self._has[rank] != self.version:
            self._told[rank] = set()
        self._has[rank] = self.version
        self._told.setdefault(rank, set()).update(parties)
        if not self._models or self._models[-1][0] != self.version:
            self._models.append((self.version, theta, pack_arrays(self._algorithm.server_state())))
        own = self._owns[list(parties)]
        for version in np.unique(own).tolist():
            some = [party for party, has in zip(parties, own.tolist()) if has == version]
            for message in self._lacking(rank, version, theta):
                self._endpoint.ledger.charge(message, rank, some, size(message))
        self._owns[list(parties)] = self.version

    def _lacking(self, rank: int, has: int, theta: np.ndarray) -> list[Delta] | list[Model]:
        if has == self.version:
            return []
        since = [delta for delta in self._sums if delta.base >= has]
        if since and since[0].base == has and self._follows(rank):
            return since
        return [self._whole(rank, self.version, theta, pack_arrays(self._algorithm.server_state()))]

    def _follows(self, rank: int) -> bool:
        """Whether it gets sums."""
        return not self._whole_only and len(self._asked.get(rank, ())) < TRUSTED

    def _whole(self, rank: int, version: int, theta: np.ndarray, state: bytes) -> Model:
        """With what steps keep between them, for who is to follow from there."""
        return Model(version, theta=theta, state=state if self._follows(rank) else b"")

    def resend(self, rank: int, version: int) -> bool:
        """All of the model that a rank asks for; False if it had been sent that. One that asks late gets that of the round that it still
        is in, and has the sums since; of one that is long over, the newest."""
        asked = self._asked.setdefault(rank, [])
        if version in asked or version > self.version or not self._models:
            return False
        asked.append(version)
        kept = next((model for model in self._models if model[0] == version), self._models[-1])
        again = ", and gets nothing else from now on" if len(asked) == TRUSTED else ""
        self._say(f"rank {rank} has another model than rank 0 after round {version}; it is sent all of it{again}")
        message = self._whole(rank, *kept)
        self._endpoint.send(rank, message)
        self._endpoint.ledger.charge(message, rank, sorted(self._told.get(rank, ())), size(message))
        return True


def size(message: Delta | Model) -> int:
    """Payload bytes."""
    if isinstance(message, Delta):
        return Delta.wire_size(len(message.support), len(message.values))
    return Model.wire_size(len(message.theta), len(message.state))
