"""Work that goes on while a test looks on, and has ended after it, however the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from shoal.errors import LeaseLost
from shoal.process.life import innermost


@asynccontextmanager
async def during(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """What the work raises is raised at the end, or told beside what the block raised: nobody tests what has died."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    except BaseException as error:
        for each in await _raised(tasks):
            error.add_note(f"meanwhile: {each!r}")
        raise
    if raised := await _raised(tasks):
        raise raised[0]


async def _raised(tasks: Sequence[asyncio.Task[Any]]) -> list[BaseException]:
    """What they have raised, once they have ended."""
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    return [e for e in ended if isinstance(e, BaseException) and not isinstance(e, asyncio.CancelledError)]


@contextmanager
def losing_the_lease() -> Iterator[None]:
    """An operator that runs within may end by itself, as one does that has lost the Lease."""
    try:
        yield
    except ExceptionGroup as ended:
        if not isinstance(innermost(ended), LeaseLost):
            raise
