"""What the ranks counted and measured of themselves, added up on rank 0: bytes, CPU seconds, memory."""

from collections import defaultdict
from typing import Any

import numpy as np
import psutil

from fedmpi.errors import DataError, ProtocolError
from fedmpi.runtime.stopwatch import Stopwatch
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.messages import Tally


def proportional_set_size() -> int:
    """Bytes of this process as PSS: pages shared by several ranks count once over all of them. Where the system does not tell it,
    the resident size, which counts shared pages in full."""
    memory = psutil.Process().memory_full_info()
    return int(getattr(memory, "pss", memory.rss))


class Tallies:
    def __init__(self, endpoint: Endpoint, watch: Stopwatch):
        self._endpoint, self._watch = endpoint, watch
        self._given = 0  # bytes that the other ranks gave to the transport
        self._memory: dict[int, int] = {}  # by rank
        self.costs: dict[tuple[int, str, str], float] = defaultdict(float)  # (party, phase, cost) -> CPU seconds

    @property
    def ledger(self):
        return self._endpoint.ledger

    def take(self, source: int, message: Tally) -> None:
        """A rank's tally since its last one."""
        try:
            costs = {(int(party), str(phase), str(cost)): float(s) for party, phase, cost, s in message.facts["costs"]}
            cpu = {str(phase): float(seconds) for phase, seconds in message.facts["cpu"].items()}
            self._memory[source] = int(message.facts["pss"])
            self.ledger.merge(message.rows)
        except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
            raise ProtocolError(f"rank {source} sent a tally that cannot be read ({error})") from None
        self._given += message.bytes_given
        self._watch.add(cpu)
        for key, seconds in costs.items():
            self.costs[key] += seconds

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
            "cpu": dict(self._watch.cpu),
            "wall": dict(self._watch.wall),
        }

    def restore(self, ledger: np.ndarray, state: dict[str, Any]) -> None:
        self.ledger.merge(ledger)
        self._given = state["given"]
        self.costs.update({(party, phase, cost): seconds for party, phase, cost, seconds in state["costs"]})
        self._watch.add(state["cpu"])
        for phase, seconds in state["wall"].items():
            self._watch.wall[phase] += seconds
