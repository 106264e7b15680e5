"""The clocks: the event loop's, which tests move and nothing sets back; the wall's, for what is told; the Lease's."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def loop_time() -> float:
    """Seconds on the clock of the running event loop. It never goes back."""
    return asyncio.get_running_loop().time()


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


def boot_time() -> float:
    """Seconds on a clock that goes on while the machine is suspended, where there is one: the loop's stands still.

    It never goes back, and any thread may ask.
    """
    return time.clock_gettime(_BOOT)
