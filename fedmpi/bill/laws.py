"""A party's bytes in a round, message by message, from the size laws.

The bill is of a party that takes part, in a round in which everybody answers. It has two halves that do not mix: a training round, and
one evaluation. Downloads of the model are training's: a version comes to a party once, whether for a round or for a test before it, so
how often one evaluates does not change them (fedmpi.runtime.downloads).

A size is exact, or expected (~: a code whose length depends on what noise or training make of it), or a bound (≤: nothing but the range
of the values is known). Under support union the union of what parties propose is not known before a run; the bill takes it that all
propose the same, unless it is told.

One way of a phase is all that goes in one direction before somebody must wait for an answer. Two ways are a trip: the model down and the
update up are one, and the protocol has AdvertiseKeys up and down, ShareKeys up and down, MaskedInput up, Unmask down and up. Where keys are
made for a batch of rounds, what makes them is in the bill with its part of a round; trips are those of a round that has its keys.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fedmpi.aggregation import figures
from fedmpi.aggregation.protocol import ProtocolRules, Session, chosen_clear
from fedmpi.aggregation.rows import row_bits
from fedmpi.bill.shape import Setting, Shape
from fedmpi.config import Config, check
from fedmpi.errors import ConfigError
from fedmpi.privacy.encoding import Encoding
from fedmpi.privacy.mechanism import Mechanism
from fedmpi.secagg import messages as secagg
from fedmpi.secagg.rules import Rules
from fedmpi.wire.bits import packed_size
from fedmpi.wire.frame import FRAMING
from fedmpi.wire.message import Message
from fedmpi.wire.messages import (
    Delta,
    EvalReport,
    Evaluate,
    Model,
    PlainInput,
    PlainRows,
    SupportProposal,
    SupportUnion,
    Train,
    TrainReport,
)
from fedmpi.wire.phases import Phase, Purpose
from fedmpi.wire.sums import PACKED_HEAD, expected_size, most_size
from fedmpi.wire.support import expected_support_bits

EXACT, EXPECTED, MOST = "", "~", "≤"
UP, DOWN = "up", "down"


@dataclass(frozen=True)
class Line:
    """One kind of message to or from a party."""

    kind: type[Message]
    direction: str
    payload: float  # bytes of one
    sign: str = EXACT
    number: float = 1.0  # of them, to a party that gets any
    share: float = 1.0  # of the parties that take part
    often: float = 1.0  # of the rounds, on the average over the run: keys of a batch are made once
    batch: int = 0  # rounds of that batch; 0: it comes in every round

    @property
    def message(self) -> str:
        return self.kind.__name__

    @property
    def phase(self) -> Phase:
        return self.kind.PHASE

    @property
    def bytes(self) -> float:
        """With framing, of a party that gets any in a round that has it."""
        return self.number * (self.payload + FRAMING)

    @property
    def mean(self) -> float:
        """Of a party that takes part, in a round of the run."""
        return self.share * self.often * self.bytes


@dataclass(frozen=True)
class Bill:
    parties: int
    taking_part: float  # in a round, in the mean
    hidden: int  # of these, through the protocol
    degree: int  # neighbours in it
    coordinates: int
    bits: int
    training: tuple[Line, ...]
    evaluation: tuple[Line, ...]
    notes: tuple[str, ...] = field(default=())

    def lines(self, purpose: Purpose) -> tuple[Line, ...]:
        return self.training if purpose is Purpose.TRAINING else self.evaluation


def price(setting: Setting, parties: int, union: int | None = None) -> Bill:
    """The setting among so many parties; ConfigError where it cannot be. `union`: how many coordinates one has, if that is known."""
    config = _among(setting.config, parties)
    mechanism, shape = setting.mechanism(config), setting.shape
    clear, rules = chosen_clear(config), ProtocolRules(config, multiplier=setting.multiplier)
    rules.check(clear)
    settings, sampling = config.aggregation, config.privacy.sampling
    in_clear = len(clear) * sampling
    hidden = 0
    if len(clear) < parties:
        hidden = max(config.privacy.min_cohort, round((parties - len(clear)) * sampling))
    cohort = in_clear + hidden
    encoding = mechanism.encoding
    if settings.support == "union":
        encoding = mechanism.over(union or shape.proposed).encoding
    training: list[Line] = []
    degree = 0
    if shape.shares:
        training += _downloads(config, shape, mechanism, encoding, cohort)
        training.append(Line(Train, DOWN, Train.wire_size(1)))
        training += _agreement(config, shape, encoding)
        if in_clear:
            training.append(_in_the_clear(config, shape, mechanism, encoding, in_clear / cohort))
        if hidden:
            agreed = rules.of(Session(1), hidden, encoding)
            degree = agreed.degree
            training += _keys(config, agreed, hidden / cohort)
            training += _sum(agreed, hidden / cohort, EXPECTED if settings.support == "union" else EXACT)
        if config.privacy.shown == "party":
            training.append(Line(TrainReport, UP, TrainReport.wire_size(1, shape.report_columns)))
    return Bill(
        parties=parties,
        taking_part=cohort,
        hidden=hidden,
        degree=degree,
        coordinates=encoding.dimension,
        bits=encoding.bits,
        training=tuple(training),
        evaluation=tuple(_evaluation(config, shape, rules)),
        notes=tuple(_notes(config, mechanism, union, any(line.batch for line in training))),
    )


def _among(config: Config, parties: int) -> Config:
    settings = config.aggregation
    if settings.aggregation == "hybrid" and settings.clear_rule:
        raise ConfigError(
            f"clear_rule = {settings.clear_rule}: who shares in the clear is known once the data are looked at; "
            "list --clear-parties to have it priced"
        )
    return check(dataclasses.replace(config, run=dataclasses.replace(config.run, parties=parties)))


# ---- its parts ----


def _downloads(config: Config, shape: Shape, mechanism: Mechanism, encoding: Encoding, cohort: float) -> Iterator[Line]:
    """The next model: the sum that made it, or all of it. Who is drawn seldom has missed some, and is brought them one by one as long
    as they are shorter than the model."""
    whole = Model.wire_size(shape.dimension, shape.state_bytes)
    size, sign = _delta(config, shape, mechanism, encoding, cohort)
    if config.aggregation.download == "full":
        whole = Model.wire_size(shape.dimension)  # nobody follows from there
    if config.aggregation.download == "full" or size > whole:
        yield Line(Model, DOWN, whole)
        return
    q, kept = config.privacy.sampling, int(whole // size)
    if q >= 1:
        yield Line(Delta, DOWN, size, sign)
        return
    # A party was asked last g rounds ago with probability q (1 - q)^(g - 1).
    late = (1 - q) ** kept
    missed = (1 - late) / q - kept * late  # deltas that it is brought, in the mean
    yield Line(Delta, DOWN, size, sign, number=missed)
    if late > 1e-9:
        yield Line(Model, DOWN, whole, EXPECTED, number=late)


def _delta(config: Config, shape: Shape, mechanism: Mechanism, encoding: Encoding, cohort: float) -> tuple[float, str]:
    """(payload bytes, how sure) of the sum that made a model, as it is sent."""
    support, values, count = 0.0, 0.0, encoding.dimension
    scattered = False
    if config.aggregation.support == "union":
        support = expected_support_bits(count, shape.dimension) / 8
    elif config.aggregation.support == "own" and count < shape.dimension and mechanism.form == "vector":
        # Where nobody sent anything the sum is zero; few such zeros are coded with the rest.
        scattered = 2 * count < shape.dimension
        support = shape.support_bytes if scattered else 0
    over = shape.dimension if config.aggregation.support == "own" and not scattered else count
    if mechanism.noisy:
        deviation = mechanism.summed * encoding.sensitivity
        values = expected_size(over, deviation * (count / over) ** 0.5)
        return Delta.LAYOUT.size + support + values, EXPECTED
    largest = math.floor(cohort) * encoding.steps
    if mechanism.form == "vector" and config.aggregation.support != "own":
        # No update is longer than the bound on its norm, so no sum than all of them in one direction.
        deviation = cohort * encoding.sensitivity / math.sqrt(over)
        return Delta.wire_size(int(support), most_size(over, deviation, largest)), MOST
    return Delta.wire_size(int(support), PACKED_HEAD.size + packed_size(over, (2 * largest).bit_length())), MOST


def _agreement(config: Config, shape: Shape, encoding: Encoding) -> Iterator[Line]:
    if config.aggregation.support == "union":
        size = SupportUnion.wire_size(round(expected_support_bits(encoding.dimension, shape.dimension) / 8))
        if encoding.dimension == shape.proposed:
            size = shape.support_bytes
        yield Line(SupportProposal, UP, SupportProposal.wire_size(shape.support_bytes), EXPECTED)
        yield Line(SupportUnion, DOWN, size, EXPECTED)


def _in_the_clear(config: Config, shape: Shape, mechanism: Mechanism, encoding: Encoding, share: float) -> Line:
    if mechanism.form == "rows":
        matrix, width = encoding.dimension // mechanism.width, mechanism.width
        fixed = PlainRows.wire_size(1, 0, row_bits(matrix), encoding.own_bits, width)
        each = (row_bits(matrix) + width * encoding.own_bits) / 8
        if config.data.dataset == "none" or not shape.rows:
            size = PlainRows.wire_size(1, matrix, row_bits(matrix), encoding.own_bits, width)
            return Line(PlainRows, UP, size, MOST, share=share)
        return Line(PlainRows, UP, fixed + min(shape.rows, matrix) * each + 0.9, EXPECTED, share=share)
    own = shape.support_bytes if config.aggregation.support == "own" and encoding.dimension < shape.dimension else 0
    size = PlainInput.wire_size(own, packed_size(encoding.dimension, encoding.bits))
    return Line(PlainInput, UP, size, EXPECTED if own or config.aggregation.support == "union" else EXACT, share=share)


def _keys(config: Config, rules: Rules, share: float = 1.0) -> Iterator[Line]:
    """Made for every round, or for batches of them, the last of which may be a short one."""
    size, rounds, peers = config.aggregation.key_rounds, config.run.rounds, rules.degree
    made = {0: 1.0}  # rounds of a batch -> the share of the rounds that make keys for so many
    if size:
        made = {
            length: number / rounds
            for length, number in ((size, rounds // size), (rounds % size, 1))
            if length * number
        }
    for batch, often in made.items():

        def line(kind: type[Message], direction: str, payload: int, often: float = often, batch: int = batch) -> Line:
            return Line(kind, direction, payload, share=share, often=often, batch=batch)

        yield line(secagg.AdvertiseKeys, UP, secagg.AdvertiseKeys.wire_size(rules.active))
        yield line(secagg.KeyList, DOWN, secagg.KeyList.wire_size(peers, rules.active, not rules.complete))
        if batch:
            yield line(secagg.ShareBatch, UP, secagg.ShareBatch.wire_size(peers, batch))
        else:
            yield line(secagg.ShareKeys, UP, secagg.ShareKeys.wire_size(peers))
        yield line(secagg.ShareList, DOWN, secagg.ShareList.wire_size(peers, batch))


def _sum(rules: Rules, share: float = 1.0, of_input: str = EXACT) -> Iterator[Line]:
    """A party whose neighbours all hold its shares; nobody drops out. `of_input`: how sure its length is."""
    peers, active, everyone = rules.degree, rules.active, rules.cohort

    def line(kind: type[Message], direction: str, size: int, sign: str = EXACT) -> Line:
        return Line(kind, direction, size, sign, share=share)

    yield line(secagg.MaskedInput, UP, secagg.MaskedInput.wire_size(rules.dimension, rules.bits), of_input)
    if active:
        yield line(secagg.SurvivorList, DOWN, secagg.SurvivorList.wire_size(everyone))
        yield line(secagg.ConsistencyCheck, UP, secagg.ConsistencyCheck.wire_size())
    yield line(secagg.UnmaskRequest, DOWN, secagg.UnmaskRequest.wire_size(peers + 1, everyone if active else 0))
    yield line(secagg.Unmask, UP, secagg.Unmask.wire_size(peers + 1))


def _evaluation(config: Config, shape: Shape, rules: ProtocolRules) -> Iterator[Line]:
    """Every party, each on its own data."""
    shown = config.privacy.shown
    if shown == "none":
        return
    yield Line(Evaluate, DOWN, Evaluate.wire_size(1))
    if shown == "party":
        yield Line(EvalReport, UP, EvalReport.wire_size(1, shape.score_columns))
    else:
        agreed = rules.of(Session(1, Purpose.TEST), config.run.parties, figures.encoding(shape.score_columns))
        every_time = dataclasses.replace(config.aggregation, keys="round")
        yield from _keys(dataclasses.replace(config, aggregation=every_time), agreed)
        yield from _sum(agreed)


def _notes(config: Config, mechanism: Mechanism, union: int | None, batched: bool) -> Iterator[str]:
    if config.aggregation.support == "union" and union is None:
        yield "union: it is taken that all parties propose the same coordinates; more of them cost more"
    if config.privacy.sampling < 1:
        yield (
            f"sampling {config.privacy.sampling:g}: of a party in a round that it is drawn for; the cohort is taken to have its "
            "expected size, and missed models are counted where they are caught up on"
        )
    if config.aggregation.dropout:
        yield "dropout: nobody drops out in a bill; who vanishes sends less, and opening its masks costs the others little"
    if batched:
        size = min(config.aggregation.key_rounds, config.run.rounds)
        yield f"keys: made once in {size} rounds, in two more trips; their bytes and seconds are shared out over the rounds"
    if not mechanism.noisy and config.aggregation.download == "delta":
        yield "without noise only the range and the norm of a sum are known: its size is a bound"


# ---- how long rank 0 waits ----

LATER = (Phase.SHARE_KEYS, Phase.MASKED_INPUT, Phase.CONSISTENCY_CHECK, Phase.UNMASK)


def deadline(config: Config, phase: Phase) -> float:
    """Seconds after which rank 0 goes on without who is late. Up to its first answer a party has the time for its local work."""
    return config.aggregation.phase_deadline if phase in LATER else config.run.round_deadline


# ---- sums of lines ----


def total(lines: Iterable[Line], direction: str, phase: Phase | None = None) -> float:
    """Bytes with framing, of a party that takes part."""
    return sum(line.mean for line in lines if line.direction == direction and phase in (None, line.phase))


def surety(lines: Iterable[Line]) -> str:
    """Of a sum of them."""
    signs = {line.sign for line in lines}
    return MOST if MOST in signs else EXPECTED if EXPECTED in signs else EXACT


def phases(lines: Iterable[Line]) -> list[Phase]:
    """Those that come up, in the order of a run."""
    found = {line.phase for line in lines}
    return [phase for phase in Phase if phase in found]


def ways(found: Iterable[tuple[Phase, str]]) -> int:
    """(phase, direction) pairs that somebody waits for. A report goes with the update, and nobody waits for it alone; where some share
    in the clear, theirs comes while the others are at their keys."""
    pairs = {(phase, direction) for phase, direction in found if phase is not Phase.REPORT}
    if any(phase is Phase.MASKED_INPUT for phase, _ in pairs):
        pairs.discard((Phase.UPDATE, UP))
    return len(pairs)


def trips(lines: Iterable[Line]) -> int:
    """Rounds of messages between a party and rank 0: two ways each. Of a round that has its keys, where they are made for several."""
    return -(-ways((line.phase, line.direction) for line in lines if not line.batch) // 2)
