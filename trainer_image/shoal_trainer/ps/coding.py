"""How a vector of trainable values and statistics is coded: in fp32, or the trainable values in bf16.

    bf16, an array of uint16: [ trainable values in bf16 | one more if they are odd in number | statistics in fp32 ]

Of a gradient, bf16 loses less than the noise of its batch. Statistics are values of the data: of a mean of 2010 with a
spread of 5, bf16 would leave 2008. So they stay in fp32, two uint16 each, aligned for it. Statistics are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.ps import kernels
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.kernels import Buffer, Vector
from shoal_trainer.ps.pieces import Payload, Pieces, parts


def place(value: int, trainable: int, dtype: npt.DTypeLike) -> int:
    """The index in a coded array at which a value begins, or the values before it end."""
    if np.dtype(dtype) == np.float32 or value <= trainable:
        return value
    return trainable + trainable % 2 + 2 * (value - trainable)


def coded(size: int, trainable: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A new array, fp32 or uint16, for `size` values of which the first `trainable` are trainable."""
    return aligned(place(size, trainable, dtype), dtype)


def in_memory(memory: Iterable[npt.NDArray[np.uint8]], trainable: int, dtype: npt.DTypeLike) -> Pieces:
    """The values that are coded in arrays of bytes, one after the other; each but the last has a multiple of 4."""
    return Pieces(list(_arrays(memory, trainable, dtype)))


def values(array: npt.NDArray[Any], trainable: int) -> Payload:
    """The values of a coded array."""
    if array.dtype == np.float32 or array.size <= trainable:
        return array
    return in_memory([array.view(np.uint8)], trainable, array.dtype)


def encode(source: Vector, out: npt.NDArray[Any], trainable: int) -> None:
    """Code fp32 values."""
    for part, piece in parts(values(out, trainable)):
        kernels.encode(source[part], piece)


def decode(array: npt.NDArray[Any], out: Vector, trainable: int) -> None:
    """Write the values of a coded array in fp32."""
    for part, piece in parts(values(array, trainable)):
        kernels.decode(piece, out[part])


def _arrays(
    memory: Iterable[npt.NDArray[np.uint8]], trainable: int, dtype: npt.DTypeLike
) -> Iterator[Buffer]:
    end, low = trainable * np.dtype(dtype).itemsize, 0
    exact = -(-end // 4) * 4
    for octets in memory:
        if low < end:
            yield octets[: end - low].view(dtype)
        if low + octets.size > exact:
            yield octets[max(0, exact - low) :].view(np.float32)
        low += octets.size
