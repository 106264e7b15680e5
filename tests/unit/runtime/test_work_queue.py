"""The work queue, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise

import pytest

from shoal.errors import Unavailable
from shoal.runtime.work_queue import GATHER_SECONDS, TURN_OF_THE_OLDEST, Priority, WorkQueue
from tests.meanwhile import during

pytestmark = pytest.mark.looptime

Reconcile = Callable[[str], Awaitable[float | None]]


def working(
    queue: WorkQueue[str], reconcile: Reconcile, workers: int = 3
) -> AbstractAsyncContextManager[None]:
    return during(*(queue.work(reconcile) for _ in range(workers)))


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_additions_coalesce_and_keys_are_processed_one_at_a_time() -> None:
    queue: WorkQueue[str] = WorkQueue()
    busy: set[str] = set()
    passes: list[str] = []

    async def reconcile(key: str) -> None:
        assert key not in busy
        busy.add(key)
        await asyncio.sleep(1)
        busy.discard(key)
        passes.append(key)

    async with working(queue, reconcile):
        for _ in range(5):
            queue.add("a")
        await asyncio.sleep(0.5)
        for _ in range(5):
            queue.add("a")  # in process: queued once more afterwards
        queue.add("b")
        await asyncio.sleep(10)
    assert sorted(passes) == ["a", "a", "b"]


async def test_changes_during_a_rest_are_answered_together_and_urgent_ones_at_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    passes: list[tuple[str, float]] = []

    async def reconcile(key: str) -> None:
        passes.append((key, round(now(), 3)))
        queue.rest(key, 1.0)

    async with working(queue, reconcile):
        for _ in range(90):  # events of one object, 50 a second
            queue.add("large")
            await asyncio.sleep(0.02)
        assert passes == [("large", 0.0), ("large", 1.0)]
        queue.add("large", Priority.URGENT)
        await asyncio.sleep(0.01)
        assert passes[2:] == [("large", 1.8)]  # with what waited
        queue.add_after("large", 0.1)
        await asyncio.sleep(5.0)
        assert [at for _, at in passes[3:]] == [1.91]


async def test_calm_changes_are_answered_together_and_at_once_with_another() -> None:
    queue: WorkQueue[str] = WorkQueue()
    passes: list[tuple[str, float]] = []

    async def reconcile(key: str) -> float | None:
        passes.append((key, now()))
        return 5.0 if key == "later" else None

    async with working(queue, reconcile, workers=1):
        for _ in range(5):
            queue.add("calm", Priority.CALM)
            queue.add("other", Priority.CALM)
            await asyncio.sleep(GATHER_SECONDS / 10)
        queue.add("other")  # answers the calm ones, too
        await asyncio.sleep(10 * GATHER_SECONDS)
        queue.add("later")
        await asyncio.sleep(1)
        queue.add("later", Priority.CALM)  # not as late as it was to be looked at
        await asyncio.sleep(1)
    began = GATHER_SECONDS * 10.5
    assert passes == [
        ("other", pytest.approx(GATHER_SECONDS / 2)),
        ("calm", pytest.approx(GATHER_SECONDS)),
        ("later", pytest.approx(began)),
        ("later", pytest.approx(began + 1 + GATHER_SECONDS)),
    ]


async def test_a_calm_change_of_a_key_in_process_is_not_lost() -> None:
    queue: WorkQueue[str] = WorkQueue()
    passes: list[float] = []

    async def reconcile(_key: str) -> float | None:
        passes.append(now())
        await asyncio.sleep(1)
        return 60.0 if len(passes) == 1 else None

    async with working(queue, reconcile, workers=1):
        queue.add("a")
        await asyncio.sleep(0.5)
        queue.add("a", Priority.CALM)
        await asyncio.sleep(10)
    assert passes == [pytest.approx(0), pytest.approx(1, abs=2 * GATHER_SECONDS)]


async def test_a_wave_of_urgent_changes_leaves_half_of_the_loop_to_others() -> None:
    """300 pods of a large job are lost, 50 a second; each plan takes 0.1 s."""
    queue: WorkQueue[str] = WorkQueue()
    passes: list[float] = []

    async def reconcile(key: str) -> None:
        passes.append(now())
        await asyncio.sleep(0.1)
        queue.rest(key, 1.0)

    async with working(queue, reconcile):
        for _ in range(300):
            queue.add("large", Priority.URGENT)
            last = now()
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)
    assert 29 <= len(passes) <= 31
    assert last < passes[-1] <= last + 0.2


async def test_what_a_key_sets_off_is_sent_before_the_next_key() -> None:
    """Reconciles that wait for nothing do not keep the event loop. aiohttp writes a request in a task of its own."""
    queue: WorkQueue[str] = WorkQueue()
    told: list[str] = []

    async def write(key: str) -> None:
        told.append(f"{key} sent")

    async def request(key: str) -> None:
        await asyncio.create_task(write(key))

    async def reconcile(key: str) -> None:
        told.append(key)
        tasks.append(asyncio.create_task(request(key)))

    tasks: list[asyncio.Task[None]] = []
    async with working(queue, reconcile, workers=1):
        for key in ("a", "b", "c"):
            queue.add(key)
        await asyncio.sleep(1)
    assert told == ["a", "a sent", "b", "b sent", "c", "c sent"]


async def test_urgent_keys_go_first() -> None:
    queue: WorkQueue[str] = WorkQueue()
    passes: list[str] = []

    async def reconcile(key: str) -> None:
        passes.append(key)

    queue.add("resync", Priority.ROUTINE)
    queue.add("change")
    queue.add("raised", Priority.ROUTINE)
    queue.add("node", Priority.URGENT)
    queue.add("raised", Priority.URGENT)
    queue.add("raised", Priority.NORMAL)
    async with working(queue, reconcile, workers=1):
        await asyncio.sleep(1)
    assert passes == ["node", "raised", "change", "resync"]
    assert len(queue) == 0


@pytest.mark.parametrize("noise", [Priority.NORMAL, Priority.URGENT])
async def test_no_key_waits_for_ever(noise: Priority) -> None:
    """A tenant whose jobs change all the time, as by a program that edits them: timers of the others never ran."""
    queue: WorkQueue[str] = WorkQueue()
    at: dict[str, float] = {}

    async def reconcile(key: str) -> None:
        at.setdefault(key, now())
        await asyncio.sleep(0.4)

    queue.add_after("timer", 0.5)
    async with working(queue, reconcile, workers=1):
        while "timer" not in at and now() < 60:
            for number in range(3):
                queue.add(f"noisy {number}", noise)
            await asyncio.sleep(0.2)
    assert at["timer"] - 0.5 <= 2 * TURN_OF_THE_OLDEST * 0.4


async def test_what_is_urgent_waits_for_one_of_a_backlog_however_old_that_is() -> None:
    """As of a new leader, which looks at all jobs when nodes are lost."""
    queue: WorkQueue[int] = WorkQueue()
    passes: list[int] = []

    async def reconcile(key: int) -> None:
        passes.append(key)
        await asyncio.sleep(1)

    for job in range(400):
        queue.add(job)
    async with working(queue, reconcile, workers=1):
        for lost in range(200, 300, 7):
            await asyncio.sleep(10.5)
            begun = len(passes)
            queue.add(lost, Priority.URGENT)
            await asyncio.sleep(2)
            assert lost in passes[: begun + 2]


async def test_age_of_the_oldest_key_is_told_while_it_waits() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert queue.oldest_seconds() == 0.0
    queue.add("a", Priority.ROUTINE)
    await asyncio.sleep(7)
    queue.add("b")
    await asyncio.sleep(1)
    assert queue.oldest_seconds() == 8.0


async def test_urgent_addition_of_a_key_in_process_stays_urgent() -> None:
    queue: WorkQueue[str] = WorkQueue()
    passes: list[str] = []

    async def reconcile(key: str) -> None:
        passes.append(key)
        await asyncio.sleep(1)

    async with working(queue, reconcile, workers=1):
        queue.add("a")
        await asyncio.sleep(0.5)
        queue.add("b")
        queue.add("a", Priority.URGENT)
        await asyncio.sleep(5)
    assert passes == ["a", "a", "b"]


async def test_failures_back_off_until_a_success() -> None:
    queue: WorkQueue[str] = WorkQueue()
    at: list[float] = []

    async def reconcile(_key: str) -> None:
        at.append(now())
        if len(at) != 8:
            raise Unavailable("not now")

    async with working(queue, reconcile):
        queue.add("a")
        await asyncio.sleep(60)
        assert len(at) == 8
        gaps = [later - earlier for earlier, later in pairwise(at)]
        for doubled, gap in enumerate(gaps):
            assert 0.8 * 0.05 * 2**doubled <= gap <= 1.2 * 0.05 * 2**doubled + 0.01
        queue.add("a")
        await asyncio.sleep(0.2)
        assert len(at) >= 10
        assert at[9] - at[8] <= 0.07


async def test_back_off_is_at_most_a_minute() -> None:
    queue: WorkQueue[str] = WorkQueue()
    at: list[float] = []

    async def reconcile(_key: str) -> None:
        at.append(now())
        raise ValueError("a bug")

    async with working(queue, reconcile):
        queue.add("a")
        await asyncio.sleep(3600)
    assert 48 <= at[-1] - at[-2] <= 72.1


async def test_newer_delay_replaces_the_earlier_one() -> None:
    queue: WorkQueue[str] = WorkQueue()
    at: list[float] = []

    async def reconcile(_key: str) -> float | None:
        at.append(now())
        return 100.0 if len(at) < 3 else None

    began = now()
    async with working(queue, reconcile):
        queue.add("a")
        await asyncio.sleep(50)
        queue.add("a")  # the first delay (until 100) is dropped
        await asyncio.sleep(1000)
    assert [round(t - began) for t in at] == [0, 50, 150]
