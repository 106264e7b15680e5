"""One allocator for everything that is exchanged.

TensorFlow takes a numpy array without copying only where it is aligned to 64 bytes (else it aborts the process, with
nothing to catch), and numpy's own large arrays are not. So parameters, gradients and wire buffers all come from here.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64


def aligned(n: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """`n` elements of `dtype`, zero, at an address that is a multiple of 64. Pages are touched on first use only."""
    kind = np.dtype(dtype)
    raw = np.zeros(n * kind.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n * kind.itemsize].view(kind)


def octets(array: NDArray[Any]) -> memoryview:
    """The array's memory as bytes, without a copy."""
    return memoryview(cast(Any, array)).cast("B") if array.size else memoryview(b"")
