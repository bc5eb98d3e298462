"""How long a rank has not been heard of. Every rank sends its peers an empty message once a second, whatever it is at.

A rank that does not look cannot tell who was silent meanwhile: each look counts a little silence at most, however long ago the last
one was. A job that was suspended as a whole, or a rank 0 that was busy, blames nobody.
"""

import time
from collections.abc import Iterable

BEAT = 1.0  # seconds between two beats of a rank
NOTICE = 10.0  # seconds of silence after which it is spoken of, or half of the deadline if that is sooner


class Silence:
    """Of some ranks, towards a deadline."""

    def __init__(self, peers: Iterable[int], deadline: float):
        self.deadline = deadline
        self._silent = dict.fromkeys(peers, 0.0)
        self._noticed: set[int] = set()
        self._looked = time.monotonic()

    @property
    def notice(self) -> float:
        return min(NOTICE, self.deadline / 2)

    def heard(self, rank: int) -> None:
        if rank in self._silent:
            self._silent[rank] = 0.0
            self._noticed.discard(rank)

    def watch(self, rank: int) -> None:
        """This one as well."""
        self._silent[rank] = 0.0

    def forget(self, rank: int) -> None:
        """Nobody asks about this one any more."""
        self._silent.pop(rank, None)

    def look(self) -> tuple[list[int], list[int]]:
        """After everything that has come was `heard`: (who is silent long enough to be named, once; who is beyond the deadline)."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * BEAT), now
        for rank in self._silent:
            self._silent[rank] += passed
        named = [rank for rank, silent in self._silent.items() if silent >= self.notice and rank not in self._noticed]
        self._noticed.update(named)
        return named, [rank for rank, silent in self._silent.items() if silent >= self.deadline]
