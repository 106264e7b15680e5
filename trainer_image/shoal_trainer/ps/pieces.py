"""Vectors in pieces: a payload whose memory is taken and given back piece by piece.

An array is one piece. The update rules go through the pieces in order, so they treat both alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal_trainer.ps.kernels import Buffer


class Pieces:
    """One vector of arrays of equal length; the last one may be shorter."""

    def __init__(self, arrays: Sequence[Buffer]) -> None:
        self.arrays = arrays
        self.size = sum(array.size for array in arrays)
        self.shape = (self.size,)
        self._length = arrays[0].size if arrays else 1

    def parts(self, low: int, high: int) -> Iterator[tuple[slice, Buffer]]:
        """The values [low, high) piece by piece, as in `parts`."""
        while low < high:
            index, start = divmod(low, self._length)
            array = self.arrays[index]
            stop = min(array.size, start + high - low)
            yield slice(low, low + stop - start), array[start:stop]
            low += stop - start


Payload = Buffer | Pieces
"""The values of a request or answer, of shape (size,), in fp32 or bf16."""


def parts(io: Payload, low: int = 0, high: int | None = None) -> Iterator[tuple[slice, Buffer]]:
    """The values [low, high) of `io`, piece by piece: (their positions in `io`, a view of them)."""
    high = io.size if high is None else high
    if isinstance(io, Pieces):
        yield from io.parts(low, high)
    elif low < high:
        yield slice(low, high), io[low:high]


def nbytes(io: Payload) -> int:
    """The bytes of a payload."""
    return sum(array.nbytes for array in io.arrays) if isinstance(io, Pieces) else int(io.nbytes)
