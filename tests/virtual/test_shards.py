"""A job that is suspended, given another number of shards, and resumed at once has no servers of both numbers."""

from __future__ import annotations

import asyncio

import pytest

from tests.virtual.loop import played
from tests.virtual.trainer import Truth
from tests.virtual.world import World


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
@played
async def test_servers_of_before_have_ended_when_those_of_another_number_are_made(
    before: int, after: int
) -> None:
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(5, 3)

    def one_number() -> None:
        numbers = {
            pod["metadata"]["labels"]["shoal.dev/shards"]
            for pod in world.server.all("pods")
            if pod["metadata"]["labels"]["shoal.dev/role"] == "ps"
        }
        assert len(numbers) <= 1, world.tell()

    world.watchers.append(one_number)
    async with world.living("a"):
        world.apply(parameterServers={"replicas": before})
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        world.edit(suspend=True)
        await asyncio.sleep(0.3)
        world.edit(parameterServers={"replicas": after})
        await asyncio.sleep(0.3)
        gone = {s["metadata"]["name"] for s in world.server.all("pods")}
        assert len([name for name in gone if "-ps-" in name]) == before, "they are to save all shards"
        world.edit(suspend=False)

        def resumed() -> bool:
            status = world.job().status
            return (status.workers.ready, status.parameter_servers.ready) == (3, after)

        await asyncio.sleep(5.0)
        await world.until(resumed, what="it trains again")
        await world.quiet()
        assert {p["metadata"]["labels"]["shoal.dev/shards"] for p in world.server.all("pods")
                if "-ps-" in p["metadata"]["name"]} == {str(after)}  # fmt: skip
        assert len(world.server.all("services")) == after
