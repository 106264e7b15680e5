"""An operator that loses a right says what it does not know any more."""

from __future__ import annotations

from typing import Any

from shoal.cluster.transport import Answer, Query
from tests.virtual.loop import played
from tests.virtual.trainer import Truth
from tests.virtual.world import World


@played
async def test_pod_that_may_be_listed_and_not_read_is_replaced() -> None:
    """It went without a word, so the API server is asked, by the right that there is."""
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(4, 1)
    handle = world.server.handle

    def without(who: str, verb: str, path: str, query: Query, body: Any, past: int | None) -> Answer:
        if verb == "GET" and "/pods/" in path:
            return Answer(403, b'{"reason": "Forbidden", "message": "no"}')
        return handle(who, verb, path, query, body, past)

    world.server.handle = without  # type: ignore[method-assign]
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        await world.quiet()
        world.server.delete(("pods", "team", "digits-worker-1-0"), 0)
        await world.until(lambda: world.pod_at("worker", 1) is not None, 30.0, "it is replaced")
        assert world.job().status.restarts.by_reason == {"Gone": 1}


@played
async def test_job_whose_pods_cannot_be_listed_any_more_says_that_they_are_those_of_before() -> None:
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(4, 1)
    handle, denied = world.server.handle, False

    def without(who: str, verb: str, path: str, query: Query, body: Any, past: int | None) -> Answer:
        if denied and verb == "GET" and path.endswith("/pods"):
            return Answer(403, b'{"reason": "Forbidden", "message": "no"}')
        return handle(who, verb, path, query, body, past)

    world.server.handle = without  # type: ignore[method-assign]
    async with world.living():
        replica = world.replica("a")
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        denied = True
        assert replica.operator is not None
        replica.operator._reflectors["pods"].request_refresh()
        await world.until(lambda: world.job().status.reason == "PodsUnreadable", 120.0, "it says so")
        denied = False
        await world.until(lambda: not world.job().status.reason, 400.0, "it is told no more")
