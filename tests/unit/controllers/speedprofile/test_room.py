"""A namespace has so many profiles: which one makes room, and what a job is told that finds none."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.labels import SPEED_PROFILE
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Answer
from shoal.controllers.speedprofile.identity import profile_name
from shoal.controllers.speedprofile.reconcile import MOST_MADE, MOST_MODELS, SOON_SECONDS
from shoal.runtime.status_writer import collection_path
from tests.unit.controllers.planning.test_planner import MODEL, NOW, World, job_manifest, pool, report

KEY = ("team", profile_name(MODEL.fingerprint))


def add_profile(world: World, number: int, **more: Any) -> str:
    """A profile that the operator made: the higher its number, the newer its measurements. Its name."""
    name = f"model-{number}"
    about = {"namespace": "team", "name": name, "labels": {"app.kubernetes.io/managed-by": "shoal"}}
    status = {"lastUpdated": (NOW - timedelta(days=30) + timedelta(minutes=number)).isoformat()}
    body = {"metadata": about, "status": status, **more}
    stored = world.cluster.add(f"{collection_path(SpeedProfile, 'team')}/{name}", body)
    world.state.profiles.put(SpeedProfile.model_validate(stored))
    return name


def full(world: World, **more: Any) -> None:
    for number in range(MOST_MADE):
        add_profile(world, number, **more)


def all_in_use(world: World) -> None:
    """Each of them has measurements of a job that runs."""
    world.add(TrainingJob.model_validate(job_manifest("busy")))
    full(world, status={"sources": [{"uid": "uid-busy"}]})


async def without_room() -> tuple[World, TrainingJob]:
    """A job was heard of in a namespace that is full."""
    world = World()
    all_in_use(world)
    job = TrainingJob.model_validate(job_manifest())
    world.add(job)
    world.hear(job, report(1e6))
    await world.learner(KEY)
    return world, job


def count_of_faults(world: World) -> float | None:
    return world.metrics.registry.get_sample_value("shoal_plan_faults_total", {"what": "report"})


@pytest.mark.looptime
async def test_in_a_full_namespace_the_profile_that_was_measured_longest_ago_makes_room() -> None:
    world = World()
    full(world)
    job = TrainingJob.model_validate(job_manifest())
    world.add(job)
    world.hear(job, report(1e6))
    assert await world.learner(KEY) == SOON_SECONDS
    assert world.cluster.writes("DELETE", "speedprofiles") == ["model-0"]
    profile = world.state.profiles.get(KEY[1], "team")
    assert profile is not None
    assert profile.status.rows
    assert world.told == []


@pytest.mark.looptime
async def test_no_profile_makes_room_that_a_job_uses_or_a_user_wrote() -> None:
    world = World()
    manifest = job_manifest("busy")
    manifest["metadata"]["annotations"] = {SPEED_PROFILE: "model-1"}
    world.add(TrainingJob.model_validate(manifest))
    full(world)
    add_profile(world, 0, status={"sources": [{"uid": "uid-busy"}]})
    add_profile(world, 2, spec={"convergence": {"r1": 100, "r2": 0, "r3": 1000, "r4": 0.2}})
    heard = TrainingJob.model_validate(job_manifest("heard"))
    heard = heard.model_copy(
        update={"metadata": heard.metadata.model_copy(update={"annotations": {SPEED_PROFILE: "model-3"}})}
    )
    world.hear(heard, report(1e6))
    job = TrainingJob.model_validate(job_manifest())
    world.add(job)
    world.hear(job, report(1e6))
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
    job = TrainingJob.model_validate(job_manifest())
    world.add(job, pool("spot", 0.3, True), pool("on-demand", 1.0, False))
    for _ in range(3):
        world.hear(job, report(1e6))
        assert await world.learner(KEY) == SOON_SECONDS
        await asyncio.sleep(SOON_SECONDS)
    assert not world.cluster.writes("POST", "speedprofiles")
    assert world.learner.known(KEY).merged().status.rows
    await world.planner.plan_once()
    found = world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert found.measured
    [(name, event)] = world.told
    assert (name, event.type, event.reason) == ("digits", "Warning", "SpeedProfileRefused")
    assert f"namespace team has {MOST_MADE} that Shoal made" in event.message
    assert count_of_faults(world) == 3
    world.cluster.fault = lambda _method, _path: None
    for profile in list(world.state.profiles.all())[:1]:
        world.state.profiles.drop(profile.metadata.uid)
    await world.learner(KEY)
    profile = world.state.profiles.get(KEY[1], "team")
    assert profile is not None
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
    world = World()
    job = TrainingJob.model_validate(job_manifest())
    world.add(job)

    async def hear(n: int) -> None:
        model = MODEL.model_copy(update={"fingerprint": f"{n:064x}"})
        said = report(1e6).model_copy(update={"model": model, "speed_epoch": f"process-{n}"})
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
