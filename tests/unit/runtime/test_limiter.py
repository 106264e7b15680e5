"""The limiter in virtual time: bounded concurrency, and the server's Retry-After."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from shoal.runtime.limiter import Limited
from shoal.runtime.work_queue import WorkQueue
from tests.meanwhile import during
from tests.unit.cluster.servers import SmallServer
from tests.virtual.loop import now, play

pytestmark = pytest.mark.looptime


def pods(space: str) -> str:
    """The path of a namespace's pods."""
    return f"/api/v1/namespaces/{space}/pods"


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
        for number in range(40):
            tasks.create_task(limited.request("GET", pods(f"{number % 10}")))
    assert most == 4
    assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.1)


async def test_a_body_is_made_when_its_request_has_a_place() -> None:
    """Thousands wait when hundreds of jobs begin, and a pod's manifest takes 10 KiB."""
    server, made = SmallServer(), list[float]()
    server.delay = 1.0
    limited = Limited(server, in_flight=2, kept=0)

    def make() -> dict[str, object]:
        made.append(asyncio.get_running_loop().time())
        return {"metadata": {"name": f"made-{len(made)}"}}

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(limited.request("POST", pods(str(number)), body=make))
    assert [round(at) for at in made] == [0, 0, 1, 1]
    assert [body["metadata"]["name"] for _, _, body in server.writes] == [
        "made-1",
        "made-2",
        "made-3",
        "made-4",
    ]


@pytest.mark.parametrize("space", ["0", "of another"])
async def test_urgent_request_does_not_wait_behind_those_of_jobs_that_begin(space: str) -> None:
    server = SmallServer()
    server.delay = 1.0
    limited = Limited(server, in_flight=4, kept=1)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for number in range(30):
            tasks.create_task(limited.request("POST", pods(f"{number % 3}")))
        await asyncio.sleep(0.5)
        await limited.request("POST", pods(space), urgent=True)
        assert loop.time() == pytest.approx(1.5, abs=0.1)
    assert loop.time() == pytest.approx(10, abs=0.1)


@dataclass(frozen=True)
class Asked:
    """A request of a namespace, after so many seconds, which hangs until it times out."""

    space: str
    urgent: bool
    after: int
    seconds: int


SLOW = st.lists(
    st.builds(Asked, st.sampled_from("abc"), st.booleans(), st.integers(0, 20), st.integers(1, 30)),
    max_size=150,
)


class Hanging(SmallServer):
    """Answers as late as the body says."""

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        await asyncio.sleep(options["body"])
        return Answer(200, b"{}")


@pytest.mark.looptime(enabled=False)
@given(SLOW, st.booleans(), st.integers(0, 60))
@example([Asked("a", False, 0, 10)] * 56, False, 1)  # seven jobs that begin; the next request waited 9.8 s
@example([Asked("a", True, 0, 10)] * 64, True, 1)  # two that lost 48 pods each
@example(
    [Asked(space, kind, 0, 10) for kind in (True, False) for space in "abc" for _ in range(32)], False, 1
)
def test_whatever_takes_long_in_three_namespaces_delays_no_request_of_another(
    slow: list[Asked], urgent: bool, after: int
) -> None:
    async def story() -> None:
        limited = Limited(Hanging())

        async def ask(each: Asked) -> None:
            await asyncio.sleep(each.after)
            await limited.request("POST", pods(each.space), urgent=each.urgent, body=each.seconds)

        async with asyncio.TaskGroup() as tasks:
            for each in slow:
                tasks.create_task(ask(each))
            await asyncio.sleep(after + 0.5)
            began = now()
            await limited.request("PUT", f"{pods('d')}/x/status", urgent=urgent, body=0.25)
            assert now() - began == pytest.approx(0.25)

    play(story)


async def test_pause_that_is_asked_for_about_one_object_closes_nothing() -> None:
    """A webhook may answer 429 with Retry-After, which the API server passes on."""
    server, loop = SmallServer(), asyncio.get_running_loop()
    limited = Limited(server)
    server.fault = lambda _method, _path: Unavailable("429 denied", retry_after=120.0, of_one=True)
    with pytest.raises(Unavailable):
        await limited.request("POST", pods("a"), urgent=True)
    server.fault = lambda _method, _path: None
    for urgent in (True, False):
        await limited.request("GET", pods("a"), urgent=urgent)
    assert loop.time() < 0.1


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
    async with during(queue.work(reconcile)):
        await asyncio.sleep(30)
    assert len(times) == 2
    assert times[1] - times[0] >= 20
