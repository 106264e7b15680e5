"""How long a list or a watch that failed waits: twice as long each time, with jitter, and what the server asked for."""

from __future__ import annotations

import random

from shoal.errors import Unavailable


def backoff(failures: int) -> float:
    """Seconds, after so many failures in a row."""
    return float(min(30.0, 0.1 * 2 ** min(failures, 10))) * random.uniform(0.5, 1.0)


def asked(error: Exception) -> float | None:
    """The seconds that the server asks to wait, so that not all come back at once, if it does."""
    if isinstance(error, Unavailable) and error.retry_after is not None:
        return error.retry_after * random.uniform(1.0, 1.2)
    return None
