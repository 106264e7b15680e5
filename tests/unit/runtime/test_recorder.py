"""Events: created once, counted when repeated, and never a reason to fail."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from shoal.api.base import Resource
from shoal.api.capacity_pool import CapacityPool
from shoal.api.events import Event
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Answer, Query
from shoal.errors import Unavailable
from shoal.runtime.recorder import BURST, MAX_WAITING, PAUSE_SECONDS, POSTERS, Recorder
from tests.meanwhile import during
from tests.unit.controllers.clusters import NOW, Rig
from tests.unit.policy import build

DISRUPTED = Event("Warning", "WorkerDisrupted", "worker digits-worker-0-0 was disrupted")


def events(rig: Rig) -> list[dict[str, object]]:
    return [o for path, o in rig.cluster.objects.items() if "/events/" in path]


async def test_repeated_event_is_counted() -> None:
    rig = Rig()
    job = rig.apply()
    for _ in range(3):
        await rig.record(DISRUPTED, DISRUPTED)
    [event] = events(rig)
    assert (event["reason"], event["count"], event["type"]) == ("WorkerDisrupted", 3, "Warning")
    assert event["involvedObject"]["uid"] == job.metadata.uid  # type: ignore[index]
    await rig.record(Event("Warning", "WorkerDisrupted", "another one"))
    assert len(events(rig)) == 2


async def test_repeated_event_after_a_restart_is_the_same_object() -> None:
    rig = Rig()
    job = rig.apply()
    for _ in range(4):
        await rig.record(DISRUPTED)
    after_restart = Recorder(rig.cluster, reporter="next", wall=lambda: NOW)
    counts = []
    for _ in range(3):
        after_restart.record(job, [DISRUPTED])
        await after_restart.drain()
        [event] = events(rig)
        counts.append(event["count"])
    assert counts == [5, 6, 7], "it only grows"


async def test_combined_event_says_its_count_also_after_a_restart() -> None:
    rig = Rig()
    job = rig.apply()
    wave = [Event("Warning", "WorkerDisrupted", f"worker {n} was disrupted") for n in range(100)]
    await rig.record(*wave)
    after_restart = Recorder(rig.cluster, reporter="next", wall=lambda: NOW)
    after_restart.record(job, wave)
    await after_restart.drain()
    combined = max(events(rig), key=lambda event: int(str(event["count"])))
    more = 2 * (100 - BURST["Warning"])
    assert combined["count"] == more
    assert combined["message"] == f"{more} more of these; the last: worker 99 was disrupted"


async def test_a_repetition_that_is_refused_is_told_as_failed() -> None:
    results: Counter[str] = Counter()
    rig = Rig()
    job = rig.apply()
    recorder = Recorder(
        rig.cluster, reporter="one", wall=lambda: NOW, on_result=lambda each: results.update([each])
    )
    rig.cluster.fault = lambda method, _path: Answer(403, b"{}") if method == "PATCH" else None
    for _ in range(2):
        recorder.record(job, [DISRUPTED])
        await recorder.drain()
    assert results == {"posted": 1, "failed": 1}
    after_restart = Recorder(
        rig.cluster, reporter="two", wall=lambda: NOW, on_result=lambda each: results.update([each])
    )
    rig.cluster.fault = lambda method, _path: Answer(200, b"<html>") if method == "PATCH" else None
    after_restart.record(job, [DISRUPTED])
    await after_restart.drain()
    assert results == {"posted": 1, "failed": 2}


async def test_what_is_being_posted_when_the_process_ends_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """After events of thousands of names elsewhere, this one was not among those whose counts were remembered."""
    monkeypatch.setattr("shoal.runtime.recorder.MAX_COUNTS", 1)
    rig = Rig()
    answers = asyncio.Event()
    request = rig.cluster.request

    async def slow_of_one(method: str, path: str, **options: Any) -> Answer:
        if "/slow/" in path:
            await answers.wait()
        return await request(method, path, **options)

    monkeypatch.setattr(rig.cluster, "request", slow_of_one)
    recorder = Recorder(rig.cluster, reporter="one", wall=lambda: NOW)
    task = asyncio.create_task(recorder.run())
    for space in ("slow", "a", "b", "c"):
        recorder.record(of(space), [DISRUPTED])
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answers.set()
    await recorder.drain()
    assert len(events(rig)) == 4


async def test_expired_event_is_created_again() -> None:
    rig = Rig().applied()
    for _ in range(2):
        await rig.record(DISRUPTED)
    for path in [path for path in rig.cluster.objects if "/events/" in path]:
        del rig.cluster.objects[path]  # expired
    await rig.record(DISRUPTED)
    assert [event["count"] for event in events(rig)] == [1]
    await rig.record(DISRUPTED)
    assert [event["count"] for event in events(rig)] == [2]


async def test_event_that_waits_holds_no_status() -> None:
    """Under load 2,048 events wait, and a status of ten pods takes 15 KiB."""
    job = build.job()
    gone = weakref.ref(job)
    recorder = Recorder(Rig().cluster, reporter="one", wall=lambda: NOW)
    recorder.record(job, [DISRUPTED])
    del job
    assert gone() is None


@pytest.mark.parametrize("error", [Unavailable("not now"), ValueError("what cannot be written")])
async def test_failed_event_is_not_an_error(error: Exception) -> None:
    rig = Rig().applied()
    rig.cluster.fault = lambda _method, _path: error
    await rig.record(DISRUPTED)
    assert not events(rig)


async def test_long_event_message_is_truncated() -> None:
    rig = Rig().applied()
    await rig.record(Event("Normal", "Failed", "x" * 5000))
    [event] = events(rig)
    assert len(str(event["message"])) == 1024


async def test_a_wave_of_events_is_few_requests() -> None:
    """B3: a node group with 1,000 workers of a job is reclaimed, and nothing waits for 1,000 requests."""
    rig = Rig()
    job = rig.apply()
    rig.cluster.requests.clear()
    rig.recorder.record(
        job, [Event("Warning", "WorkerDisrupted", f"worker {n} was disrupted") for n in range(1000)]
    )
    assert not rig.cluster.requests, "recording sends nothing itself"
    await rig.recorder.drain()
    burst = BURST["Warning"]
    assert len(rig.cluster.requests) == burst + 1
    combined = max(events(rig), key=lambda event: int(str(event["count"])))
    assert combined["count"] == 1000 - burst
    assert combined["message"] == f"{1000 - burst} more of these; the last: worker 999 was disrupted"


async def test_another_reason_is_not_lost_in_a_wave() -> None:
    rig = Rig()
    job = rig.apply()
    rig.recorder.record(job, [Event("Warning", "WorkerDisrupted", f"worker {n}") for n in range(50)])
    rig.recorder.record(job, [Event("Warning", "Failed", "the end")])
    await rig.recorder.drain()
    assert "the end" in [event["message"] for event in events(rig)]


async def test_waiting_events_are_bounded_and_drops_are_counted() -> None:
    results: Counter[str] = Counter()
    rig = Rig()
    job = rig.apply()
    recorder = Recorder(rig.cluster, reporter="r", wall=lambda: NOW, on_result=lambda r: results.update([r]))
    for number in range(MAX_WAITING + 7):
        recorder.record(job, [Event("Normal", f"Reason{number}", "one of very many")])
    await recorder.drain()
    assert results == {"dropped": 7, "posted": MAX_WAITING}


class SlowSpace:
    """A cluster in which a webhook makes the events of the namespace `slow` take 10 s, and fail."""

    def __init__(self) -> None:
        self.posted: list[tuple[float, str]] = []

    async def request(self, method: str, path: str, **_: object) -> Answer:
        space = path.split("/")[4]
        if space == "slow":
            await asyncio.sleep(10.0)
            raise Unavailable("500: failed calling webhook: context deadline exceeded")
        self.posted.append((asyncio.get_running_loop().time(), space))
        return Answer(201, b"{}")

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        raise NotImplementedError


def of(space: str, number: int = 0) -> Resource:
    """A job of a namespace."""
    metadata = {"name": f"job-{number}", "namespace": space, "uid": f"{space}-{number}"}
    return TrainingJob.model_validate({**build.job_manifest(), "metadata": metadata})


@pytest.mark.looptime
async def test_slow_namespace_delays_no_event_of_another() -> None:
    """20 of its events delayed another's by 202 s."""
    cluster = SlowSpace()
    recorder = Recorder(cluster, reporter="r", wall=lambda: NOW)
    async with during(recorder.run()):
        for number in range(20):
            recorder.record(of("slow", number), [DISRUPTED])
        await asyncio.sleep(25)
        recorder.record(of("fine"), [DISRUPTED])
        await asyncio.sleep(1)
    assert cluster.posted == [(pytest.approx(25.0, abs=0.01), "fine")]


@pytest.mark.looptime
async def test_slow_namespace_keeps_none_of_another_from_the_last_second_of_the_process() -> None:
    cluster = SlowSpace()
    recorder = Recorder(cluster, reporter="r", wall=lambda: NOW)
    for number in range(20):
        recorder.record(of("slow", number), [DISRUPTED])
    recorder.record(of("fine"), [DISRUPTED])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await recorder.drain()
    assert [space for _, space in cluster.posted] == ["fine"]


async def test_events_that_are_too_many_are_those_of_the_namespace_with_most() -> None:
    results: Counter[str] = Counter()
    rig = Rig()
    recorder = Recorder(rig.cluster, reporter="r", wall=lambda: NOW, on_result=lambda r: results.update([r]))
    for number in range(5):
        recorder.record(of("few", number), [DISRUPTED])
    for number in range(MAX_WAITING):
        recorder.record(of("many", number), [DISRUPTED])
    await recorder.drain()
    spaces = Counter(path.split("/")[4] for path in rig.cluster.objects if "/events/" in path)
    assert spaces == {"few": 5, "many": MAX_WAITING - 5}
    assert results["dropped"] == 5


@pytest.mark.looptime
async def test_events_of_many_namespaces_are_posted_a_few_at_once_and_one_of_each() -> None:
    open_now: Counter[str] = Counter()
    most = 0

    class Cluster(SlowSpace):
        async def request(self, method: str, path: str, **_: object) -> Answer:
            nonlocal most
            open_now[path] += 1
            most = max(most, open_now.total())
            assert open_now[path] == 1
            await asyncio.sleep(1.0)
            open_now[path] -= 1
            return Answer(201, b"{}")

    recorder = Recorder(Cluster(), reporter="r", wall=lambda: NOW)
    async with during(recorder.run()):
        for number in range(100):
            recorder.record(of(f"space-{number % 10}", number), [DISRUPTED])
        await asyncio.sleep(100 / POSTERS + 1)
    assert most == POSTERS
    assert not recorder._waiting


@pytest.mark.looptime
async def test_combined_events_are_written_at_a_bounded_rate() -> None:
    rig = Rig()
    job = rig.apply()
    async with during(rig.recorder.run()):
        rig.cluster.requests.clear()
        for number in range(100):
            rig.recorder.record(job, [Event("Warning", "WorkerDisrupted", f"worker {number}")])
            await asyncio.sleep(0.05)
    assert len(rig.cluster.requests) <= BURST["Warning"] + 5 / PAUSE_SECONDS + 2


async def test_events_about_a_cluster_scoped_object_are_in_the_default_namespace() -> None:
    rig = Rig()
    limits: dict[str, object] = {"limits": {"nodes": 1}}
    pool = CapacityPool.model_validate({"metadata": {"name": "spot", "uid": "u"}, "spec": limits})
    rig.recorder.record(pool, [Event("Warning", "Exhausted", "no nodes")])
    await rig.recorder.drain()
    assert [path for path in rig.cluster.objects if "/namespaces/default/events/spot." in path]
