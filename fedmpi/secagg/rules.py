"""What both sides of a round have agreed on before it starts, and the contexts that bind every derived key to it."""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from fedmpi.crypto.keys import bind
from fedmpi.secagg.graph import check_cohort, check_degree, check_threshold
from fedmpi.wire.message import Message
from fedmpi.wire.phases import Cost, Phase, Purpose

SIGNED_KEYS = b"fedmpi/signed-keys/2"
SIGNED_SURVIVORS = b"fedmpi/signed-survivors/2"

# Measures what runs inside, told the phase that it is done for and what it is; by default nothing is measured.
Meter = Callable[[Phase, Cost], AbstractContextManager[object]]
M = TypeVar("M", bound=Message)


def no_meter(phase: Phase, cost: Cost) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


def round_name(round: int, purpose: Purpose) -> str:
    return f"round {round}" if purpose is Purpose.TRAINING else f"the {purpose.name.lower()} of round {round}"


@dataclass(frozen=True)
class Rules:
    """Fixed from the announced cohort, never from the survivors. A party checks them itself and takes nobody's word."""

    session: bytes  # of the run, 16 bytes
    round: int
    cohort: int  # n
    threshold: int  # t shares open a secret
    degree: int  # neighbours of a party; n - 1: everyone
    dimension: int
    bits: int
    active: bool = False
    most_lost: int | None = None  # parties that a round may lose and still open its sum; None: as t allows
    purpose: Purpose = Purpose.TRAINING

    def __post_init__(self) -> None:
        check_cohort(self.cohort)
        check_degree(self.degree, self.cohort)
        check_threshold(self.threshold, self.degree + 1)

    @property
    def complete(self) -> bool:
        return self.degree == self.cohort - 1

    @property
    def tolerated(self) -> int:
        return self.cohort if self.most_lost is None else self.most_lost

    @property
    def lane(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The narrowest machine integer that holds b bits: masks are drawn, and added, modulo its range."""
        return np.dtype(f"u{next(size for size in (1, 2, 4, 8) if self.bits <= 8 * size)}")

    def message(self, kind: type[M], party: int, *fields: object) -> M:
        """A message of this round, from or for a party."""
        return kind(self.round, party, *fields, purpose=self.purpose)

    def covers(self, message: Message) -> bool:
        """Whether a message is of this round, and not of another or of its test."""
        return (message.round, message.purpose) == (self.round, self.purpose)

    def context(self, *parties: int) -> bytes:
        """What a derived key or a sealed bundle is for: session, purpose, round and the parties in order."""
        return self._place + bind(*parties)

    def pair_contexts(self, party: int, peers: Iterable[int]) -> dict[int, tuple[bytes, bytes]]:
        """context(party, peer) and context(peer, party) for every peer; every byte of them is put together once."""
        peers, own, place = tuple(peers), bind(party), self._place
        here, size, numbers = place + own, len(own), bind(*peers)
        others = (numbers[at : at + size] for at in range(0, len(numbers), size))
        return {peer: (here + other, place + other + own) for peer, other in zip(peers, others, strict=True)}

    @cached_property
    def _place(self) -> bytes:
        # `bind` of more parts is `bind` of these, then of those.
        return bind(self.session, int(self.purpose), self.round)

    def survivors_text(self, survivors: tuple[int, ...]) -> bytes:
        return bind(SIGNED_SURVIVORS) + self._place + bind(*survivors)

    def keys_text(self, party: int, cipher_key: bytes, mask_key: bytes) -> bytes:
        return bind(SIGNED_KEYS) + self._place + bind(party, cipher_key, mask_key)


def share_points(owner: int, peers: Iterable[int]) -> dict[int, int]:
    """Where the owner's polynomials are evaluated for each holder: 1, 2, 3, ... in party order over the owner and the
    peers whose keys it was shown. Both sides know these and no later dropout changes them. Without gaps, sharing needs
    additions only, and owners with the same places left share their Lagrange weights."""
    return {holder: point for point, holder in enumerate(sorted([*peers, owner]), start=1)}
