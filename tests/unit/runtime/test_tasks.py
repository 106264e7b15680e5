"""Tasks that nobody waits for."""

from __future__ import annotations

import asyncio

import pytest

from shoal.runtime.tasks import Tasks
from tests.meanwhile import during

pytestmark = pytest.mark.looptime


async def test_tasks_end_with_their_owner_or_with_the_process() -> None:
    tasks, ended = Tasks(), []

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)

    async with during(tasks.run()):
        for owner in ("a", "b"):
            tasks.start(owner, work(f"{owner} short", 1))
            tasks.start(owner, work(f"{owner} long", 100))
        await asyncio.sleep(2)
        assert sorted(ended) == ["a short", "b short"]
        tasks.forget("a")
        await asyncio.sleep(0.1)
        assert ended[2:] == ["a long"]
    assert ended[3:] == ["b long"], "it has ended when the process has"


async def test_error_ends_only_the_task_itself(caplog: pytest.LogCaptureFixture) -> None:
    tasks, done = Tasks(), []

    async def fails() -> None:
        raise ZeroDivisionError("a bug")

    async def works() -> None:
        await asyncio.sleep(1)
        done.append(True)

    tasks.start("a", works())
    tasks.start("a", fails())
    await tasks.idle()
    assert done == [True]
    assert "a bug" in caplog.text
