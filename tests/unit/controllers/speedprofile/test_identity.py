"""A profile is that of one model: the annotation of a job of another one is not followed, and the job is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.controllers.speedprofile.reconcile import ANNOTATION, SOON_SECONDS, profile_name
from shoal.runtime.status_writer import collection_path
from shoal_trainer.contract import StatusReport
from tests.unit.controllers.planning.test_planner import MODEL, World, job_manifest, report

OTHER = MODEL.model_copy(update={"fingerprint": "cd" * 32, "flops_per_sample": 8e8, "parameters": 5_000_000})
KEY = ("team", "resnet")


def annotated(name: str) -> TrainingJob:
    manifest = job_manifest(name)
    manifest["metadata"]["annotations"] = {ANNOTATION: KEY[1]}
    return TrainingJob.model_validate(manifest)


def of_other(count: int) -> StatusReport:
    """Of a model that takes ten times as long."""
    return report(1e6, seconds=2.0, count=count).model_copy(update={"model": OTHER})


def add_profile(world: World, **more: Any) -> None:
    body = {"metadata": {"name": KEY[1], "namespace": "team"}, **more}
    stored = world.cluster.add(f"{collection_path(SpeedProfile, 'team')}/{KEY[1]}", body)
    world.state.profiles.put(SpeedProfile.model_validate(stored))


async def train_together(
    world: World, one: TrainingJob, two: TrainingJob
) -> tuple[SpeedProfile, SpeedProfile]:
    """Two jobs of different models, heard several times: the profile that was named, and that of the second model."""
    world.add(one, two)
    for n in range(1, 4):
        world.hear(one, report(1e6, seconds=0.2, count=500 * n))
        world.hear(two, of_other(500 * n))
        for key in world.learner.keys:
            await world.learner(key)
        await asyncio.sleep(SOON_SECONDS)
    named = world.state.profiles.get(KEY[1], "team")
    others = world.state.profiles.get(profile_name(OTHER.fingerprint), "team")
    assert named is not None
    assert others is not None
    return named, others


def means(profile: SpeedProfile) -> list[float]:
    return [float(row.compute.mean_seconds) for row in profile.status.rows]


@pytest.mark.looptime
@pytest.mark.parametrize("described", [True, False])
async def test_an_annotation_does_not_mix_two_models(described: bool) -> None:
    """Both were measured in one row, for good: of a profile that a user described, or that two jobs began together."""
    world = World()
    if described:
        model = {
            "flopsPerSample": 8e7,
            "parameters": 500_000,
            "tensors": 20,
            "fingerprint": MODEL.fingerprint,
        }
        add_profile(world, spec={"model": model})
    named, others = await train_together(world, annotated("one"), annotated("two"))
    assert named.status.model is not None
    assert named.status.model.fingerprint == MODEL.fingerprint
    assert named.status.jobs == "one"
    assert means(named) == [pytest.approx(0.2, rel=0.01)]
    assert means(others) == [pytest.approx(2.0, rel=0.01)]
    [(name, event)] = world.told
    assert (name, event.type, event.reason) == ("two", "Warning", "SpeedProfileRefused")
    assert (
        "the annotation shoal.dev/speed-profile names SpeedProfile resnet, which is of another model"
        in event.message
    )
    assert profile_name(OTHER.fingerprint) in event.message


@pytest.mark.looptime
async def test_a_described_profile_with_measurements_of_another_model_is_not_used() -> None:
    world = World()
    model = {"flopsPerSample": 8e7, "parameters": 500_000, "tensors": 20, "fingerprint": MODEL.fingerprint}
    measured = {"fingerprint": OTHER.fingerprint, "parameters": 5_000_000, "tensors": 20}
    add_profile(world, spec={"model": model}, status={"model": measured})
    job = TrainingJob.model_validate(job_manifest())
    assert world.learner.name_of(job, MODEL.fingerprint) == profile_name(MODEL.fingerprint)
    assert world.learner.name_of(annotated("one"), OTHER.fingerprint) == profile_name(OTHER.fingerprint)
    assert world.learner.name_of(annotated("one"), "") == KEY[1]
