"""What update rules compute with single numbers, as plain Python; `kernel_compiler` has the compiled counterparts.

bf16 is the upper half of fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NOTHING = np.float32(0)
"""Added to a sign: that of -0 is 0 in NumPy, and -0 in compiled code."""
LARGEST = np.float32(1.8446743e19)
"""The largest number of which the square is finite in fp32."""


def widen(value: Any) -> Any:
    """The fp32 value of an element of a buffer."""
    return value if isinstance(value, np.float32) else (np.uint32(value) << np.uint32(16)).view(np.float32)


def narrow(value: Any, like: Any) -> Any:
    """`value` in the type of `like`, rounded to nearest even; NaN stays NaN."""
    if isinstance(like, np.float32):
        return value
    bits = value.view(np.uint32)
    quiet, rounded = (
        bits | np.uint32(0x400000),
        bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF),
    )
    return np.uint16((quiet if np.isnan(value) else rounded) >> np.uint32(16))


def finite_or_zero(value: Any) -> Any:
    """`value`, or 0 where it is not finite."""
    return value if np.isfinite(value) else np.float32(0)


def squarable_or_zero(value: Any) -> Any:
    """`value`, or 0 where its square is not finite."""
    return value if abs(value) <= LARGEST else np.float32(0)


def mark_change(seen: Any, value: Any, used: Any) -> Any:
    """`seen`, made nonzero if `used` differs from `value`. It has 32 bits, like the values, so that loops vectorize."""
    return seen | (value.view(np.uint32) ^ used.view(np.uint32))
