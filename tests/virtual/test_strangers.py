"""Somebody who may create pods, and nothing else, makes them look like the next ones of a job."""

from __future__ import annotations

import asyncio

import pytest

from tests.virtual.loop import played, stamp
from tests.virtual.server import Json
from tests.virtual.trainer import Truth
from tests.virtual.world import World


def _stranger(world: World, role: str, incarnation: int) -> Json:
    name = f"digits-{role}-0-{incarnation}"
    uid = world.server.objects["trainingjobs", "team", "digits"]["metadata"]["uid"]
    owner = {"apiVersion": "shoal.dev/v1alpha1", "kind": "TrainingJob", "name": "digits", "uid": uid}
    labels = {"job": "digits", "job-uid": uid, "role": role, "index": "0", "incarnation": str(incarnation)}
    body = {
        "metadata": {
            "name": name,
            "namespace": "team",
            "labels": {f"shoal.dev/{key}": value for key, value in labels.items()},
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"nodeName": "safe-1", "containers": [{"name": role, "image": "theirs"}]},
        "status": {
            "phase": "Running",
            "podIP": "10.9.9.9",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {"name": role, "ready": True, "restartCount": 0, "state": {"running": {"startedAt": stamp()}}}
            ],
        },
    }
    return world.server.store(("pods", "team", name), body)


@pytest.mark.parametrize("ahead", [1, 7])
@played
async def test_pods_of_a_job_are_not_deleted_for_them(ahead: int) -> None:
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(6, 2)
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        await asyncio.sleep(40.0)
        service = world.server.objects["services", "team", "digits-ps-0"]
        for role in ("ps", "worker"):
            _stranger(world, role, ahead)
        await asyncio.sleep(60.0)
        theirs = {f"digits-{role}-0-{ahead}" for role in ("ps", "worker")}
        deleted = {s.key[2] for s in world.server.sent if (s.verb, s.key[0]) == ("DELETE", "pods")}
        assert deleted <= theirs
        assert world.server.objects["services", "team", "digits-ps-0"] == service
        status = world.job().status
        assert (status.restarts.disruptions, status.parameter_servers.restarts) == (0, 0)
        assert (status.workers.ready, status.parameter_servers.ready) == (3, 1)
