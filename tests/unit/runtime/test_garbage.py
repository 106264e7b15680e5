"""Full garbage collections: seldom while much changes, one in a quiet moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from shoal.runtime.garbage import EVERY_SECONDS, MOST, QUIET_SECONDS, Garbage

pytestmark = pytest.mark.looptime


@pytest.fixture
def full() -> Iterator[list[str]]:
    """The phases of full collections as they come."""
    seen: list[str] = []

    def told(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "stop":
            seen.append(phase)

    gc.callbacks.append(told)
    yield seen
    gc.callbacks.remove(told)


@contextlib.asynccontextmanager
async def running(garbage: Garbage) -> AsyncIterator[None]:
    task = asyncio.create_task(garbage.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def ramp() -> list[Any]:
    """In steps of which each makes the process half as large again, which would bring a full collection."""
    kept: list[Any] = []
    for _ in range(3):
        kept += [[each] for each in range(max(100_000, len(gc.get_objects()) // 2))]
    return kept


async def test_job_that_ramps_up_brings_no_full_collection(full: list[str]) -> None:
    async with running(Garbage()):
        assert ramp()
        assert full == []
    assert gc.get_threshold()[2] < 1000, "it is automatic again"


async def test_quiet_moment_is_waited_for(full: list[str]) -> None:
    garbage = Garbage()
    async with running(garbage):
        for _ in range(int(EVERY_SECONDS) + 60):
            garbage.postpone()
            await asyncio.sleep(1.0)
        assert full == []
        await asyncio.sleep(3 * QUIET_SECONDS)
        assert len(full) == 1
        await asyncio.sleep(EVERY_SECONDS + 3 * QUIET_SECONDS)
        assert len(full) == 2


async def test_cycles_are_taken_where_no_moment_is_quiet(full: list[str]) -> None:
    """What they hold has a bound, whatever happens."""
    async with running(Garbage()):
        young, middle, _ = gc.get_threshold()
        kept = [[each] for each in range(2 * young * middle * MOST)]
        assert kept
        assert full
