"""Which rank hosts which party: rank 0 serves, the others take contiguous blocks, and later those of ranks that were lost."""

from collections.abc import Collection, Iterable

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
        self._clients, at = clients, 0
        self._blocks: dict[tuple[int, ...], int] = {}  # contiguous parties, in order -> their rank
        for client in range(clients):
            size = small + (client < larger)
            self._blocks[tuple(range(at, at + size))] = client + 1
            at += size
        self._home = {rank: block for block, rank in self._blocks.items()}
        self._ever = {rank: set(block) for rank, block in self._home.items()}
        self._index()

    def home_of(self, rank: int) -> tuple[int, ...]:
        """The parties that it was started for."""
        return self._home[rank]

    def ever_of(self, rank: int) -> set[int]:
        """All that it hosted at some time: what it did for them it may say later, when others have them."""
        return self._ever[rank]

    def _index(self) -> None:
        self._blocks = dict(sorted(self._blocks.items()))
        self._block = {party: block for block in self._blocks for party in block}
        self._parties = {
            rank: tuple(party for block, host in self._blocks.items() if host == rank for party in block)
            for rank in self.ranks()
        }

    def ranks(self) -> range:
        return range(1, self._clients + 1)

    def parties_of(self, rank: int) -> tuple[int, ...]:
        return self._parties[rank]

    def rank_of(self, party: int) -> int:
        return self._blocks[self._block[party]]

    def by_block(self, parties: Iterable[int]) -> list[tuple[int, tuple[int, ...]]]:
        """The given parties with their rank, grouped by the blocks that they came to it in, in order."""
        grouped: dict[tuple[int, ...], list[int]] = {}
        for party in sorted(parties):
            grouped.setdefault(self._block[party], []).append(party)
        return [(self._blocks[block], tuple(group)) for block, group in grouped.items()]

    def share_out(self, rank: int, among: Collection[int]) -> list[tuple[int, tuple[int, ...]]]:
        """The parties of a rank in parts for these ones, the parts for who hosts fewest first. Nothing is moved by it."""
        parties = self.parties_of(rank)
        hosts = sorted(among, key=lambda other: (len(self.parties_of(other)), other))
        runs = [tuple(run) for run in _runs(parties)]
        longest = -(-len(parties) // max(1, len(hosts)))
        parts = [run[at : at + longest] for run in runs for at in range(0, len(run), longest)]
        return [(hosts[number % len(hosts)], part) for number, part in enumerate(parts)]

    def move(self, parties: tuple[int, ...], rank: int) -> None:
        """These, all of one rank and contiguous, to another one, as a block of their own."""
        for block in {self._block[party] for party in parties}:
            host = self._blocks.pop(block)
            for rest in _runs(party for party in block if party not in parties):
                self._blocks[tuple(rest)] = host
        self._blocks[parties] = rank
        self._ever[rank].update(parties)
        self._index()


def _runs(parties: Iterable[int]) -> list[list[int]]:
    """Contiguous pieces."""
    runs: list[list[int]] = []
    for party in sorted(parties):
        if runs and runs[-1][-1] == party - 1:
            runs[-1].append(party)
        else:
            runs.append([party])
    return runs


def named(parties: Iterable[int]) -> str:
    """In words: `party 3`, `parties 0 to 4 and 7`."""
    runs = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in _runs(parties)]
    if len(runs) == 1 and " " not in runs[0]:
        return f"party {runs[0]}"
    return "parties " + (", ".join(runs[:-1]) + " and " if len(runs) > 1 else "") + (runs[-1] if runs else "none")
