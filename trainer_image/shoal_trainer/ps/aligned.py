"""Allocates aligned arrays for parameters, gradients and wire buffers.

TensorFlow shares a NumPy array without copying only if it is aligned to 64 bytes (otherwise it aborts the process, and
no exception is raised). NumPy does not guarantee this alignment.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64


def aligned(n: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """`n` zeros of `dtype` at an address that is a multiple of 64. Pages are touched on first use only."""
    numpy_type = np.dtype(dtype)
    raw = np.zeros(n * numpy_type.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n * numpy_type.itemsize].view(numpy_type)


def octets(array: NDArray[Any]) -> memoryview:
    """The array's memory as bytes, without a copy."""
    return memoryview(cast(Any, array)).cast("B") if array.size else memoryview(b"")
