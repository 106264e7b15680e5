"""A job that evaluates for a third of its time is predicted right, at half and before its first step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.virtual.cluster import Machine
from tests.virtual.loop import now, play
from tests.virtual.server import Json
from tests.virtual.trainer import Truth
from tests.virtual.world import GROUP, World

POOL: Json = {
    "accelerator": {"name": "T4"},
    "capacityType": "OnDemand",
    "nodeSelector": {"pool": "own"},
    "limits": {"nodes": 4},
    "price": {"perHour": 1.0},
    "startupSeconds": 10,
}
EPOCHS, TRAINING, EVALUATION = 4, 320.0, 160.0
"""Seconds of an epoch with two workers."""
WITHIN = 0.15


def apply(world: World, name: str, **more: Any) -> None:
    world.apply(
        name,
        training={"entrypoint": "digits:job", "batchSize": 128, "stopAfter": {"epochs": EPOCHS}},
        workers={"replicas": 2, "minReplicas": 1, "pools": ["own"]},
        **more,
    )


def remaining(world: World, name: str) -> float:
    found = world.job(name).status.prediction
    assert found is not None
    assert found.remaining_seconds is not None
    return float(found.remaining_seconds)


@pytest.mark.nightly
def test_a_job_with_long_evaluations_is_predicted_at_half_and_before_its_first_step() -> None:
    truth = Truth(samples=0.0)
    epoch = TRAINING * truth.speed(["T4", "T4"])
    truth = Truth(samples=EPOCHS * epoch, epoch=epoch, evaluation=EVALUATION)

    async def story() -> None:
        world = World(lambda _uid: truth, plan_seconds=30.0, step_seconds=4.0)
        world.nodes(0, 1)
        for number in range(2):
            world.cluster.add(Machine(f"own-{number}", {"pool": "own", "accelerator": "T4"}))
        body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": "own"}, "spec": POOL}
        world.server.store(("capacitypools", "", "own"), body)
        async with world.living("a"):
            apply(world, "first")
            await world.until(lambda: progress(world) >= 50, 4000, "half is trained")
            await asyncio.sleep(35)  # a plan
            half, said = now(), remaining(world, "first")
            await world.until(lambda: world.job("first").status.finished, 6000, "the first ends")
            took = now() - half
            assert said == pytest.approx(took, rel=WITHIN)

            profile = world.server.all("speedprofiles")[0]["metadata"]["name"]
            apply(world, "second")
            named = {"shoal.dev/speed-profile": profile}
            key = "trainingjobs", "team", "second"
            job = world.server.objects[key]
            world.server.store(key, {**job, "metadata": {**job["metadata"], "annotations": named}})
            await world.until(lambda: world.job("second").status.prediction is not None, 100, "a prediction")
            begun, said = now(), remaining(world, "second")
            assert not world.job("second").status.training.step
            await world.until(lambda: world.job("second").status.finished, 6000, "the second ends")
            assert said == pytest.approx(now() - begun, rel=WITHIN)

    def progress(world: World) -> float:
        return float(world.job("first").status.training.progress_percent or 0)

    play(story)
