"""The dropout plan: who vanishes before which phase of which round, the same on every rank and in every repetition.

    --dropout 0.1                          each party vanishes before MaskedInput with probability 0.1, in every round
    --dropout mask=0.1,unmask=0.05         a rate per phase
    --dropout 3:7:share,4:0:unmask         events: round 3, party 7, before ShareKeys; ...
    --dropout 3:7:share,4+:7:advertise     the same, and from round 4 on it does not come back

Phases: advertise, share, mask, check (active adversary only), unmask; and support, before all of them: with --support union a party has then
no coordinates in the union either, elsewhere it is as advertise. A party that vanishes is back in the next round, unless it
vanishes from a round on (`4+`), as those of a rank that was lost. What a run lost stands in its summary in this notation.
Under plain aggregation a party that vanishes before its input is missing, and one that vanishes later is not: its update
has left. The same plan therefore leaves the same survivors under both. Sums of test figures are not in the plan.

Where keys are made for several rounds (`--keys batch:16`: in rounds 1, 17, 33, ...), a party that vanishes before advertise or share of the
round that makes them has none, and is missing from all rounds of the batch; in other rounds these phases are as mask. Under plain
aggregation, where there are no keys, the plan means the same.

Two wrappers carry it out, around whatever sessions there are: a party's withholds the message that never comes, and the
server's does not wait for it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from fedmpi.aggregation.base import Answers, Forwarding, PartySession, ServerSession
from fedmpi.config import Config
from fedmpi.errors import ConfigError
from fedmpi.randomness.words import SeededWords, uniform
from fedmpi.wire.message import Message
from fedmpi.wire.phases import Phase

PHASES = {
    "advertise": Phase.ADVERTISE_KEYS,
    "share": Phase.SHARE_KEYS,
    "mask": Phase.MASKED_INPUT,
    "check": Phase.CONSISTENCY_CHECK,
    "unmask": Phase.UNMASK,
    "support": Phase.SUPPORT,
}
WITHOUT_KEYS = (Phase.SUPPORT, Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS)
BEFORE_INPUT = (*WITHOUT_KEYS, Phase.MASKED_INPUT)
BEGINS = (
    Phase.ADVERTISE_KEYS,
    Phase.MASKED_INPUT,
)  # what a round of the protocol begins with, as it has keys to make or not


@dataclass(frozen=True)
class DropoutPlan:
    seed: int = 0
    rates: dict[Phase, float] = field(default_factory=dict)
    events: dict[tuple[int, int], Phase] = field(default_factory=dict)  # (round, party) -> phase
    gone: dict[int, tuple[int, Phase]] = field(default_factory=dict)  # party -> (the first round, phase)
    batch: int = 0  # rounds that have their keys made together; 0: every round has its own

    def phase(self, round: int, party: int) -> Phase | None:
        """The phase before which the party vanishes in this round, or None."""
        if not self.batch:
            return self._named(round, party)
        first = (round - 1) // self.batch * self.batch + 1
        at_first = self._named(first, party)
        if round == first:
            return at_first
        if at_first in WITHOUT_KEYS:
            return Phase.SUPPORT
        named = self._named(round, party)
        return Phase.MASKED_INPUT if named in (Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS) else named

    def _named(self, round: int, party: int) -> Phase | None:
        """As it was asked for."""
        if (round, party) in self.events:
            return self.events[round, party]
        if party in self.gone and round >= self.gone[party][0]:
            return self.gone[party][1]
        if not self.rates:
            return None
        draws = uniform(SeededWords(self.seed, "dropout", party, round).words(len(PHASES)))
        for name, draw in zip(PHASES.values(), draws, strict=True):
            if draw < self.rates.get(name, 0.0):
                return name
        return None

    def misses(self, round: int, party: int, phase: str) -> bool:
        """Whether the party's message of this phase never comes. `update` is the one message of plain aggregation. Who does
        not send its support does not begin the protocol either."""
        planned = self.phase(round, party)
        if phase == Phase.UPDATE:
            return planned in BEFORE_INPUT
        return planned == phase or (planned == Phase.SUPPORT and phase in BEGINS)


def parse(text: str, seed: int, parties: int) -> DropoutPlan:
    rates: dict[Phase, float] = {}
    events: dict[tuple[int, int], Phase] = {}
    gone: dict[int, tuple[int, Phase]] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        try:
            if ":" in part:
                first, party, phase = part.split(":")
                round = first.removesuffix("+")
                if not 0 <= int(party) < parties or int(round) < 1:
                    raise ConfigError(
                        f"dropout = {part}: the round starts at 1, the party is between 0 and {parties - 1}"
                    )
                if round == first:
                    events[int(round), int(party)] = PHASES[phase]
                else:
                    gone[int(party)] = int(round), PHASES[phase]
            else:
                phase, _, rate = part.rpartition("=")
                if not 0 <= float(rate) < 1:
                    raise ConfigError(f"dropout = {part}: a rate must be at least 0 and below 1")
                rates[PHASES[phase or "mask"]] = float(rate)
        except (ValueError, KeyError):
            raise ConfigError(
                f"dropout = {part}: must be RATE, PHASE=RATE, ROUND:PARTY:PHASE or ROUND+:PARTY:PHASE, with phases {', '.join(PHASES)}"
            ) from None
    return DropoutPlan(seed, rates, events, gone)


def plan_of(config: Config) -> DropoutPlan:
    settings = config.aggregation
    plan = parse(settings.dropout, config.run.seed, config.run.parties)
    return replace(plan, batch=settings.key_rounds)


def planned(round: int | str, party: int, phase: str) -> str:
    """One event in the notation of the plan; of the message of plain aggregation, a phase that misses it."""
    names = {phase: name for name, phase in PHASES.items()} | {Phase.UPDATE: "mask"}
    return f"{round}:{party}:{names[Phase(phase)]}"


class VanishingParty(PartySession):
    """A party whose message of the planned phase, and what would follow it, is never sent."""

    def __init__(self, inner: PartySession, plan: DropoutPlan, round: int, party: int):
        self._inner, self._plan, self._round, self._party = inner, plan, round, party

    def start(self) -> Iterable[Message]:
        return self._left(self._inner.start())

    def receive(self, message: Message) -> Iterable[Message]:
        return self._left(self._inner.receive(message))

    def _left(self, messages: Iterable[Message]) -> Iterable[Message]:
        return [message for message in messages if not self._plan.misses(self._round, self._party, message.PHASE)]


class ForewarnedServer(Forwarding):
    """A server that knows the plan: whoever vanishes before a phase is not waited for in it."""

    def __init__(
        self,
        inner: ServerSession,
        plan: DropoutPlan,
        round: int,
        cohort: Collection[int],
        clear: Collection[int],
    ):
        super().__init__(inner)
        self._plan, self._round, self._cohort, self._clear = plan, round, cohort, clear
        self._phase: str | None = None
        self._vanished: set[int] = set()

    def start(self) -> Answers:
        # Who has no keys, because it vanished when they were made, is not waited for in the first place.
        for party in set(self._cohort) - set(self._inner.waiting()):
            if self._plan.misses(self._round, party, self.phase_name):
                self._vanished.add(party)
        return super().start()

    def _onwards(self, answers: Answers) -> Answers:
        """Let go of the planned, in this phase and in those that end with it."""
        while not self.done and self.phase_name != self._phase:
            self._phase = self.phase_name
            for party in self.waiting():
                in_clear = party in self._clear and self._phase != Phase.SUPPORT
                if self._plan.misses(self._round, party, Phase.UPDATE if in_clear else self._phase):
                    self._vanished.add(party)
                    answers = answers + self._inner.drop(party)
        return answers

    @property
    def planned(self) -> int:
        return len(self._vanished)

    @property
    def vanished(self) -> Collection[int]:
        return self._vanished
