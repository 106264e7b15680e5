"""Work that goes on while a test looks on, and has ended after it, however the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def during(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """What the work returns or raises is nobody's."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
