"""Rank 0 has the parties of lost ranks taken over (--on-loss adopt), by the ranks that host fewest. A rank that was silent and is heard
of again gets its own back after the next checkpoint.

They go on from the last checkpoint. What they did since then is done once more (fedmpi.runtime.rank), so the models of the rounds since
the last checkpoint are kept here; beyond `MOST_KEPT` bytes they are not, and the parties of a rank that is lost then stay out.
"""

from collections.abc import Callable, Collection

import numpy as np

from fedmpi.config import Config
from fedmpi.errors import TransportError
from fedmpi.runtime.mailbox import Mailbox
from fedmpi.runtime.placement import named
from fedmpi.wire.control import Adopt, Adopted, Release
from fedmpi.wire.messages import Replay

MOST_KEPT = 1 << 30  # bytes


class Adoption:
    def __init__(self, config: Config, mailbox: Mailbox, say: Callable[[str], object]):
        self._config, self._mailbox, self._say = config, mailbox, say
        self._base = 0  # the round of the last checkpoint; 0: the beginning
        self._since: list[tuple[int, frozenset[int], np.ndarray]] = []  # (round, who was drawn, theta) after that
        self._whole = True  # nothing of it was forgotten
        self.moved = False  # whether parties came to another rank, which has none of the keys that they had
        self.unheard: set[int] = set()  # ranks that were lost before they could say who of theirs shares in the clear
        # Ranks that are heard of again, and were asked whether they are done with what they had missed.
        self._greeted: set[int] = set()

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
        for rank in sorted(self._greeted - self._mailbox.endpoint.muted):
            self._greeted.remove(rank)
            self._bring_home(rank)

    def mend(self) -> None:
        """Give everybody without a rank another one; who cannot be taken over is out for the rest of the run."""
        placement, conduct = self._mailbox.placement, self._mailbox.conduct
        self._greet()
        while self.wanted and (orphaned := [rank for rank in conduct.lost_ranks if placement.parties_of(rank)]):
            living = set(placement.ranks()) - conduct.gone_ranks
            if not living:
                raise TransportError(
                    f"{conduct.session}: no rank is left that could take {named(placement.parties_of(orphaned[0]))} over"
                )
            parts: dict[int, tuple[int, ...]] = {}
            why = self._why_not(orphaned[0])
            for host, part in placement.share_out(orphaned[0], living):
                if why:
                    self._give_up(part, why)
                    placement.move(part, host)
                else:
                    parts.setdefault(host, part)  # one at a time; the others in the next turn
            for host, part in parts.items():
                self._send(host, part)
            answers = self._answers(parts, 1 + len(self._since)) if parts else {}
            for host, part in parts.items():
                if host not in conduct.gone_ranks:
                    if answers.get(host, "it did not answer"):
                        self._give_up(part, answers.get(host, f"rank {host} did not answer (round_deadline)"))
                    else:
                        self._say(f"{named(part)} taken over by rank {host}, from round {self._base} on")
                        self.moved = True
                    placement.move(part, host)

    def _why_not(self, rank: int) -> str:
        """What keeps this rank's parties from being taken over, if anything does."""
        if rank in self.unheard:
            return f"rank {rank} was lost before it said who of them shares in the clear"
        return "" if self._whole else f"the models since round {self._base} are more than {MOST_KEPT >> 30} GiB"

    def _answers(self, ranks: Collection[int], turns: int = 1) -> dict[int, str]:
        """What each of them says was in the way; nothing: nothing was. `turns`: rounds that they do once more, each with its deadline."""
        answers: dict[int, str] = {}

        def take(rank: int, message: Adopted) -> str:
            answers[rank] = "".join(letter if letter.isprintable() else "?" for letter in message.why[:300])
            return ""

        session = f"{self._mailbox.conduct.session}, taking over"
        self._mailbox.collect(session, Adopted, take, ranks=ranks, turns=turns)
        return answers

    def _greet(self) -> None:
        endpoint = self._mailbox.endpoint
        for rank in sorted(endpoint.returned - self._greeted) if self.wanted else ():
            self._greeted.add(rank)
            endpoint.expect(rank, Adopted)
            endpoint.send(rank, Adopt())
            self._say(f"rank {rank} is heard of again; it gets its parties back after the next checkpoint")

    def _bring_home(self, rank: int) -> None:
        """From the checkpoint that was just made, which has what others did with them."""
        placement, conduct, endpoint = self._mailbox.placement, self._mailbox.conduct, self._mailbox.endpoint
        home = placement.home_of(rank)
        conduct.lost_ranks.discard(rank)
        endpoint.welcome(rank)
        endpoint.send(rank, Adopt(self._base, parties=home))
        why = self._answers({rank}).get(rank, "it did not answer")
        if rank in conduct.gone_ranks:
            return
        if why:
            self._say(f"rank {rank} stays without parties: {why}")
            return
        for holder, parties in placement.by_block(home):
            endpoint.send(holder, Release(parties=parties))
        placement.move(home, rank)
        self.moved = True
        self._say(f"{named(home)} back on rank {rank}, from round {self._base} on")

    def _give_up(self, parties: tuple[int, ...], why: str) -> None:
        self._mailbox.conduct.lost.update(parties)
        self._say(f"{named(parties)} left out for the rest of the run: {why}")

    def _send(self, host: int, part: tuple[int, ...]) -> None:
        again = [(round, tuple(sorted(drawn.intersection(part))), theta) for round, drawn, theta in self._since]
        again = [entry for entry in again if entry[1]]
        endpoint = self._mailbox.endpoint
        endpoint.send(host, Adopt(self._base, parties=part, replays=len(again)))
        for round, parties, theta in again:
            endpoint.send(host, Replay(round, parties=parties, theta=theta))
