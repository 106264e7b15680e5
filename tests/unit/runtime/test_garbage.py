"""Full garbage collections: seldom while much changes, one in a quiet moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from shoal.runtime.garbage import EVERY_SECONDS, MOST, QUIET_SECONDS, Garbage
from tests.meanwhile import during

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
    async with during(garbage.run()):
        await asyncio.sleep(0)
        yield


def ramp() -> list[Any]:
    """In steps of which each makes the process at least half as large again, which brings full collections."""
    young, middle, _ = gc.get_threshold()
    kept: list[Any] = []
    for _ in range(3):
        kept += [[each] for each in range(max(6 * young * middle, len(gc.get_objects()) // 2))]
    return kept


@pytest.fixture
def larger() -> Iterator[None]:
    """A process of tests has more objects than the operator: as many times more are young here."""
    before = gc.get_threshold()
    gc.set_threshold(10 * before[0], *before[1:])
    yield
    gc.set_threshold(*before)


async def test_job_that_ramps_up_brings_no_full_collection(larger: None, full: list[str]) -> None:
    before = gc.get_threshold()
    async with running(Garbage()):
        assert ramp()
        assert full == []
    assert gc.get_threshold() == before, "it is automatic again"
    assert ramp()
    assert full, "as Python does it"


def churn() -> None:
    """So many objects that Python itself would collect all."""
    young, middle, _ = gc.get_threshold()
    kept = [[each] for each in range(2 * young * middle * 10)]
    assert kept


async def test_quiet_moment_is_waited_for(full: list[str]) -> None:
    told: list[int] = []
    garbage = Garbage(lambda: told.append(len(full)))
    async with running(garbage):
        churn()
        for _ in range(100):
            garbage.postpone()
            await asyncio.sleep(1.0)
        assert full == []
        await asyncio.sleep(3 * QUIET_SECONDS)
        assert len(full) == 1
        assert told == [1]
        churn()
        await asyncio.sleep(EVERY_SECONDS / 2)
        assert len(full) == 1
        await asyncio.sleep(EVERY_SECONDS)
        assert len(full) == 2


async def test_what_a_full_collection_of_a_ramp_freed_is_given_back_in_the_next_quiet_moment(
    full: list[str],
) -> None:
    told: list[int] = []
    async with running(Garbage(lambda: told.append(len(full)))):
        await asyncio.sleep(3 * QUIET_SECONDS)
        assert told == []
        gc.collect()  # as Python does, so that few objects are new afterwards
        await asyncio.sleep(3 * QUIET_SECONDS)
        assert told == [1]
        await asyncio.sleep(3600.0)
        assert told == [1]
        assert full == ["stop"]


async def test_nothing_is_collected_where_nothing_was_made(full: list[str]) -> None:
    gc.collect()
    del full[:]
    async with running(Garbage()):
        await asyncio.sleep(3600.0)
    assert full == []


async def test_cycles_are_taken_where_no_moment_is_quiet(full: list[str]) -> None:
    """What they hold has a bound, whatever happens."""
    async with running(Garbage()):
        young, middle, _ = gc.get_threshold()
        kept = [[each] for each in range(2 * young * middle * MOST)]
        assert kept
        assert full
