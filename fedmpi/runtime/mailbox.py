"""Rank 0's post: what arrives, by when, and whether its sender may speak for whom it speaks; and what leaves, for which rank.

A rank that breaks the rules ends nobody's run: it is blamed, which takes it and its parties out of the session under way
(`runtime.conduct`), and the caller is told, so that it does not wait for them.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fedmpi.aggregation.base import Answers
from fedmpi.errors import TransportError
from fedmpi.log import log
from fedmpi.runtime.conduct import Conduct
from fedmpi.runtime.placement import Placement, named
from fedmpi.transport.endpoint import Endpoint, FrameError, RankLost
from fedmpi.wire.control import NOT_HEARD_OF, Stop
from fedmpi.wire.frame import NOBODY
from fedmpi.wire.message import Message, speakers
from fedmpi.wire.messages import AskModel
from fedmpi.wire.phases import Purpose

Kind = TypeVar("Kind", bound=Message)

#: Seconds behind a deadline that may go by over messages that nobody waits for, in search of one that came in time.
LINGER = 0.5


class Limit:
    """A deadline that wrong messages do not move, however many they are."""

    def __init__(self, deadline: float):
        self.deadline = deadline
        self._since: float | None = None

    def over(self) -> bool:
        """Asked after each wrong message. Counted from the first one behind the deadline: rank 0 may have been busy until then."""
        now = time.monotonic()
        if now >= self.deadline and self._since is None:
            self._since = now
        return self._since is not None and now >= self._since + LINGER


class Out(NamedTuple):
    """A rank, or a party of it, that was just taken out of the session."""

    rank: int
    parties: tuple[int, ...]
    lost: bool = False  # dead, or not heard of


Arrived = tuple[int, Message] | Out | None


@dataclass(frozen=True)
class Loss:
    """A rank that was lost, for the summary."""

    rank: int
    parties: tuple[int, ...]
    during: str
    why: str


def nobody(party: int) -> bool:
    return False


class Mailbox:
    def __init__(
        self,
        endpoint: Endpoint,
        placement: Placement,
        patience: float,
        conduct: Conduct | None = None,
        warn: Callable[[str], object] = print,
        on_loss: str = "drop",
    ):
        """`patience`: seconds that a rank, or a party at its local work, is waited for. `warn` says who was caught at what, and who
        was lost; `on_loss` as the setting."""
        self.endpoint, self.placement, self.patience, self._on_loss = endpoint, placement, patience, on_loss
        self.conduct, self._warn = conduct or Conduct(placement), warn
        # Who sends a rank all of a model, by its version, when it asks for that; False: it had been sent that.
        self.resend: Callable[[int, int], bool] = lambda rank, version: False
        self.losses: list[Loss] = []
        self.caught = 0  # offences that were named
        self._owed: set[tuple[int, type[Message]]] = set()  # what ranks were asked for and did not send in time

    # ---- what leaves ----

    def to_all(self, message: Message) -> None:
        for rank in self.placement.ranks():
            if rank not in self.conduct.lost_ranks:
                self.endpoint.send(rank, message)

    def to_hosts(self, parties: Iterable[int], message_for: Callable[[tuple[int, ...]], Message]) -> None:
        """One message to every rank that hosts some of `parties`, made for those; one for each block of them, if it took some over."""
        for rank, hosted in self.placement.by_block(parties):
            self.endpoint.send(rank, message_for(hosted))

    def answer(self, answers: Answers) -> None:
        for party, message in answers:
            self.endpoint.send(self.placement.rank_of(party), message)

    # ---- who breaks the rules ----

    def blame(self, rank: int, what: str, at_once: bool = False) -> Out:
        self._say(self.conduct.rank_offends(rank, what, at_once))
        if rank in self.conduct.benched_ranks:
            self.endpoint.mute(rank)
        return Out(rank, self.placement.parties_of(rank))

    def blame_speakers(self, rank: int, parties: tuple[int, ...], what: str) -> Out:
        """For a message that the session refused: the party whose it was, or the rank if it put several into one."""
        if len(parties) != 1:
            return self.blame(rank, f"sent what cannot be ({what})")
        self._say(self.conduct.party_offends(parties[0], what))
        return Out(rank, parties)

    def weigh(self, disputes: Collection[tuple[int, int]]) -> None:
        """What a session's disputes say together with all before them."""
        for line in self.conduct.weigh(disputes):
            self._say(line)

    def _say(self, line: str | None) -> None:
        if line is not None:
            self.caught += 1
            self._warn(line)

    def lose(self, loss: RankLost) -> Out:
        """A rank is dead, or not heard of. Its parties are as dropped as those that a plan has vanish; it ends the run if that is what
        was asked for, or if it was the last one."""
        parties = self.placement.parties_of(loss.rank)
        log.debug("%s", loss)
        self.conduct.lost_ranks.add(loss.rank)
        self.endpoint.mute(loss.rank)
        if self._on_loss == "end" or self.conduct.gone_ranks.issuperset(self.placement.ranks()):
            raise TransportError(f"{self.conduct.session}: {loss}")
        if self._on_loss == "drop":
            self.endpoint.send(loss.rank, Stop(code=NOT_HEARD_OF))  # should it come back
        fate = "until others have taken them over" if self._on_loss == "adopt" else "for the rest of the run"
        if self._on_loss == "drop":
            self.conduct.lost.update(parties)
        if parties:
            self._warn(f"{self.conduct.session}: {loss}; {named(parties)} left out {fate}")
        self.losses.append(Loss(loss.rank, parties, self.conduct.session, loss.why))
        return Out(loss.rank, parties, lost=True)

    def give_up(self, rank: int, why: str) -> Out:
        """A rank that is there and does not do what it was asked for, within the deadline of that, is lost like one that is silent."""
        self.endpoint.mute(rank)
        self.endpoint.lose(rank, why)
        return self.lose(RankLost(rank, why))

    def let_go(self, rank: int) -> Out | None:
        """A message that nobody reads; one too many of them is an offence."""
        if not self.conduct.let_go(rank):
            return None
        return self.blame(rank, "sends far more than it was asked for", at_once=self.conduct.is_out(rank))

    # ---- what arrives ----

    def take(self, deadline: float) -> Arrived:
        """The next message of a rank that is not out, and that rank; or a rank that has just gone out; None at the deadline."""
        limit = Limit(deadline)
        while True:
            out: Out | None
            try:
                arrived = self.endpoint.poll(max(0.0, deadline - time.monotonic()))
                if arrived is None:
                    return None
                source, message = arrived
                if isinstance(message, AskModel) and not self.conduct.is_out(source):
                    known = self.resend(source, message.round)
                    out = None if known else self.blame(source, "asked for a model that it had been sent")
                elif not self.conduct.is_out(source):
                    stranger = self._not_hosted(source, message)
                    if stranger is None:
                        return arrived
                    out = self.blame(source, f"spoke for party {stranger}, which it does not host")
                else:
                    out = self.let_go(source)
            except RankLost as loss:
                out = self.lose(loss)
            except FrameError as error:
                if error.lost or not self.conduct.is_out(error.source):
                    out = self.blame(error.source, f"sent what cannot be read ({error.what})", error.lost)
                else:
                    out = self.let_go(error.source)
            if out is not None:
                return out
            if limit.over():
                return None

    def take_of(self, round: int, purpose: Purpose, deadline: float, gone: Callable[[int], bool] = nobody) -> Arrived:
        """The next message of this session, as `take`. What is late, and the last words of a party that is `gone`, is let go of."""
        limit = Limit(deadline)
        while True:
            arrived = self.take(deadline)
            if arrived is None or isinstance(arrived, Out):
                return arrived
            source, message = arrived
            spoken_for = speakers(message)
            if not spoken_for and (source, type(message)) in self._owed:
                self._owed.remove((source, type(message)))  # too late for who asked, which is no offence
            elif not spoken_for:
                return self.blame(source, f"sent {type(message).__name__}, which is not its turn")
            if (message.round, message.purpose) == (round, purpose):
                self.conduct.in_time(source)
                if not all(map(gone, spoken_for)):
                    return arrived
            out = self.let_go(source)
            if out is not None:
                return out
            if limit.over():
                return None

    def collect(
        self,
        session: str,
        kind: type[Kind],
        take: Callable[[int, Kind], str],
        strict: bool = False,
        ranks: Collection[int] | None = None,
        turns: int = 1,
    ) -> set[int]:
        """One message of `kind` from every rank, or from some, that is neither benched nor lost; `take` is given each, and says what is
        wrong with it, if anything is. Returns the ranks without a good one. `strict` as in `Conduct.begin`; `turns`: how many rounds'
        work they may be at."""
        self.conduct.begin(session, strict)
        lacking = set(self.placement.ranks() if ranks is None else ranks)
        missing, limit = lacking - self.conduct.gone_ranks, Limit(time.monotonic() + turns * self.patience)
        log.debug("%s: waiting for %s of ranks %s", session, kind.__name__, sorted(missing))
        while missing:
            arrived = self.take(limit.deadline)
            out: Out | None = None
            if arrived is None:
                break
            if isinstance(arrived, Out):
                out = arrived
            elif speakers(arrived[1]):
                out = self.let_go(arrived[0])
            else:
                source, message = arrived
                wrong = f"sent {type(message).__name__}, expected {kind.__name__}"
                if (source, type(message)) in self._owed:
                    self._owed.remove(
                        (source, type(message))
                    )  # of the last time; the one that is asked for comes after it
                    continue
                if isinstance(message, kind) and source in missing:
                    self.conduct.in_time(source)
                    missing.remove(source)
                    wrong = take(source, message)
                if wrong:
                    out = self.blame(source, wrong)
                else:
                    lacking.remove(source)
                    continue
            if out is not None:
                missing.discard(out.rank)
            if limit.over():
                break
        self._owed |= {(rank, kind) for rank in missing}
        return lacking

    def _not_hosted(self, source: int, message: Message) -> int | None:
        """A party that it speaks for and this rank does not host."""
        hosted = self.placement.parties_of(source)
        for party in (*speakers(message), *([message.party] if message.party != NOBODY else ())):
            if not hosted or not hosted[0] <= party <= hosted[-1] or self.placement.rank_of(party) != source:
                return party
        return None
