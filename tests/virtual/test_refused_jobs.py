"""Jobs whose pods the API server refuses, beside one that shares their pool: it gets the nodes, and none is bought."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from tests.virtual.loop import played
from tests.virtual.test_bad_pools import condition, pool_world
from tests.virtual.world import World

ANSWERS = {
    "quota": (403, "Forbidden", "exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0"),
    "mistake": (422, "Invalid", 'Pod "x" is invalid: spec.containers[0].imge: unknown field'),
}


def ready(world: World, name: str) -> int:
    return world.job(name, "poor").status.workers.ready


@pytest.mark.by_day(1)
@pytest.mark.parametrize("how", ANSWERS)
@played
async def test_pool_is_not_kept_by_jobs_that_can_have_no_pod(how: str) -> None:
    """They held it for ever, and it was bought for them; the other job had no worker."""
    world = pool_world(samples=1e9)
    world.server.namespaces["poor"] = "Active"
    handle, poor = world.server.handle, {"poor"}

    def answer(
        who: str, verb: str, path: str, query: Mapping[str, str], body: Any, past: int | None
    ) -> Answer:
        if poor and verb == "POST" and "/namespaces/poor/pods" in path:
            code, reason, message = ANSWERS[how]
            said = {"kind": "Status", "code": code, "reason": reason, "message": message}
            return Answer(code, json.dumps(said).encode())
        return handle(who, verb, path, query, body, past)

    world.server.handle = answer  # type: ignore[method-assign]
    workers = {"replicas": 4, "minReplicas": 4, "maxReplicas": 4, "pools": ["good"]}
    async with world.living("a"):
        for name in ("first", "second"):
            world.apply(name, "poor", workers=workers, elasticity={"mode": "Auto"})
        await asyncio.sleep(120)
        status = world.server.objects["capacitypools", "", "good"]["status"]
        assert status["recommended"]["nodes"] == 0
        world.apply("honest", workers=workers, elasticity={"mode": "Auto"})
        await world.until(lambda: world.job("honest").status.workers.ready == 4, 300)
        await asyncio.sleep(700)  # whoever's turn it is
        assert world.job("honest").status.workers.ready == 4
        waits = world.server.objects["trainingjobs", "poor", "first"]
        assert "other jobs have, or are to have, 4 of 4 good" in condition(waits, "PlanReady")["message"]
        poor.clear()
        world.server.delete(("trainingjobs", "team", "honest"), 0)
        await world.until(lambda: sum(ready(world, name) for name in ("first", "second")) == 4, 900)
