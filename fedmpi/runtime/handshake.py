"""What ranks say when they are ready: whether it can be, and what follows from it."""

from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.errors import ProtocolError
from fedmpi.runtime.placement import Placement
from fedmpi.wire.control import NONCE
from fedmpi.wire.messages import Ready


class Readiness:
    def __init__(self, config: Config, algorithm: Algorithm, placement: Placement, resume_round: int):
        self._config, self._algorithm, self._placement = config, algorithm, placement
        self._resume_round = resume_round
        self.clear: set[int] = set()  # who shares in the clear by a method's rule
        self.reach: dict[int, int] = {}  # rank -> the checkpoint up to which it can go on, in a resumed run
        self._nonces: dict[int, bytes] = {}  # of each rank's parties, where the adversary is active

    def take(self, source: int, message: Ready) -> str:
        """What is wrong with it, if the rank lies. Another model or other data end the run: nothing has been computed yet, and a wrong
        installation is likelier than a liar."""
        config, algorithm = self._config, self._algorithm
        if message.dimension != algorithm.dimension:
            raise ProtocolError(
                f"rank {source} built a model of {message.dimension} parameters, rank 0 one of "
                f"{algorithm.dimension}; is the same fedmpi installed there?"
            )
        if config.privacy.shown == "party" and message.data != algorithm.data_fingerprint:
            raise ProtocolError(
                f"rank {source} prepared other data than rank 0; delete the prepared folder on its host"
            )
        if message.round > self._resume_round:
            return f"said that it goes on from round {message.round}"
        hosted, active = self._placement.parties_of(source), config.aggregation.adversary == "active"
        chooses = config.aggregation.aggregation == "hybrid" and algorithm.chooses_clear
        if not set(message.clear) <= set(hosted if chooses else ()):
            return "chose to share in the clear, which is not its choice, or for parties that it does not host"
        if len(message.nonces) != NONCE * len(hosted) * active:
            return f"sent {len(message.nonces)} bytes of nonces for {len(hosted)} parties"
        self.clear |= set(message.clear)
        self._nonces[source], self.reach[source] = message.nonces, message.round
        return ""

    def all_nonces(self) -> bytes:
        """By party; zeros for those of ranks that did not come."""
        absent = {rank: bytes(NONCE * len(self._placement.parties_of(rank))) for rank in self._placement.ranks()}
        return b"".join((absent | self._nonces)[rank] for rank in self._placement.ranks())
