"""An operator that loses a right says what it does not know any more."""

from __future__ import annotations

from typing import Any

from shoal.cluster.transport import Answer, Query
from tests.virtual.loop import play
from tests.virtual.trainer import Truth
from tests.virtual.world import World


def test_job_whose_pods_cannot_be_listed_any_more_says_that_they_are_those_of_before() -> None:
    async def story() -> None:
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

    play(story)
