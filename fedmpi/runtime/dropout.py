"""The dropout plan: who vanishes before which phase of which round, the same on every rank and in every repetition.

    --dropout 0.1                          each party vanishes before MaskedInput with probability 0.1, in every round
    --dropout mask=0.1,unmask=0.05         a rate per phase
    --dropout 3:7:share,4:0:unmask         events: round 3, party 7, before ShareKeys; ...

Phases: advertise, share, mask, check (active adversary only), unmask. A party that vanishes is back in the next round.
Under plain aggregation a party that vanishes before its input is missing, and one that vanishes later is not: its update
has left. The same plan therefore leaves the same survivors under both.
"""

from dataclasses import dataclass, field

from fedmpi.errors import ConfigError
from fedmpi.randomness.words import SeededWords, uniform
from fedmpi.runtime.metrics import EVALUATION

PHASES = {
    "advertise": "AdvertiseKeys",
    "share": "ShareKeys",
    "mask": "MaskedInput",
    "check": "ConsistencyCheck",
    "unmask": "Unmask",
}
BEFORE_INPUT = ("AdvertiseKeys", "ShareKeys", "MaskedInput")


@dataclass(frozen=True)
class DropoutPlan:
    seed: int = 0
    rates: dict[str, float] = field(default_factory=dict)  # by phase
    events: dict[tuple[int, int], str] = field(default_factory=dict)  # (round, party) -> phase

    def phase(self, round: int, party: int) -> str | None:
        """The phase before which the party vanishes in this round, or None."""
        if round >= EVALUATION:
            return None
        if (round, party) in self.events:
            return self.events[round, party]
        if not self.rates:
            return None
        draws = uniform(SeededWords(self.seed, "dropout", party, round).words(len(PHASES)))
        for name, draw in zip(PHASES.values(), draws, strict=True):
            if draw < self.rates.get(name, 0.0):
                return name
        return None

    def misses(self, round: int, party: int, phase: str) -> bool:
        """Whether the party's message of this phase never comes. `update` is the one message of plain aggregation."""
        planned = self.phase(round, party)
        return planned in BEFORE_INPUT if phase == "update" else planned == phase


def parse(text: str, seed: int, parties: int) -> DropoutPlan:
    rates, events = {}, {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        try:
            if ":" in part:
                round, party, phase = part.split(":")
                if not 0 <= int(party) < parties or int(round) < 1:
                    raise ConfigError(
                        f"dropout = {part}: the round starts at 1, the party is between 0 and {parties - 1}"
                    )
                events[int(round), int(party)] = PHASES[phase]
            else:
                phase, _, rate = part.rpartition("=")
                if not 0 <= float(rate) < 1:
                    raise ConfigError(f"dropout = {part}: a rate must be at least 0 and below 1")
                rates[PHASES[phase or "mask"]] = float(rate)
        except (ValueError, KeyError):
            raise ConfigError(
                f"dropout = {part}: must be RATE, PHASE=RATE or ROUND:PARTY:PHASE, with phases {', '.join(PHASES)}"
            ) from None
    return DropoutPlan(seed, rates, events)
