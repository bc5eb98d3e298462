"""Who leaves when a holder says that a dealer's bundle does not open, or opens a share that cannot be.

One of the two lies, or rank 0 altered the bundle, and nobody can tell which: the holder cannot show what it tried without giving a
share away. What can be told is who is in most disputes. A dealer that seals rubbish for all is in one with each of them, and so
is a holder that complains of all; two honest parties are never in one. So whoever is in most disputes leaves, until none is
left; of a single pair it is the dealer.
"""

from collections.abc import Collection


def who_leaves(disputes: Collection[tuple[int, int]]) -> list[tuple[int, frozenset[int]]]:
    """(party, with whom it was in dispute) for each that leaves, from (holder, dealer) pairs."""
    against: dict[int, set[int]] = {}
    dealt: dict[int, int] = {}
    for holder, dealer in disputes:
        against.setdefault(holder, set()).add(dealer)
        against.setdefault(dealer, set()).add(holder)
        dealt[dealer] = dealt.get(dealer, 0) + 1
    leaving = []
    while against:
        party = max(against, key=lambda one: (len(against[one]), dealt.get(one, 0), -one))
        others = against.pop(party)
        for other in others:
            against[other].discard(party)
            if not against[other]:
                del against[other]
        leaving.append((party, frozenset(others)))
    return leaving
