"""Who leaves when a holder says that a dealer's bundle does not open, or opens a share that cannot be.

One of the two lies, or rank 0 altered the bundle, and nobody can tell which: the holder cannot show what it tried without giving a
share away. What can be told is who is in most disputes. A dealer that seals rubbish for all is in one with each of them, and so
is a holder that complains of all; two honest parties are never in one. So whoever is in most disputes leaves, until none is
left. Parties that speak through one rank may well be one liar: a dispute with all of them is one. Where that does not decide, as
between two, it is the dealer in odd rounds and the holder in even ones, so that nobody can keep another out for good.
"""

from collections.abc import Callable, Collection

Group = Callable[[int], int]  # party -> who it speaks through


def alone(party: int) -> int:
    return party


def who_leaves(
    disputes: Collection[tuple[int, int]], group: Group = alone, round: int = 1
) -> list[tuple[int, frozenset[int]]]:
    """(party, with whom it was in dispute) for each that leaves, from (holder, dealer) pairs."""
    against: dict[int, set[int]] = {}
    role: dict[int, int] = {}  # in how many disputes as the one who leaves by the round
    for holder, dealer in disputes:
        against.setdefault(holder, set()).add(dealer)
        against.setdefault(dealer, set()).add(holder)
        leaves = dealer if round % 2 else holder
        role[leaves] = role.get(leaves, 0) + 1
    leaving = []
    while against:
        party = max(against, key=lambda one: (len({group(other) for other in against[one]}), role.get(one, 0), -one))
        others = against.pop(party)
        for other in others:
            against[other].discard(party)
            if not against[other]:
                del against[other]
        leaving.append((party, frozenset(others)))
    return leaving
