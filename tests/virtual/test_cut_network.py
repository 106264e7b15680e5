"""The network between the control plane and all nodes is cut for longer than any patience; everything trains on."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from shoal.errors import Unavailable
from tests.virtual.loop import play, played
from tests.virtual.trainer import Truth
from tests.virtual.world import World


async def cut_off(_endpoint: object) -> bytes:
    """No coordinator is heard."""
    raise Unavailable("no route to host")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("seconds", [180, 400])
def test_no_healthy_pod_is_replaced_when_all_nodes_are_heard_again(seconds: float) -> None:
    jobs = ["j0", "j1", "j2"]

    async def story() -> None:
        world = World(lambda _: Truth(samples=1e9))
        world.nodes(9, 3)
        async with world.living("a"):
            for name in jobs:
                world.apply(name)
            await world.until(
                lambda: all(world.job(name).status.workers.ready == 3 for name in jobs), 200, "they train"
            )
            sent, read = len(world.server.sent), world.trainers.read
            world.trainers.read = cut_off  # type: ignore[method-assign, assignment]
            for machine in list(world.cluster.machines):
                world.cluster.disconnect(machine)
            await asyncio.sleep(seconds)
            world.trainers.read = read  # type: ignore[method-assign]
            for machine in list(world.cluster.machines):
                world.cluster.reconnect(machine)
                await asyncio.sleep(0.1)
            await asyncio.sleep(120)
            changed = {each.verb for each in world.server.sent[sent:] if each.key[0] == "pods"}
            assert changed & {"POST", "DELETE"} == set()
            for name in jobs:
                status = world.job(name).status
                assert (status.parameter_servers.restarts, status.restarts.disruptions) == (0, 0)

    play(story)


@pytest.mark.parametrize(("seconds", "heard"), [(58, True), (75, True), (52, False), (58, False)])
@played
async def test_no_pod_goes_from_a_third_of_the_nodes_that_is_not_heard_for_a_while(
    seconds: float, heard: bool
) -> None:
    """Neither the operator deletes one nor Kubernetes, with a coordinator that hears them, and without.

    Their taints are the last to go: the node lifecycle controller looks every five seconds.
    """
    world = World(lambda _: Truth(samples=1e9))
    world.nodes(9, 3)
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, 200, "it trains")
        sent, pods = len(world.server.sent), set(world.cluster.processes)
        servers = {p.machine.name for p in world.cluster.processes.values() if p.role == "ps"}
        others = [name for name in world.cluster.machines if name not in servers]
        workers = [p.machine.name for p in world.cluster.processes.values() if p.role == "worker"]
        cut = [*servers, *sorted(others, key=lambda name: name not in workers)[: 4 - len(servers)]]
        read = world.trainers.read
        if not heard:
            world.trainers.read = cut_off  # type: ignore[method-assign, assignment]
        for machine in cut:
            world.cluster.disconnect(machine)
        await asyncio.sleep(seconds)
        for machine in cut:
            world.cluster.reconnect(machine)
        await asyncio.sleep(10)
        world.trainers.read = read  # type: ignore[method-assign]
        await asyncio.sleep(60)
        assert [each.verb for each in world.server.sent[sent:] if each.key[0] == "pods"] == []
        assert set(world.cluster.processes) == pods
        status = world.job().status
        assert (status.parameter_servers.restarts, status.restarts.disruptions) == (0, 0)


@pytest.mark.parametrize("fresh", [False, True])
@played
async def test_server_is_replaced_in_time_though_the_clock_was_set_back_since_the_last_pause(
    fresh: bool,
) -> None:
    """It was not for as long as the clock was set back. `fresh`: the pods are, too."""
    world = World(lambda _: Truth(samples=1e9))
    world.nodes(8, 5)
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, 200, "it trains")
        for machine in list(world.cluster.machines):
            world.cluster.disconnect(machine)
        await asyncio.sleep(60)
        for machine in list(world.cluster.machines):
            world.cluster.reconnect(machine)
        await asyncio.sleep(120)
        world.ahead = -timedelta(hours=1)
        await asyncio.sleep(10)
        if fresh:
            for process in list(world.cluster.processes.values()):
                world.server.remove(process.pod)
            await asyncio.sleep(30)
            await world.until(lambda: world.job().status.workers.ready == 3, 300, "it trains again")
            await asyncio.sleep(60)
        [server] = [p for p in world.cluster.processes.values() if p.role == "ps" and p.runs]
        world.cluster.drop = lambda _name: None  # type: ignore[method-assign, assignment]  # its Node stays
        world.cluster.kill(server.machine.name)
        await world.until(
            lambda: any(p.role == "ps" and p.runs for p in world.cluster.processes.values()), 90, "it is back"
        )
