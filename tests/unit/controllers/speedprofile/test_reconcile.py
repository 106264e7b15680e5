"""What is written of reports, when, and what is told where it cannot be."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shoal.api.speed_profile import SpeedProfile
from shoal.cluster.transport import Answer
from shoal.controllers.speedprofile import reconcile
from shoal.controllers.speedprofile.reconcile import DAY_SECONDS, LATE_SECONDS, SOON_SECONDS, Known
from shoal.errors import Unavailable
from shoal.runtime.controller import Key
from shoal.runtime.work_queue import WorkQueue
from shoal_trainer.contract import ShardReport
from tests.meanwhile import during
from tests.unit.controllers.planning.world import KEY, PROFILES, World, report, training_job


@pytest.mark.looptime
async def test_profile_is_made_once_and_written_when_an_estimate_moves() -> None:
    world, job = World(), training_job()
    world.add(job)
    path = f"{PROFILES}/{KEY[1]}"

    def writes() -> int:
        return world.cluster.requests.count(("PUT", f"{path}/status"))

    world.hear(job, report(1e6))
    assert await world.learner(KEY) == SOON_SECONDS
    assert writes() == 1
    stored = world.cluster.objects[path]["status"]
    assert stored["jobs"] == "digits"
    assert stored["rows"][0]["compute"]["count"] == "500"
    world.hear(job, report(1e6, count=505))
    await world.learner(KEY)
    assert writes() == 1, "nothing has moved"
    await asyncio.sleep(LATE_SECONDS)
    await world.learner(KEY)
    assert writes() == 2
    world.hear(job, report(1e6, seconds=0.5, count=5000))
    await world.learner(KEY)
    assert writes() == 3
    assert [verb for verb, _ in world.cluster.requests].count("POST") == 1


@pytest.mark.looptime
async def test_a_parameter_server_that_is_missing_in_one_report_counts_once() -> None:
    """When PS 0 restarts, it reports alone until shard 1 answers: one server was as fast as two, and shard 1 twice."""
    world, job = World(), training_job(parameterServers={"replicas": 2})
    world.add(job)

    def shard(index: int, boot: int, updates: int) -> ShardReport:
        return ShardReport(index=index, epoch=0, boot=boot, busy_seconds=updates / 100, updates=updates)

    for life, *shards in (
        ("a", shard(0, 1, 10_000), shard(1, 2, 10_000)),
        ("b", shard(0, 3, 300)),
        ("b", shard(0, 3, 600), shard(1, 2, 10_600)),
    ):
        world.hear(job, report(1e6, shards=tuple(shards), speed_epoch=life))
        await world.learner(KEY)
        await asyncio.sleep(LATE_SECONDS)
    (load,) = world.profile(KEY[1]).status.server_load
    assert (load.parameter_servers, float(load.updates)) == (2, 21_200)


@pytest.mark.looptime
async def test_reports_are_merged_at_intervals_and_not_with_each_of_them() -> None:
    """While no estimate moved, each report of 50 jobs merged those of all: 85 % of a core for one profile."""
    world, queue, looks = World(), WorkQueue[Key](), list[float]()
    world.learner._wake = queue.add
    jobs = [training_job(f"j{n}") for n in range(5)]
    world.add(*jobs)

    async def look(key: Key) -> float | None:
        looks.append(asyncio.get_running_loop().time())
        return await world.learner(key)

    async with during(queue.work(look)):
        for second in range(0, 200, 2):
            for job in jobs:
                world.hear(job, report(1e6, count=500 + second // 100))
            await asyncio.sleep(2)
        assert looks == [20.0 * n for n in range(11)]
        for job in jobs:
            world.state.jobs.drop(job.metadata.uid)
        await asyncio.sleep(3 * SOON_SECONDS)
        assert len(looks) == 12, "nobody reports any more"
        world.add(jobs[0], said=report(1e6, count=900))
        await asyncio.sleep(1)
        assert len(looks) == 13


@pytest.mark.looptime
async def test_a_profile_that_cannot_be_read_any_more_is_not_merged_each_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a change of the CRD that may be all of them, and a merge takes milliseconds."""
    world, job, merges = World(), training_job(), list[Known]()
    world.add(job, said=report(1e6))
    await world.learner(KEY)
    profile = world.profile(KEY[1])
    merged = Known.merged
    monkeypatch.setattr(Known, "merged", lambda known: (merges.append(known), merged(known))[1])
    world.state.profiles.leave_unread(profile.metadata.uid, 1_000)
    await asyncio.sleep(LATE_SECONDS)
    world.hear(job, report(1e6, count=5000))
    assert await world.learner(KEY) == LATE_SECONDS
    assert merges == []
    meta = profile.metadata.model_copy(update={"resource_version": "1001"})
    path = f"{PROFILES}/{KEY[1]}"
    world.cluster.objects[path]["metadata"]["resourceVersion"] = "1001"
    world.state.profiles.put(profile.model_copy(update={"metadata": meta}))
    await world.learner(KEY)
    assert world.cluster.objects[path]["status"]["rows"][0]["compute"]["count"] == "5000"


@pytest.mark.looptime
async def test_last_report_of_a_job_is_kept_when_it_ends() -> None:
    world, job = World(), training_job()
    world.add(job, said=report(1e6))
    await world.learner(KEY)
    world.hear(job, report(0, count=510))
    done = {"type": "Complete", "status": "True", "reason": "Trained"}
    conditions = [{**done, "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    world.add(training_job(metadata={"resourceVersion": "2"}, status={"conditions": conditions}))
    assert await world.learner(KEY) == DAY_SECONDS
    assert world.profile(KEY[1]).status.rows[0].compute.count == "510"
    assert await world.learner(KEY) == DAY_SECONDS


@pytest.mark.looptime
async def test_namespace_that_goes_takes_its_profile_and_stops_nothing() -> None:
    world, job = World(), training_job()
    world.add(job, said=report(1e6))
    gone = b'{"message": "unable to create new content in namespace ns because it is being terminated"}'
    world.cluster.fault = lambda _method, _path: Answer(403, gone)
    assert await world.learner(KEY) is None


async def test_reports_are_merged_off_the_loop() -> None:
    world, job = World(), training_job()
    world.add(job, said=report(1e6))
    loop, threads = threading.current_thread(), []
    known = world.learner.known(KEY)
    assert known.merged().status.rows

    class Spied(Known):
        def merged(self) -> SpeedProfile:
            threads.append(threading.current_thread())
            return super().merged()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconcile, "Known", Spied)
        await world.learner(KEY)
    assert len(threads) == 1
    assert loop not in threads


async def test_a_profile_that_is_refused_is_told_on_its_job_once() -> None:
    """A bad name in the annotation was told in the operator's log only."""
    world, job = World(), training_job(profile="My_Model")
    world.add(job)
    said = b'{"message": "metadata.name: Invalid value: \\"My_Model\\": a lowercase RFC 1123 subdomain"}'
    world.cluster.fault = lambda method, _path: Answer(422, said) if method == "POST" else None
    world.hear(job, report(7e6))
    for _ in range(3):
        with pytest.raises(Unavailable):
            await world.learner(("team", "My_Model"))
    [(name, event)] = world.told
    assert (name, event.type, event.reason) == ("digits", "Warning", "SpeedProfileRefused")
    assert "SpeedProfile My_Model, which the annotation shoal.dev/speed-profile names" in event.message
    assert "Invalid value" in event.message
