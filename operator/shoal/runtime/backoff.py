"""How long after a failure the next try is: twice as long each time, with jitter, and what the server asked for."""

from __future__ import annotations

import random

from shoal.errors import Unavailable

FIRST_SECONDS = 0.05
DUE_SECONDS = 1e-3
"""A wait so short is over: it is a rounding error, and a timer of it may fire before the clock has moved."""


def pause(failures: int, error: Exception | None, longest: float) -> float:
    """Seconds until the next try, after so many in vain in a row, the last of which failed with `error`, if any."""
    delay: float = min(longest, FIRST_SECONDS * 2 ** min(failures - 1, 20)) * random.uniform(0.8, 1.2)
    if isinstance(error, Unavailable) and error.retry_after is not None:
        delay = max(delay, error.retry_after * random.uniform(1.0, 1.2))
    return delay
