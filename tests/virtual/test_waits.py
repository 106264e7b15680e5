"""What a job that waits for somebody else costs the API server: a name that is taken, a quota that is full."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import count
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from tests.virtual.loop import played
from tests.virtual.trainer import Truth
from tests.virtual.world import World

MINUTE = 60.0


def taken(kind: str, name: str) -> tuple[tuple[str, str, str], dict[str, Any]]:
    """An object of somebody else that has a name of the job's."""
    spec = {"selector": {"app": "x"}} if kind == "services" else {"nodeName": "spot-0", "containers": []}
    metadata = {"name": name, "namespace": "team"}
    return (kind, "team", name), {"metadata": metadata, "spec": spec, "status": {"phase": "Succeeded"}}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "names",
    [[("services", "digits-ps-0")], [("pods", f"digits-worker-{index}-0") for index in range(20)]],
    ids=["service", "pods"],
)
@played
async def test_a_taken_name_is_told_once_and_asked_for_ever_more_rarely(names: list[tuple[str, str]]) -> None:
    world = World(lambda _: Truth(samples=1e9))
    world.nodes(len(names) + 2, 1)
    for kind, name in names:
        world.server.store(*taken(kind, name))
    stalled: list[bool] = []

    def look() -> None:
        condition = world.job().status.condition("Stalled")
        now = condition is not None and (condition.status, condition.reason) == ("True", "NameCollision")
        if not stalled or stalled[-1] != now:
            stalled.append(now)

    world.watchers.append(look)
    async with world.living("a"):
        world.apply(workers={"replicas": len(names) + 1, "maxReplicas": len(names) + 1})
        await asyncio.sleep(2 * MINUTE)
        assert stalled in ([True], [False, True])
        sent = len(world.server.sent)
        await asyncio.sleep(5 * MINUTE)
        asked = Counter((each.verb, each.key[0]) for each in world.server.sent[sent:])
        assert 0 < asked["POST", names[0][0]] <= 6 * len(names)
        assert asked["PUT", "trainingjobs"] <= 11
        assert stalled[-1]
        for kind, name in names:
            world.server.remove((kind, "team", name))
        ready = len(names) + 1
        await world.until(
            lambda: world.job().status.workers.ready == ready and not stalled[-1], 2 * MINUTE, "it trains"
        )


@played
async def test_a_full_quota_is_asked_for_once_a_minute_and_its_figures_are_no_news() -> None:
    world = World(lambda _: Truth(samples=1e9))
    world.nodes(5, 1)
    used, handle = count(100), world.server.handle

    def refuse(who: Any, method: str, path: str, *rest: Any, **options: Any) -> Answer:
        if not (method == "POST" and path.endswith("/pods")):
            return handle(who, method, path, *rest, **options)
        words = (
            f"forbidden: exceeded quota: team, requested: pods=1, used: pods={next(used)}, limited: pods=99"
        )
        body = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": words}
        return Answer(403, json.dumps(body).encode())

    world.server.handle = refuse  # type: ignore[method-assign, assignment]
    async with world.living("a"):
        world.apply()
        await asyncio.sleep(2 * MINUTE)
        asked, writes = next(used), world.writes()["PUT trainingjobs/status"]
        await asyncio.sleep(10 * MINUTE)
        assert 10 <= next(used) - asked <= 25
        assert world.writes()["PUT trainingjobs/status"] - writes <= 11
        condition = world.job().status.condition("QuotaExceeded")
        assert condition is not None
        assert condition.status == "True"
        world.server.handle = handle  # type: ignore[method-assign]
        await world.until(lambda: world.job().status.workers.ready == 3, 3 * MINUTE, "there is room")
