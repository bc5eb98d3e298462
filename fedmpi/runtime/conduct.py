"""Who broke the rules, who is out of the session under way for it, and who is out for the rest of the run.

A session is one exchange of rank 0 with everybody: a round, a test, a gathering of tallies. Whoever offends in one is out of it and
is named once; whoever offends in a second one, or does not stop sending when it is out, is benched. A rank is out with all the
parties that it hosts, a party by itself. Being late is no offence: late messages are let go of, as long as they are no more than
an honest rank can owe.

Benched parties stay in every cohort that is announced, as those that the dropout plan has vanish before the first phase: the size of
the cohort, the shares of the noise and the threshold are those of everybody. So do the parties of a rank that was lost, dead or not
heard of, which is no offence.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

from fedmpi.runtime.placement import Placement, named
from fedmpi.secagg.disputes import who_leaves

#: Messages of one party in one session, at most: a report, a support, an update, and the five of the protocol.
MESSAGES = 8


class Conduct:
    def __init__(self, placement: Placement, bench_at: int = 2, messages: int = MESSAGES):
        """`bench_at`: the number of the session with an offence after which a rank or a party is benched."""
        self._placement, self._bench_at, self._messages = placement, bench_at, messages
        self._rank_offences: Counter[int] = Counter()  # sessions in which each offended
        self._party_offences: Counter[int] = Counter()
        self.benched_ranks: set[int] = set()
        self._benched: set[int] = set()  # parties, those of benched ranks among them
        self._disputes: set[tuple[int, int]] = set()  # (holder, dealer) of the whole run
        self.lost_ranks: set[int] = set()
        self.lost: set[int] = set()  # parties that are out for the rest of the run with the rank that hosted them
        self.behind: set[int] = set()  # ranks that have not taken what they were sent long ago
        self._session, self._sessions, self._strict = "", 0, False
        self._out_ranks: set[int] = set()
        self._out_parties: set[int] = set()
        self._in_time: Counter[int] = Counter()  # rank -> the session of its last message that came in time
        self._let_go: Counter[int] = Counter()  # rank -> its messages since then that did not

    def begin(self, session: str, strict: bool = False) -> None:
        """Whoever was out is in again, unless benched. `session`: its name in front of every complaint; `strict`: one in which a
        rank's first offence is its last."""
        self._session, self._sessions, self._strict = session, self._sessions + 1, strict
        self._out_ranks.clear()
        self._out_parties.clear()

    @property
    def benched(self) -> tuple[int, ...]:
        return tuple(sorted(self._benched))

    def is_absent(self, party: int) -> bool:
        """Not told of a session, and not waited for in it: benched, lost, or of a rank that does not even take its post."""
        if party in self._benched or party in self.lost:
            return True
        rank = self._placement.rank_of(party)
        return rank in self.lost_ranks or rank in self.behind

    def is_out(self, rank: int) -> bool:
        return rank in self._out_ranks or rank in self.gone_ranks

    @property
    def gone_ranks(self) -> set[int]:
        """Of which nothing more is expected."""
        return self.benched_ranks | self.lost_ranks

    @property
    def session(self) -> str:
        """The name of the one that is under way."""
        return self._session

    # ---- offences: each returns the line that is to be said, or none if that was said already ----

    def rank_offends(self, rank: int, what: str, at_once: bool = False) -> str | None:
        """`at_once`: it is not to be heard again, whatever it did before."""
        if rank in self.benched_ranks:
            return None
        first = rank not in self._out_ranks
        if first:
            self._out_ranks.add(rank)
            self._rank_offences[rank] += 1
            self._let_go[rank] = 0
        elif not at_once:
            return None
        hosted = self._placement.parties_of(rank)
        line = f"{self._session}: rank {rank} {what}; {named(hosted)} "
        if not (at_once or self._strict) and self._rank_offences[rank] < self._bench_at:
            return line + "left out of it"
        self.benched_ranks.add(rank)
        self._benched.update(hosted)
        return line + "left out for the rest of the run"

    def party_offends(self, party: int, what: str) -> str | None:
        """`what` names the party."""
        if party in self._out_parties or party in self._benched:
            return None
        self._out_parties.add(party)
        self._party_offences[party] += 1
        if self._party_offences[party] < self._bench_at:
            return f"{self._session}: {what}; it is treated as dropped"
        self._benched.add(party)
        return f"{self._session}: {what}; not for the first time, left out for the rest of the run"

    def weigh(self, disputes: Collection[tuple[int, int]]) -> list[str]:
        """Of a pair in dispute nobody can tell who lies, and none of them is benched for it, however often. Whoever is in dispute
        with parties of several ranks, counted over the run, and with more than any of them, has offended in this session."""
        self._disputes |= set(disputes)
        lines = []
        rank_of, left = self._placement.rank_of, {p for p in self._disputes if self._benched.isdisjoint(p)}
        for party, others in who_leaves(left, rank_of):
            if len(set(map(rank_of, others))) > 1 and any(party in pair for pair in disputes):
                lines.append(self.party_offends(party, f"party {party} is in dispute with {len(others)} others"))
        return [line for line in lines if line is not None]

    # ---- lateness ----

    def in_time(self, rank: int) -> None:
        """A message of the session under way. Messages of a rank arrive in order, so it owes none of an earlier one."""
        if self._in_time[rank] != self._sessions:
            self._in_time[rank] = self._sessions
            self._let_go[rank] = 0

    def let_go(self, rank: int) -> bool:
        """A message that nobody waits for, of a rank that is late or out. True: more than an honest one can owe."""
        self._let_go[rank] += 1
        sessions = self._sessions - self._in_time[rank] + 1
        return self._let_go[rank] > self._messages * (len(self._placement.parties_of(rank)) + 1) * sessions

    # ---- for a checkpoint ----

    def state(self) -> dict[str, Any]:
        return {
            "ranks": len(self._placement.ranks()),
            "rank_offences": sorted(self._rank_offences.items()),
            "party_offences": sorted(self._party_offences.items()),
            "benched_ranks": sorted(self.benched_ranks),
            "benched": self.benched,
            "disputes": sorted(self._disputes),
            "lost": sorted(self.lost),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Parties stay what they were. Ranks do where there are as many: of another number they host others. A checkpoint of before
        there was a conduct has none."""
        self._benched.update(state.get("benched", ()))
        self.lost.update(state.get("lost", ()))
        self._party_offences.update(dict(state.get("party_offences", ())))
        self._disputes |= {(holder, dealer) for holder, dealer in state.get("disputes", ())}
        if state.get("ranks") == len(self._placement.ranks()):
            self._rank_offences.update(dict(state["rank_offences"]))
            self.benched_ranks.update(state["benched_ranks"])
