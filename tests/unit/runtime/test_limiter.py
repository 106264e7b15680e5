"""The limiter in virtual time: bounded concurrency, and the server's Retry-After."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import Unavailable
from shoal.runtime.limiter import Limited
from shoal.runtime.work_queue import WorkQueue
from tests.unit.cluster.servers import SmallServer

pytestmark = pytest.mark.looptime


async def test_requests_are_bounded() -> None:
    server, most, now = SmallServer(), 0, 0
    server.delay = 1.0
    inner = server.request

    async def counted(*args: object, **kwargs: object) -> object:
        nonlocal most, now
        now += 1
        most = max(most, now)
        try:
            return await inner(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            now -= 1

    server.request = counted  # type: ignore[method-assign,assignment]
    limited = Limited(server, in_flight=4, kept=0)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(40):
            tasks.create_task(limited.request("GET", "/x"))
    assert most == 4
    assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.1)


async def test_urgent_request_does_not_wait_behind_those_of_a_job_that_begins() -> None:
    server = SmallServer()
    server.delay = 1.0
    limited = Limited(server, in_flight=4, kept=1)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(30):
            tasks.create_task(limited.request("POST", "/pods"))
        await asyncio.sleep(0.5)
        await limited.request("POST", "/pods", urgent=True)
        assert loop.time() == pytest.approx(1.5, abs=0.1)
    assert loop.time() == pytest.approx(10, abs=0.1)


async def test_ordinary_requests_pause_after_an_urgent_one_was_shed() -> None:
    server = SmallServer()
    limited = Limited(server)
    server.fault = lambda _method, _path: Unavailable("429", retry_after=7.0)
    with pytest.raises(Unavailable):
        await limited.request("GET", "/x", urgent=True)
    server.fault = lambda _method, _path: None
    await limited.request("GET", "/x")
    assert asyncio.get_running_loop().time() >= 7.0


async def test_all_requests_wait_out_the_pause_that_the_server_asks_for() -> None:
    """B18: Retry-After was ignored, and the first retry came after 50 ms."""
    server = SmallServer()
    limited = Limited(server)
    server.fault = lambda _method, _path: Unavailable("429", retry_after=7.0)
    with pytest.raises(Unavailable):
        await limited.request("GET", "/x")
    server.fault = lambda _method, _path: None
    began = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(10):
            tasks.create_task(limited.request("POST", "/y"))
    assert 7.0 <= asyncio.get_running_loop().time() - began <= 8.0


async def test_urgent_request_pauses_only_after_one_of_its_kind_was_shed() -> None:
    """The server sheds by flow and queue: what it has no time for may be the ramp of another job alone."""
    server, loop = SmallServer(), asyncio.get_running_loop()
    limited = Limited(server)

    async def shed(*, urgent: bool) -> None:
        server.fault = lambda _method, _path: Unavailable("429", retry_after=7.0)
        with pytest.raises(Unavailable):
            await limited.request("POST", "/pods", urgent=urgent)
        server.fault = lambda _method, _path: None

    await shed(urgent=False)
    began = loop.time()
    await limited.request("POST", "/pods", urgent=True)
    assert loop.time() - began < 0.1
    await shed(urgent=True)
    for urgent in (True, False):
        await limited.request("POST", "/pods", urgent=urgent)
        assert loop.time() - began >= 7.0


async def test_key_whose_request_was_shed_waits_as_long() -> None:
    queue: WorkQueue[str] = WorkQueue()
    times: list[float] = []

    async def reconcile(_key: str) -> None:
        times.append(asyncio.get_running_loop().time())
        raise Unavailable("429", retry_after=20.0)

    queue.add("a")
    task = asyncio.create_task(queue.work(reconcile))
    await asyncio.sleep(30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(times) == 2
    assert times[1] - times[0] >= 20
