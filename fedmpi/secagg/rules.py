"""What both sides of an instance of the protocol have agreed on before it starts.

An instance is one run of the protocol for one sum: a round's training, or its test. Its name is a digest over everything that its
parties must see alike before the first key is made; with everybody's keys it becomes the transcript (`secagg.transcript`).
"""

import contextlib
import hashlib
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

PROTOCOL = b"fedmpi/secagg/4"  # the last number changes with anything that two versions would do differently
BATCH = b"fedmpi/secagg-batch/1"
SIGNED_KEYS = b"fedmpi/signed-keys/3"

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

    session: bytes  # of this start of the run; under an active adversary every party had a part in it
    round: int
    cohort: int  # n
    threshold: int  # t shares open a secret
    degree: int  # neighbours of a party; n - 1: everyone
    dimension: int
    bits: int
    active: bool = False
    most_lost: int | None = None  # parties that a round may lose and still open its sum; None: as t allows
    purpose: Purpose = Purpose.TRAINING
    agreed: bytes = b""  # digest of the settings of the run, as this side has them
    about: bytes = b""  # digest of what the inputs were made from: the model, and coordinates that the round settled on
    batch: tuple[int, int] | None = (
        None  # the first and the last round of those whose keys are made together; None: this one's alone
    )

    def __post_init__(self) -> None:
        check_cohort(self.cohort)
        check_degree(self.degree, self.cohort)
        check_threshold(self.threshold, self.degree + 1)
        if self.batch is not None and not self.batch[0] <= self.round <= self.batch[1]:
            raise ValueError(f"round {self.round} is not in the batch of rounds {self.batch[0]} to {self.batch[1]}")

    @property
    def complete(self) -> bool:
        return self.degree == self.cohort - 1

    @property
    def rounds(self) -> int:
        """Of the batch; 0 where keys are made for this round alone."""
        return 0 if self.batch is None else self.batch[1] - self.batch[0] + 1

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

    @property
    def lost_text(self) -> bytes:
        return b"" if self.most_lost is None else bind(self.most_lost)

    @cached_property
    def instance(self) -> bytes:
        """The name of what keys are made for: the same for two parties only if they agree on all of this. Of a batch it has what all
        its rounds have in common; what is a round's own enters the round's transcript."""
        if self.batch is not None:
            shape = self.cohort, self.threshold, self.degree
            text = bind(BATCH, self.agreed, self.session, int(self.purpose), *self.batch, *shape, int(self.active))
            return hashlib.sha256(text).digest()
        numbers = self.round, self.cohort, self.threshold, self.degree, self.dimension, self.bits
        text = bind(
            PROTOCOL,
            self.agreed,
            self.session,
            int(self.purpose),
            *numbers,
            int(self.active),
            self.lost_text,
            self.about,
        )
        return hashlib.sha256(text).digest()

    def keys_text(self, party: int, cipher_key: bytes, mask_key: bytes) -> bytes:
        """What a party signs of its keys: for this instance, by this party."""
        return bind(SIGNED_KEYS, self.instance, party, cipher_key, mask_key)


def share_points(owner: int, peers: Iterable[int]) -> dict[int, int]:
    """Where the owner's polynomials are evaluated for each holder: 1, 2, 3, ... in party order over the owner and the
    peers whose keys it was shown. Both sides know these and no later dropout changes them. Without gaps, sharing needs
    additions only, and owners with the same places left share their Lagrange weights."""
    return {holder: point for point, holder in enumerate(sorted([*peers, owner]), start=1)}
