"""A namespace is deleted while a job trains in it: nothing is left of it, and jobs elsewhere notice nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.virtual.judge import Judge
from tests.virtual.loop import played
from tests.virtual.script import watch_slots
from tests.virtual.trainer import Truth
from tests.virtual.world import World

GUEST = "guest"


def runs(world: World, name: str, namespace: str) -> bool:
    status = world.job(name, namespace).status
    return (status.workers.ready, status.parameter_servers.ready) == (3, 1) and not world.lacking(
        name, namespace
    )


def node_of(world: World, name: str) -> str:
    found: Any = world.cluster.process_of(name)
    return str(found.machine.name)


@pytest.mark.parametrize("pods_first", [True, False], ids=["pods first", "all at once"])
@played
async def test_nothing_is_left_of_a_deleted_namespace_and_jobs_elsewhere_go_on(pods_first: bool) -> None:
    """In the same moment a worker in it is lost without a word, and one elsewhere is reclaimed."""
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(8, 3)
    world.cluster.pods_first = pods_first
    judge = Judge(world, None)
    watch_slots(world)
    world.watchers.append(judge.look)
    async with world.living("a"):
        world.server.namespaces[GUEST] = "Active"
        world.apply()
        world.apply(GUEST, GUEST)
        await world.until(lambda: runs(world, "digits", "team") and runs(world, GUEST, GUEST), 60, "both run")
        gone, world.server.namespaces[GUEST] = world.job(GUEST, GUEST).metadata.uid, "Terminating"
        ended = [p for p in world.cluster.processes.values() if p.job == gone]
        reclaimed = node_of(world, "digits-worker-1-0")
        judge.strike([*ended, *(p for p in world.cluster.processes.values() if p.machine.name == reclaimed)])
        world.cluster.kill(node_of(world, "guest-worker-1-0"))
        world.cluster.notice(reclaimed)

        def goes_on() -> bool:
            return world.job().status.restarts.disruptions == 1 and runs(world, "digits", "team")

        await world.until(goes_on, 40, "it goes on")
        await world.until(lambda: GUEST not in world.server.namespaces, 90, "nothing is in it")
        assert not [p for p in world.cluster.processes.values() if p.job == gone]
        kept = {p["metadata"]["name"] for p in world.server.all("pods")}
        assert kept == {f"digits-{name}" for name in ("ps-0-0", "worker-0-0", "worker-1-1", "worker-2-0")}
        world.server.namespaces[GUEST] = "Active"
        world.apply(GUEST, GUEST)
        await world.until(lambda: runs(world, GUEST, GUEST), 60, "one of its name runs")
        await asyncio.sleep(30)
    assert not judge.broken, judge.broken
