"""Rank 0 has the parties of lost ranks taken over (--on-loss adopt), by the ranks that host fewest.

They go on from the last checkpoint. What they did since then is done once more (fedmpi.runtime.rank), so the models of the rounds since
the last checkpoint are kept here; beyond `MOST_KEPT` bytes they are not, and the parties of a rank that is lost then stay out.
"""

from collections.abc import Callable

import numpy as np

from fedmpi.config import Config
from fedmpi.runtime.mailbox import Mailbox
from fedmpi.runtime.placement import named
from fedmpi.wire.control import Adopt, Adopted
from fedmpi.wire.messages import Replay

MOST_KEPT = 1 << 30  # bytes


class Adoption:
    def __init__(self, config: Config, mailbox: Mailbox, say: Callable[[str], object]):
        self._config, self._mailbox, self._say = config, mailbox, say
        self._base = 0  # the round of the last checkpoint; 0: the beginning
        self._since: list[tuple[int, frozenset[int], np.ndarray]] = []  # (round, who was drawn, theta) after that
        self._whole = True  # nothing of it was forgotten

    @property
    def wanted(self) -> bool:
        return self._config.run.on_loss == "adopt"

    def asked(self, round: int, drawn: tuple[int, ...], theta: np.ndarray) -> None:
        """A round is about to be trained."""
        if not self.wanted:
            return
        self._since.append((round, frozenset(drawn), theta))
        if sum(theta.nbytes for _, _, theta in self._since) > MOST_KEPT:
            self._since.clear()
            self._whole = False

    def checkpointed(self, round: int) -> None:
        """Every party's state of this round is on the disk."""
        self._base, self._whole = round, True
        self._since = [entry for entry in self._since if entry[0] > round]

    def mend(self) -> None:
        """Give everybody without a rank another one; who cannot be taken over is out for the rest of the run."""
        placement, conduct = self._mailbox.placement, self._mailbox.conduct
        while self.wanted and (orphaned := [rank for rank in conduct.lost_ranks if placement.parties_of(rank)]):
            living = set(placement.ranks()) - conduct.gone_ranks
            parts: dict[int, tuple[int, ...]] = {}
            for host, part in placement.share_out(orphaned[0], living):
                parts.setdefault(host, part)  # one at a time; the others in the next turn
                if not self._whole:
                    self._give_up(part, f"the models since round {self._base} are more than {MOST_KEPT >> 30} GiB")
                    placement.move(part, host)
            if not self._whole:
                continue
            for host, part in parts.items():
                self._send(host, part)
            answers: dict[int, str] = {}

            def take(rank: int, message: Adopted, answers=answers) -> str:
                answers[rank] = message.why[:300]
                return ""

            during = conduct.session
            self._mailbox.collect(f"{during}, taking over", Adopted, take, ranks=parts)
            for host, part in parts.items():
                if host not in conduct.gone_ranks:
                    if answers.get(host, "it did not answer"):
                        self._give_up(part, answers.get(host, f"rank {host} did not answer (round_deadline)"))
                    else:
                        self._say(f"{named(part)} taken over by rank {host}, from round {self._base} on")
                    placement.move(part, host)

    def _give_up(self, parties: tuple[int, ...], why: str) -> None:
        self._mailbox.conduct.lost.update(parties)
        self._say(f"{named(parties)} left out for the rest of the run: {why}")

    def _send(self, host: int, part: tuple[int, ...]) -> None:
        again = [(round, tuple(sorted(drawn.intersection(part))), theta) for round, drawn, theta in self._since]
        again = [entry for entry in again if entry[1]]
        endpoint = self._mailbox.endpoint
        endpoint.send(host, Adopt(self._base, parties=part, replays=len(again)))
        for round, parties, theta in again:
            endpoint.send(host, Replay(round, parties=parties, cohort=len(parties), theta=theta))
