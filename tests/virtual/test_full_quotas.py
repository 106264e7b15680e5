"""A job that fills its ResourceQuota, and whose server's machine dies: it trains again, with the places that it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from tests.virtual.loop import now, played
from tests.virtual.server import Change
from tests.virtual.trainer import Truth
from tests.virtual.world import World

FULL = {
    "reason": "Forbidden",
    "message": "exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4",
}


def with_quota(most: list[int]) -> World:
    """A world with room for so many pods."""
    world = World(lambda _: Truth(samples=1e9))
    world.nodes(5, 2)
    handle = world.server.handle

    def answer(
        who: str, verb: str, path: str, query: Mapping[str, str], body: Any, past: int | None
    ) -> Answer:
        if verb == "POST" and path.endswith("/pods") and len(world.server.all("pods")) >= most[0]:
            return Answer(403, json.dumps(FULL).encode())
        return handle(who, verb, path, query, body, past)

    world.server.handle = answer  # type: ignore[method-assign]
    world.cluster.drop = lambda _name: None  # type: ignore[method-assign, assignment]  # no cloud says that the machine is gone
    return world


@pytest.mark.parametrize("taken", [False, True], ids=["free", "taken"])
@played
async def test_job_that_fills_its_quota_trains_again_after_its_server_was_lost(*, taken: bool) -> None:
    """The dead pod kept the place for as long as it was not heard; and if another had it then, all waited for ever."""
    most = [4]
    world = with_quota(most)

    def take(change: Change, _old: object) -> None:
        if taken and (change.kind, change.key[2]) == ("DELETED", "digits-ps-0-0"):
            most[0] = 3  # a pod of another job has it

    world.server.on_change.append(take)
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, 100)
        server = world.pod_at("ps", 0)
        assert server is not None
        world.cluster.kill(server["spec"]["nodeName"])
        await world.until(
            lambda: world.server.get("pods", "digits-ps-0-0", "team") is None, 175, "it is gone"
        )
        gone = now()
        await world.until(lambda: world.pod_at("ps", 0) is not None, 60, "its successor runs")
        if not taken:
            assert now() - gone < 10, "it is asked at once whether the place is free"
        ready = 2 if taken else 3
        await world.until(lambda: world.job().status.workers.ready == ready, 30, "it trains")
        assert world.job().status.restarts.disruptions == 0
