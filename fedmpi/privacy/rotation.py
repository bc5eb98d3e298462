"""The randomised Hadamard rotation (KLS 2021): an update is turned so that none of its coordinates is large.

Signs that everybody knows, then a Walsh-Hadamard transform of every block, divided by sqrt(block). That is a rotation: it changes no norm,
so nothing that is proven about clipped updates, and its own transpose takes it back. What it changes is the range of a sum's
signal, n C before and about n C / sqrt(block) after, and so the bits of a coordinate.

In blocks, because only powers of two can be transformed: padding the paper's 270,000 coordinates to 2^19 would cost more than it buys.
"""

from __future__ import annotations

import numpy as np

from fedmpi.randomness.words import SeededWords

BLOCK = 1 << 13  # longer ones buy hardly any more bits and pad more, see benchmarks.encoding_bits


def block_of(dimension: int) -> int:
    """The block for so many coordinates: the least power of two that holds them, or BLOCK."""
    return min(BLOCK, 1 << (dimension - 1).bit_length())


def padded(dimension: int) -> int:
    """Coordinates that are sent: whole blocks."""
    block = block_of(dimension)
    return -(-dimension // block) * block


def rotate(values: np.ndarray, seed: int, round: int) -> np.ndarray:
    """The vector turned, as float64, padded with zeros to whole blocks."""
    block, size = block_of(len(values)), padded(len(values))
    full = np.zeros(size)
    full[: len(values)] = values
    full *= _signs(size, seed, round)
    return np.asarray(_transform(full.reshape(-1, block)).ravel() / np.sqrt(block))


def rotate_back(total: np.ndarray, dimension: int, seed: int, round: int) -> np.ndarray:
    """The first `dimension` coordinates of a sum of turned vectors, turned back, as float64.

    The transform is of integers and exact, so every rank has the same bits: a sum has 64 - 13 bits at most, as no run comes near.
    """
    block = block_of(dimension)
    turned = _transform(total.astype(np.int64).reshape(-1, block)).ravel()
    return np.asarray((turned * _signs(len(total), seed, round))[:dimension] / np.sqrt(block))


def _signs(size: int, seed: int, round: int) -> np.ndarray:
    """+1 and -1, other ones in each round: what parties send depends on rounds before this one, and must not on these."""
    words = SeededWords(seed, "rotation", 0, round).words(-(-size // 64))
    return 1 - 2 * np.unpackbits(words.astype("<u8").view(np.uint8))[:size].astype(np.int64)


def _transform(blocks: np.ndarray) -> np.ndarray:
    """The Walsh-Hadamard transform of every row, not divided by anything: sums and differences in a fixed order."""
    rows, block = blocks.shape
    half = 1
    while half < block:
        pairs = blocks.reshape(rows, -1, 2, half)
        upper, lower = pairs[:, :, 0], pairs[:, :, 1]
        blocks = np.stack((upper + lower, upper - lower), axis=2)
        half *= 2
    return blocks.reshape(rows, block)
