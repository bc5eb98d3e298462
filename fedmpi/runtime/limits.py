"""How large a message of a client may be: what rank 0 can be made to hold is known before the first one arrives.

By the settings, the method and the number of parties that the sender hosts, from the messages' own size laws. A type that does not
come up in this run has no size: it is refused whatever its length.
"""

from fedmpi.aggregation.rows import MESSAGE_ROWS, row_bits
from fedmpi.algorithm import Algorithm
from fedmpi.config import Config
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.runtime.placement import Placement
from fedmpi.runtime.tallies import COSTS, PHASES, WATCHED
from fedmpi.secagg.messages import (
    AdvertiseKeys,
    ConsistencyCheck,
    MaskedInput,
    ShareBatch,
    ShareKeys,
    Unmask,
    Withdrawal,
)
from fedmpi.wire.bits import packed_size
from fedmpi.wire.control import Adopted
from fedmpi.wire.message import Message
from fedmpi.wire.messages import (
    AskModel,
    EvalReport,
    PlainInput,
    PlainRows,
    Ready,
    SupportProposal,
    Tally,
    TrainReport,
)
from fedmpi.wire.phases import Purpose

#: Bytes of a figure in a tally, with its names: [12345, "ConsistencyCheck", "Shamir combine", 123.4567890123456]
FACT = 96


class Limits:
    def __init__(self, config: Config, algorithm: Algorithm, mechanism: Mechanism, placement: Placement):
        self._config, self._algorithm, self._mechanism, self._placement = config, algorithm, mechanism, placement
        self._by_hosted: dict[int, dict[int, int]] = {}

    def payload(self, source: int, kind: int) -> int | None:
        return self._of(source).get(kind)

    def largest(self, source: int) -> int:
        return max(self._of(source).values())

    def _of(self, source: int) -> dict[int, int]:
        hosted = len(self._placement.ever_of(source))
        if hosted not in self._by_hosted:  # ranks may take over parties of others
            self._by_hosted[hosted] = {kind.TYPE: size for kind, size in self._laws(hosted).items()}
        return self._by_hosted[hosted]

    def _laws(self, hosted: int) -> dict[type[Message], int]:
        """The largest payload of each type that comes up."""
        aggregation, shown = self._config.aggregation, self._config.privacy.shown
        tested = max(self._algorithm.score_columns, self._algorithm.reference_columns)
        laws: dict[type[Message], int] = {}
        if shown == "party":
            laws[TrainReport] = TrainReport.wire_size(hosted, len(self._algorithm.report_columns) + 2)
            laws[EvalReport] = EvalReport.wire_size(hosted, tested)
        if aggregation.aggregation != "secure":
            kind, size = self._in_the_clear(hosted)
            laws[kind] = size
        if aggregation.support == "union":
            laws[SupportProposal] = SupportProposal.wire_size(self._support())
        laws[AskModel] = AskModel.wire_size()
        laws[Ready] = Ready.wire_size(hosted, hosted if aggregation.adversary == "active" else 0)
        if self._config.run.on_loss == "adopt":
            laws[Adopted] = Adopted.LONGEST
        if aggregation.aggregation != "plain" or shown == "securesum":
            laws |= self._protocol(tested)
        laws[Tally] = self._tally(hosted, len(laws) + 1)
        return laws

    def _protocol(self, tested: int) -> dict[type[Message], int]:
        active, peers = self._config.aggregation.adversary == "active", self._config.run.parties - 1
        encoding, rounds = self._mechanism.encoding, self._config.aggregation.key_rounds
        vectors = (encoding.dimension, encoding.bits), (tested, 64)
        return {
            AdvertiseKeys: AdvertiseKeys.wire_size(active),
            ShareKeys: ShareKeys.wire_size(peers),
            MaskedInput: max(MaskedInput.wire_size(*vector, peers) for vector in vectors),
            Withdrawal: Withdrawal.wire_size(peers),
            Unmask: Unmask.wire_size(0, peers + 1),
            **({ShareBatch: ShareBatch.wire_size(peers, rounds)} if rounds else {}),
            **({ConsistencyCheck: ConsistencyCheck.wire_size()} if active else {}),
        }

    def _in_the_clear(self, hosted: int) -> tuple[type[Message], int]:
        encoding = self._mechanism.encoding
        if self._mechanism.form == "rows":
            width = self._mechanism.width
            matrix = encoding.dimension // width
            rows = min(hosted * matrix, max(MESSAGE_ROWS, matrix))
            return PlainRows, PlainRows.wire_size(hosted, rows, row_bits(matrix), encoding.own_bits, width)
        values = packed_size(encoding.dimension, encoding.bits)
        return PlainInput, PlainInput.wire_size(self._support(), values)

    def _support(self) -> int:
        """No support of a vector takes more bytes than a bit and a half for each coordinate, its count and padding
        (wire.support)."""
        return 16 + 2 * packed_size(self._algorithm.dimension, 1)

    def _tally(self, hosted: int, kinds: int) -> int:
        """A ledger row for the rank and for each party, by round, purpose and type of message, since the last checkpoint."""
        rounds = (self._config.run.checkpoint_every or self._config.run.rounds) + 1
        rows = rounds * kinds * len(Purpose) * (hosted + 1)
        figures = len(WATCHED) + (hosted + 1) * len(PHASES) * len(COSTS)
        return Tally.wire_size(rows, 256 + FACT * figures)
