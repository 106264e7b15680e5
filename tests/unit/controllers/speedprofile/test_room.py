"""Which profiles stay in a namespace: what makes room, what is too old, and what a job is told that finds none."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Answer
from shoal.controllers.speedprofile.reconcile import DAY_SECONDS, MOST_MADE, MOST_MODELS, SOON_SECONDS
from shoal.sizing.fleet import FleetJob, FleetPlan
from tests.unit.controllers.planning.world import (
    KEY,
    MADE,
    MODEL,
    NOW,
    ON_DEMAND,
    SPOT,
    World,
    report,
    training_job,
)


def add_profile(world: World, number: int, **more: Any) -> str:
    """A profile that the operator made: the higher its number, the newer its measurements. Its name."""
    name = f"model-{number}"
    status = {"lastUpdated": (NOW - timedelta(days=30) + timedelta(minutes=number)).isoformat()}
    world.add_profile(name, **{"metadata": MADE, "status": status, **more})
    return name


def full(world: World, **more: Any) -> None:
    for number in range(MOST_MADE):
        add_profile(world, number, **more)


def all_in_use(world: World) -> None:
    """Each of them has measurements of a job that runs."""
    world.add(training_job("busy"))
    full(world, status={"sources": [{"uid": "uid-busy"}]})


async def without_room() -> tuple[World, TrainingJob]:
    """A job was heard of in a namespace that is full."""
    world = World()
    all_in_use(world)
    job = training_job()
    world.add(job, said=report(1e6))
    await world.learner(KEY)
    return world, job


def count_of_faults(world: World) -> float | None:
    return world.metrics.registry.get_sample_value("shoal_plan_faults_total", {"what": "report"})


@pytest.mark.looptime
async def test_in_a_full_namespace_the_profile_that_was_measured_longest_ago_makes_room() -> None:
    world = World()
    full(world)
    job = training_job()
    world.add(job, said=report(1e6))
    assert await world.learner(KEY) == SOON_SECONDS
    assert world.cluster.writes("DELETE", "speedprofiles") == ["model-0"]
    profile = world.profile(KEY[1])
    assert profile.status.rows
    assert world.told == []


@pytest.mark.looptime
async def test_no_profile_makes_room_that_a_job_uses_or_a_user_wrote() -> None:
    world = World()
    world.add(training_job("busy", profile="model-1"))
    full(world)
    add_profile(world, 0, status={"sources": [{"uid": "uid-busy"}]})
    add_profile(world, 2, spec={"convergence": {"r1": 100, "r2": 0, "r3": 1000, "r4": 0.2}})
    world.hear(training_job("heard", profile="model-3"), report(1e6))
    job = training_job()
    world.add(job, said=report(1e6))
    await world.learner(KEY)
    assert world.cluster.writes("DELETE", "speedprofiles") == ["model-4"]


@pytest.mark.looptime
@pytest.mark.parametrize("used", [True, False])
async def test_what_finds_no_room_is_planned_with_and_told_to_its_job(used: bool) -> None:
    """It was dropped from memory: a job that had run for hours was planned by the data sheets, and heard nothing."""
    world = World()
    if used:
        all_in_use(world)
    else:  # the API server lets none go
        full(world)
        world.cluster.fault = lambda method, _path: Answer(403, b"{}") if method == "DELETE" else None
    job = training_job()
    world.add(job, SPOT, ON_DEMAND)
    for _ in range(3):
        world.hear(job, report(1e6))
        assert await world.learner(KEY) == SOON_SECONDS
        await asyncio.sleep(SOON_SECONDS)
    assert not world.cluster.writes("POST", "speedprofiles")
    assert world.learner.known(KEY).merged().status.rows
    found = await world.planned(job)
    assert found.measured
    [(name, event)] = world.told
    assert (name, event.type, event.reason) == ("digits", "Warning", "SpeedProfileRefused")
    assert f"namespace team has {MOST_MADE} that Shoal made" in event.message
    assert count_of_faults(world) == 3
    world.cluster.fault = lambda _method, _path: None
    for profile in list(world.state.profiles.all())[:1]:
        world.state.profiles.drop(profile.metadata.uid)
    await world.learner(KEY)
    profile = world.profile(KEY[1])
    assert profile.status.rows


@pytest.mark.looptime
async def test_what_finds_no_room_is_not_looked_at_with_each_report() -> None:
    world, job = await without_room()
    assert world.woken_profiles == [KEY]
    for count in (501, 502):
        world.hear(job, report(1e6, count=count))
        await asyncio.sleep(SOON_SECONDS)
    assert world.woken_profiles == [KEY]
    assert await world.learner(KEY) == SOON_SECONDS


@pytest.mark.looptime
async def test_what_found_no_room_is_forgotten_with_its_job() -> None:
    world, job = await without_room()
    world.state.jobs.drop(job.metadata.uid)
    await world.learner(KEY)
    assert await world.learner(KEY) is None
    assert KEY not in world.learner.keys


@pytest.mark.looptime
async def test_a_job_makes_a_few_profiles_however_often_its_coordinator_starts_with_another_model() -> None:
    """200 reports of one pod, each of another process and model, filled a namespace for half a year."""
    world, job = World(), training_job()
    world.add(job)

    async def hear(n: int) -> None:
        model = MODEL.model_copy(update={"fingerprint": f"{n:064x}"})
        said = report(1e6, model=model, speed_epoch=f"process-{n}")
        world.hear(job, said)
        for key in world.learner.keys:
            await world.learner(key)

    for n in range(20):
        await hear(n << 192)
    assert len(list(world.state.profiles.all())) == MOST_MODELS
    assert count_of_faults(world) == 20 - MOST_MODELS
    [(_, event)] = world.told
    assert event.reason == "SpeedProfileRefused"
    assert f"{MOST_MODELS} models" in event.message
    await hear(0)  # one of those that are known
    assert count_of_faults(world) == 20 - MOST_MODELS


OLD = ("team", "old")


def add_old_profile(world: World, name: str = "old", fingerprint: str = "f", **more: Any) -> None:
    """A profile that the operator made, and that was last measured half a year ago."""
    model = {"fingerprint": fingerprint, "flopsPerSample": "8e7", "parameters": 500_000, "tensors": 20}
    status = {"model": model, "lastUpdated": (NOW - timedelta(days=181)).isoformat()}
    world.add_profile(name, **{"metadata": MADE, "status": status} | more)


async def test_a_profile_of_ours_that_nobody_uses_is_deleted_when_it_is_too_old_to_count() -> None:
    """Each version of a model leaves one, of up to a megabyte."""
    world = World()
    add_old_profile(world)
    world.wall = NOW - timedelta(days=2)
    assert await world.learner(OLD) == DAY_SECONDS
    world.wall = NOW
    assert await world.learner(OLD) is None
    assert world.cluster.writes("DELETE", "speedprofiles") == ["old"]
    assert world.state.profiles.get("old", "team") is None


@pytest.mark.looptime
async def test_a_deleted_profile_that_waits_for_a_finalizer_is_known_until_it_is_gone() -> None:
    """It was dropped for good: a job that came meanwhile asked each minute for one to be made, and had a 409."""
    world = World()
    metadata = {**MADE, "finalizers": ["example.com/backup"]}
    add_old_profile(world, KEY[1], MODEL.fingerprint, metadata=metadata)
    for _ in range(3):
        await world.learner(KEY)
    assert world.cluster.writes("DELETE", "speedprofiles") == [KEY[1]]
    world.add(training_job(), said=report(1e6))
    assert await world.learner(KEY) == SOON_SECONDS
    waiting = world.state.profiles.get(KEY[1], "team")
    assert waiting is not None
    path = next(path for path in world.cluster.objects if path.endswith(KEY[1]))
    del world.cluster.objects[path]  # as its watch tells
    world.state.profiles.drop(waiting.metadata.uid, at=world.cluster.version)
    assert await world.learner(KEY) == SOON_SECONDS
    assert world.profile(KEY[1]).status.rows


@pytest.mark.looptime
async def test_deleted_profiles_that_wait_for_a_finalizer_make_room_once() -> None:
    """Each makes room for one, whether or not it is gone yet."""
    world = World()
    full(world, metadata={**MADE, "finalizers": ["example.com/backup"]})
    for name in ("a", "b"):
        world.add(training_job(name, profile=f"of-{name}"), said=report(1e6))
        assert await world.learner(("team", f"of-{name}")) == SOON_SECONDS
    assert world.cluster.writes("DELETE", "speedprofiles") == ["model-0", "model-1"]


@pytest.mark.parametrize("later", ["nothing", "a job"])
async def test_a_clock_that_is_half_a_year_ahead_deletes_no_profile(later: str) -> None:
    """What a leader deletes with such a clock is gone for good. What is made meanwhile says what time it is."""
    world, real = World(), NOW - timedelta(days=180)
    world.cluster.now = lambda: real
    add_old_profile(world)
    if later == "a job":
        world.add(training_job(metadata={"creationTimestamp": f"{real:%Y-%m-%dT%H:%M:%SZ}"}))
    world.wall = NOW
    assert await world.learner(OLD) == DAY_SECONDS
    assert world.cluster.writes("DELETE", "speedprofiles") == []
    world.add(training_job("later", metadata={"creationTimestamp": f"{NOW:%Y-%m-%dT%H:%M:%SZ}"}))
    assert await world.learner(OLD) is None
    assert world.cluster.writes("DELETE", "speedprofiles") == ["old"]


@pytest.mark.parametrize(
    "more", [{"spec": {"convergence": {"r1": 100, "r2": 0, "r3": 1000, "r4": 0.2}}}, {"metadata": {}}]
)
async def test_a_profile_in_which_a_user_has_a_part_is_never_deleted(more: dict[str, Any]) -> None:
    world = World()
    add_old_profile(world, **more)
    await world.learner(OLD)
    assert world.cluster.writes("DELETE", "speedprofiles") == []


async def test_a_profile_that_a_job_asks_for_is_kept_and_planned_with() -> None:
    profiles: list[int] = []

    def plan(_pools: object, known: list[object], _jobs: list[FleetJob], **_: object) -> FleetPlan:
        profiles.append(len(known))
        return FleetPlan({})

    world = World(plan=plan)
    add_old_profile(world)
    world.add(training_job(), SPOT)
    await world.planner.plan_once()
    world.add(training_job(profile="old", metadata={"resourceVersion": "2"}))
    await world.planner.plan_once()
    assert profiles == [0, 1]
    assert await world.learner(OLD) == DAY_SECONDS
    assert world.cluster.writes("DELETE", "speedprofiles") == []
