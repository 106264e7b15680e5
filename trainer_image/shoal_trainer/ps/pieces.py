"""Vectors in pieces: a payload whose memory is taken and given back piece by piece.

An array is one piece. The update rules go through the pieces in order, so they treat both alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from shoal_trainer.ps.kernels import Buffer

PIECE_VALUES = 1 << 19
"""The values of a large shard that are received, applied and answered at a time."""


class Pieces:
    """One vector of arrays."""

    def __init__(self, arrays: Sequence[Buffer]) -> None:
        self.arrays = arrays
        self._ends = list(accumulate(array.size for array in arrays))
        self.size = self._ends[-1] if arrays else 0
        self.shape = (self.size,)

    def parts(self, low: int, high: int) -> Iterator[tuple[slice, Buffer]]:
        """The values [low, high) piece by piece, as in `parts`."""
        index = bisect_right(self._ends, low)
        while low < high:
            array, end = self.arrays[index], self._ends[index]
            start, stop = low + array.size - end, min(high, end)
            yield slice(low, stop), array[start : start + stop - low]
            low, index = stop, index + 1


class Window:
    """The values [low, high) of a vector of `size` values; `values` begins at its value `first`."""

    def __init__(self, values: Payload, first: int, low: int, high: int, size: int) -> None:
        self.size = size
        self.shape = (size,)
        self._values, self._first, self._low, self._high = values, first, low, high

    def parts(self, low: int, high: int) -> Iterator[tuple[slice, Buffer]]:
        """Those of the values [low, high) that it has, as in `parts`."""
        first, low, high = self._first, max(low, self._low), min(high, self._high)
        for part, values in parts(self._values, low - first, high - first):
            yield slice(part.start + first, part.stop + first), values


class InPieces(Protocol):
    """A vector that is not one array."""

    @property
    def size(self) -> int:
        """The number of values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(size,)."""

    def parts(self, low: int, high: int) -> Iterator[tuple[slice, Buffer]]:
        """The values [low, high), as in `parts`."""


Payload = Buffer | InPieces
"""The values of a request or answer, of shape (size,), in fp32 or bf16; or a part of them."""


def section(io: Payload, low: int, high: int) -> Payload:
    """The values [low, high) of `io`, as a vector."""
    return io[low:high] if isinstance(io, np.ndarray) else Window(io, -low, 0, high - low, high - low)


def parts(io: Payload, low: int = 0, high: int | None = None) -> Iterator[tuple[slice, Buffer]]:
    """The values [low, high) of `io`, piece by piece: (their positions in `io`, a view of them)."""
    high = io.size if high is None else high
    if not isinstance(io, np.ndarray):
        yield from io.parts(low, high)
    elif low < high:
        yield slice(low, high), io[low:high]


def nbytes(io: Payload) -> int:
    """The bytes of a payload."""
    return sum(int(values.nbytes) for _, values in parts(io))
