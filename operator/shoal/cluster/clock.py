"""The two clocks: the event loop's, which tests move and nothing sets back, and the wall's, for what is told."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime


def loop_time() -> float:
    """Seconds on the clock of the running event loop. It never goes back."""
    return asyncio.get_running_loop().time()


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)
