"""What the ranks counted and measured of themselves, added up on rank 0: bytes, CPU seconds, memory."""

from collections import defaultdict
from typing import Any

import numpy as np
import psutil

from fedmpi.errors import DataError, ProtocolError
from fedmpi.runtime.placement import Placement
from fedmpi.runtime.stopwatch import ORDER, Stopwatch
from fedmpi.transport.endpoint import Endpoint
from fedmpi.transport.ledger import COUNTS, DIRECTIONS, KEYS
from fedmpi.wire.frame import NOBODY
from fedmpi.wire.messages import Tally
from fedmpi.wire.phases import Cost, Phase

Cell = tuple[int, str, str]  # party, phase, cost

# What a client measures, by name: others would be rows of costs.csv and of the closing table.
PHASES, COSTS = frozenset(map(str, Phase)), frozenset(map(str, Cost))
MOST_SECONDS, MOST_MEMORY = 1e9, 1 << 50  # thirty years, a million gigabytes
WATCHED = COSTS.union(map(str, ORDER))


def proportional_set_size() -> int:
    """Bytes of this process as PSS: pages shared by several ranks count once over all of them. Where the system does not tell it,
    the resident size, which counts shared pages in full."""
    memory = psutil.Process().memory_full_info()
    return int(getattr(memory, "pss", memory.rss))


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < MOST_SECONDS:
        raise ValueError(f"{seconds:g} seconds")
    return seconds


class Tallies:
    def __init__(self, endpoint: Endpoint, placement: Placement, watch: Stopwatch):
        self._endpoint, self._placement, self._watch = endpoint, placement, watch
        self.untallied: set[int] = set()  # ranks with bytes and seconds that are in no tally
        self._given = 0  # bytes that the other ranks gave to the transport
        self._memory: dict[int, int] = {}  # by rank
        self.costs: dict[Cell, float] = defaultdict(float)  # (party, phase, cost) -> CPU seconds

    @property
    def ledger(self):
        return self._endpoint.ledger

    def take(self, source: int, message: Tally) -> str:
        """A rank's tally since its last one. What cannot be about it, if anything: then nothing of it is used."""
        try:
            costs, cpu, pss = self._facts(source, message.facts)
            self._check_rows(source, message)
            self.ledger.merge(message.rows)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, DataError) as error:
            return f"sent a tally that cannot be ({str(error)[:200] or type(error).__name__})"
        self._given += message.bytes_given
        self._memory[source] = pss
        self._watch.add(cpu)
        for key, seconds in costs:
            self.costs[key] += seconds
        return ""

    def _facts(self, source: int, facts: dict[str, Any]) -> tuple[list[tuple[Cell, float]], dict[str, float], int]:
        """(costs, CPU seconds by phase, bytes of memory) as the rank measured them; ValueError and its like for others."""
        hosted = {NOBODY, *self._placement.ever_of(source)}
        costs = [((int(party), str(phase), str(cost)), _seconds(s)) for party, phase, cost, s in facts["costs"]]
        for (party, phase, cost), _ in costs:
            if party not in hosted or phase not in PHASES or cost not in COSTS:
                raise ValueError(f"a cost of party {party}, {phase[:40]!r}, {cost[:40]!r}")
        cpu = {str(phase): _seconds(seconds) for phase, seconds in facts["cpu"].items()}
        for phase in cpu:
            if phase not in WATCHED:
                raise ValueError(f"seconds of {phase[:40]!r}, which nobody measures")
        pss = int(facts["pss"])
        if not 0 <= pss < MOST_MEMORY:
            raise ValueError(f"{pss:g} bytes of memory")
        return costs, cpu, pss

    def _check_rows(self, source: int, message: Tally) -> None:
        """Its rows are about itself, and add up to the bytes that have arrived here: every message of a client comes to rank 0."""
        keys = dict(zip(KEYS, message.rows[:, : len(KEYS)].T))
        counts = message.rows[:, len(KEYS) :]
        if not ((keys["rank"] == source) & (keys["direction"] == DIRECTIONS.index("up"))).all():
            raise ValueError("rows of another rank's messages")
        if (counts < 0).any() or not np.isin(keys["party"], (NOBODY, *self._placement.ever_of(source))).all():
            raise ValueError("rows of other parties, or of less than nothing")
        # As Python's integers: a sum that wraps could be any number.
        sums = {name: sum(column.tolist()) for name, column in zip(COUNTS, counts.T)}
        added, taken = sums["wire_payload"] + sums["wire_framing"], self._endpoint.taken_by_tally.get(source, 0)
        if not added == message.bytes_given == taken:
            raise ValueError(f"rows of {added} bytes, {message.bytes_given} given, {taken} have arrived")
        # A message has a byte at least, and none would be longer on a link of one party's own.
        if max(sums.values()) > taken * len(self._placement.ever_of(source)):
            raise ValueError(
                f"more messages, or more bytes of its parties, than can be of {taken} bytes that have arrived"
            )

    def check(self) -> None:
        """Every byte that was given to the transport is in the ledger, and no other."""
        given, counted = self._given + self._endpoint.bytes_given, self.ledger.bytes_given()
        if given != counted:
            raise ProtocolError(f"the ledger counts {counted} bytes, the ranks gave {given} to the transport")

    def memory(self) -> int:
        return sum(self._memory.values()) + proportional_set_size()

    # ---- for a checkpoint ----

    def state(self) -> tuple[np.ndarray, dict[str, Any]]:
        return self.ledger.table(), {
            "costs": [[*key, seconds] for key, seconds in self.costs.items()],
            "given": self._given + self._endpoint.bytes_given,
            "untallied": sorted(self.untallied),
            "cpu": dict(self._watch.cpu),
            "wall": dict(self._watch.wall),
        }

    def restore(self, ledger: np.ndarray, state: dict[str, Any]) -> None:
        self.ledger.merge(ledger)
        self._given = state["given"]
        self.untallied.update(state.get("untallied", ()))
        self.costs.update({(party, phase, cost): seconds for party, phase, cost, seconds in state["costs"]})
        self._watch.add(state["cpu"])
        for phase, seconds in state["wall"].items():
            self._watch.wall[phase] += seconds
