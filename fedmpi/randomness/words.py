"""Random words: the one interface between a source of randomness and everything that is drawn from it.

A source answers `words(n)` with n uniform 64-bit words and moves on; reading 3 and then 5 gives the same 8 words as
reading 8 at once. Two sources exist: `SeededWords` here, for `entropy: seeded`, and `fedmpi.crypto.prg.KeyStream`, for
`entropy: os`. A sampler never asks which one it was given.

Every draw of a run comes from a source keyed by (seed, purpose, party, round), never from a generator that several
parties share: the order in which parties are served, and the rank they live on, cannot change what is drawn.
"""

from __future__ import annotations

import hashlib
from operator import index
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

_WORDS = b"fedmpi/seeded-words/1"
_SHUFFLE = b"fedmpi/seeded-shuffle/1"


class WordSource(Protocol):
    """A stream of independent uniform 64-bit words."""

    def words(self, n: int) -> Words:
        """The next n words of the stream, as uint64."""
        ...


def _digest(label: bytes, seed: int, purpose: str, party: int, round: int) -> bytes:
    # Every field carries its length: without it ("noise1", party 2) and ("noise", party 12) would be written alike.
    fields = [str(index(seed)), purpose, str(index(party)), str(index(round))]
    parts = [label]
    for field in fields:
        raw = field.encode()
        parts.append(len(raw).to_bytes(4, "big") + raw)
    return hashlib.sha256(b"".join(parts)).digest()


class SeededWords:
    """Words that anybody who knows the run's seed can recompute: for tests and tables, never for protection.

    numpy's Philox counter generator, its 128-bit key taken from SHA-256 over (seed, purpose, party, round).
    """

    def __init__(self, seed: int, purpose: str, party: int, round: int):
        self._about = (index(seed), purpose, index(party), index(round))
        self._bits = self._philox(_WORDS)

    def _philox(self, label: bytes) -> np.random.Philox:
        return np.random.Philox(key=int.from_bytes(_digest(label, *self._about)[:16], "little"))

    def words(self, n: int) -> Words:
        return self._bits.random_raw(n)

    def generator(self) -> np.random.Generator:
        """A numpy Generator for shuffles, under the same four keys. It starts afresh at every call, and has a label of
        its own: shuffling and then reading words never reads the same bits twice."""
        return np.random.Generator(self._philox(_SHUFFLE))


def labelled_generator(*label: object) -> np.random.Generator:
    """A numpy Generator under the parts of a label, for what is drawn before there are parties or rounds: no draw depends on
    how many draws were made for another purpose."""
    key = hashlib.sha256("/".join(map(str, label)).encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def uniform(words: Words) -> Floats:
    """One float64 in [0, 1) for each word: its upper 53 bits, evenly spaced."""
    found: Floats = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def fraction(words: Words) -> Floats:
    """One float64 in (0, 1] for each word, for comparisons: (word + 1/2) / 2**64, rounded.

    All 64 bits count and small values keep 53 significant bits, so P[fraction < p] is p up to a *relative* error of
    2**-53 and an absolute one of 2**-64. `uniform` has an absolute error of 2**-53, which matters in the tails.
    """
    # The word as a float, rounded once, by its two halves: numpy converts signed integers in half the time of unsigned ones.
    u = (words >> np.uint64(32)).view(np.int64).astype(np.float64)
    u *= 2.0**32
    u += (words & np.uint64(2**32 - 1)).view(np.int64).astype(np.float64)
    u += 0.5
    u *= 2.0**-64
    found: Floats = u
    return found


def bernoulli(source: WordSource, p: Floats) -> NDArray[np.bool_]:
    """Independent coins, true with probability p (elementwise); p <= 0 is never, p > 1 is always."""
    p = np.asarray(p, dtype=np.float64)
    return (fraction(source.words(p.size)) < p.ravel()).reshape(p.shape)
