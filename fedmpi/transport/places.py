"""Memory for frames, used again once nobody holds anything of what was in it.

A frame of a megabyte in fresh memory costs the kernel ten times what it costs to copy it, page by page, and the C library gives large
pieces back to the kernel as soon as they are free. Who holds a frame, or a view of a part of it, holds its place: nothing has to be
given back, and nothing can be written over that is still read.
"""

import weakref

import numpy as np
from numpy.typing import NDArray

LARGE = 1 << 16  # bytes from which on a place is kept: smaller ones the C library keeps itself
MOST = 1 << 26  # bytes that a rank keeps

Bytes = NDArray[np.uint8]


class Places:
    def __init__(self, most: int = MOST):
        self._most = most
        self._kept: list[
            tuple[Bytes, weakref.ref[Bytes]]
        ] = []  # a place, and the view of it that whoever uses it holds

    def take(self, size: int) -> memoryview:
        """So many bytes to write to, whatever is in them now."""
        if size < LARGE:
            return np.empty(size, np.uint8).data
        for at, (place, holder) in enumerate(self._kept):
            if holder() is None and size <= len(place) <= 2 * size:
                view = place[:size]
                self._kept[at] = place, weakref.ref(view)
                return view.data
        place = np.empty(size, np.uint8)
        view = place[:]
        self._keep(place, view)
        return view.data

    def _keep(self, place: Bytes, view: Bytes) -> None:
        """If there is room, or if there is once those that nobody holds are gone: they were too small or too large."""
        if len(place) <= self._most < self.kept() + len(place):
            self._kept = [other for other in self._kept if other[1]() is not None]
        if self.kept() + len(place) <= self._most:
            self._kept.append((place, weakref.ref(view)))

    def kept(self) -> int:
        """Bytes."""
        return sum(len(place) for place, _ in self._kept)
