"""Which rank hosts which party: rank 0 serves, the others take contiguous blocks."""

from fedmpi.errors import ConfigError


class Placement:
    def __init__(self, parties: int, ranks: int):
        clients = ranks - 1
        if clients < 1:
            raise ConfigError(f"{ranks} rank: fedmpi needs at least 2, a server and a client")
        if clients > parties:
            raise ConfigError(
                f"parties = {parties}: must be at least the number of client ranks ({clients}); "
                f"start at most {parties + 1} ranks, or raise --parties"
            )
        small, larger = divmod(parties, clients)
        self._blocks, at = [], 0
        for client in range(clients):
            size = small + (client < larger)
            self._blocks.append(tuple(range(at, at + size)))
            at += size
        self._rank = {party: rank for rank, block in enumerate(self._blocks, start=1) for party in block}

    def ranks(self) -> range:
        return range(1, len(self._blocks) + 1)

    def parties_of(self, rank: int) -> tuple[int, ...]:
        return self._blocks[rank - 1]

    def rank_of(self, party: int) -> int:
        return self._rank[party]

    def by_rank(self, parties) -> dict[int, tuple[int, ...]]:
        """The given parties, grouped by the rank that hosts them, in order."""
        grouped: dict[int, list[int]] = {}
        for party in sorted(parties):
            grouped.setdefault(self._rank[party], []).append(party)
        return {rank: tuple(group) for rank, group in sorted(grouped.items())}
