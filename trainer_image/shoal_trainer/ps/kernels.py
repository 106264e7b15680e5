"""The update rules, each one pass over memory with the interpreter lock released.

An update is limited by memory alone, so each kernel reads the pushed values and writes the answer in the same pass and
in the same buffer: `io` holds a gradient on the way in and the new parameters on the way out, in fp32 or as the 16 bits
of bf16. One buffer for a request also halves what a parameter server needs beside its parameters. No fast-math: results
are those of the formulas in Keras, rounded at each operation, and one writer at a time makes them reproducible.

numba compiles them for `NUMBA_CPU_NAME` and keeps the result beside this file (or in `NUMBA_CACHE_DIR`);
`python -m shoal_trainer.ps.kernels` compiles all of them ahead, as the image build does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numba.core import types
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
Vector = NDArray[np.float32]
Buffer = NDArray[Any]
"""fp32, or uint16 that holds bf16 bits."""


def kernel(function: F) -> F:
    """Compile on first use, cached on disk, without the interpreter lock."""
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def _inline(function: F) -> F:
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy", inline="always")(function))
