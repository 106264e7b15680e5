"""A machine is announced to end, and no pod is kept off it: whoever is moved may come back to it, and stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.virtual.loop import played, stamp
from tests.virtual.trainer import Truth
from tests.virtual.world import World

SECONDS = 120


@pytest.mark.parametrize("safe", [1, 2])
@pytest.mark.parametrize("how", ["a reboot", "deleted, with a finalizer"])
@played
async def test_server_that_comes_back_to_a_machine_that_is_to_end_stays_there(how: str, safe: int) -> None:
    """It was deleted every 40 s, for as long as the announcement held, and never trained."""
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(3, safe)
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="all workers run")
        pod: Any = world.pod_at("ps", 0)
        _announce(world, pod["spec"]["nodeName"], how)
        up = 0
        for _ in range(SECONDS):
            await asyncio.sleep(1.0)
            up += world.pod_at("ps", 0) is not None
        assert world.job().status.parameter_servers.restarts == 1, world.tell()
        assert up > SECONDS - 30


def _announce(world: World, name: str, how: str) -> None:
    key = "nodes", "", name
    node = world.server.objects[key]
    if how == "a reboot":  # as of AKS, up to 15 minutes before
        event = {"type": "VMEventScheduled", "status": "True", "reason": "RebootScheduled"}
        conditions = [*node["status"]["conditions"], {**event, "message": "", "lastTransitionTime": stamp()}]
        world.server.change(key, status={**node["status"], "conditions": conditions})
    else:
        end = {"deletionTimestamp": stamp(), "finalizers": ["controller.cattle.io/node"]}
        world.server.store(key, {**node, "metadata": {**node["metadata"], **end}})
