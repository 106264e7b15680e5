"""The watch of nodes is some seconds behind that of pods: what a node was is not held against a pod that came after."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal_trainer.contract import EXIT_USER, Outcome
from tests.unit.policy.build import termination_message
from tests.virtual.cluster import UNHEARD_SECONDS
from tests.virtual.loop import now, play, played
from tests.virtual.server import Change, Watch
from tests.virtual.trainer import Truth
from tests.virtual.world import World

LATE_SECONDS = 5.0


def test_pod_that_is_bound_after_a_blip_of_its_node_is_not_lost_with_it() -> None:
    """The node is Unknown for two seconds; that it is back is seen when a pod on it has waited for longer."""
    play(_blip)


async def _blip() -> None:
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(1, 1)
    world.cluster.start_seconds = lambda _process: (
        8.0
    )  # so long, the coordinator does not hear of the new one
    async with world.living("a"):
        world.apply(workers={"replicas": 1, "maxReplicas": 1})
        await world.until(lambda: world.pod_at("worker", 0) is not None, what="the worker runs")
        pod: Any = world.pod_at("worker", 0)
        name = pod["spec"]["nodeName"]
        world.cluster.disconnect(name)
        began = now()
        await world.until(lambda: now() - began > UNHEARD_SECONDS + 2.0)
        world.server.lag = _late
        world.cluster.reconnect(name)
        process = world.cluster.process_of(pod["metadata"]["name"])
        assert process is not None
        world.cluster.crash(process, 1)

        def replaced() -> bool:
            found = world.pod_at("worker", 0)
            return found is not None and found["metadata"]["name"] == "digits-worker-0-1"

        await world.until(replaced, what="the worker runs again")
        await world.quiet()
        restarts = world.job().status.restarts
        assert (restarts.failures, restarts.disruptions) == (1, 0), world.tell()


def _late(_watch: Watch, change: Change) -> float:
    return LATE_SECONDS if change.key[0] == "nodes" else 0.0


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("role", ["ps", "worker"])
def test_pod_that_works_stays_though_its_node_is_registered_again(role: str, before: bool) -> None:
    """As after `kubectl delete node`; that it is there again is seen later than that it was deleted.

    `before`: its predecessor was lost when the node was not there for a second, a moment ago.
    """
    play(lambda: _registered_again(role, before))


async def _registered_again(role: str, before: bool) -> None:
    world = World(lambda _uid: Truth(samples=1e9), step_seconds=2.0)  # pods are collected later
    world.nodes(3, 1)
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        await asyncio.sleep(60.0)

        def counted() -> tuple[int, int]:
            status = world.job().status
            return status.restarts.disruptions, status.parameter_servers.restarts

        pod: Any = world.pod_at(role, 0)
        if before:
            await _register_again(world, pod["spec"]["nodeName"], 1.0)
            await world.until(lambda: world.pod_at(role, 0) is None, 30.0, "it is lost")
            await world.until(lambda: world.pod_at(role, 0) is not None, 30.0, "the next one runs")
        pod, losses = world.pod_at(role, 0), counted()
        world.server.lag = lambda watch, change: _late(watch, change) if change.kind == "ADDED" else 0.0
        await _register_again(world, pod["spec"]["nodeName"], 0.0)
        await asyncio.sleep(60.0)
        assert world.pod_at(role, 0) == pod, world.tell()
        assert counted() == losses


async def _register_again(world: World, name: str, seconds: float) -> None:
    node = world.server.objects["nodes", "", name]
    kept = {k: v for k, v in node["metadata"].items() if k not in {"uid", "resourceVersion"}}
    world.server.remove(("nodes", "", name))
    if seconds:
        await asyncio.sleep(seconds)
    world.server.store(("nodes", "", name), {**node, "metadata": kept})


@pytest.mark.parametrize("role", ["ps", "worker"])
@played
async def test_pod_whose_node_was_registered_again_stays_as_a_later_leader_does_not_hear_it_yet(
    role: str,
) -> None:
    """The record of its machine had another uid, for good: an hour later it was lost, and replaced."""
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(6, 4)
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        await asyncio.sleep(30.0)
        pod: Any = world.pod_at(role, 0)
        await _register_again(world, pod["spec"]["nodeName"], 0.0)
        await asyncio.sleep(3600.0)
        await world.replicas[0].kill()
        end = now() + 45.0
        world.trainers.deaf = lambda _uid: now() < end
        world.replicas[0].start()
        await asyncio.sleep(120.0)
        found: Any = world.pod_at(role, 0)
        assert found["metadata"]["name"] == pod["metadata"]["name"], world.tell()
        status = world.job().status
        assert (status.restarts.disruptions, status.parameter_servers.restarts) == (0, 0)


@pytest.mark.parametrize("looked", [True, False])
def test_worker_that_ended_with_its_node_ends_no_job(looked: bool) -> None:
    """A mount went with the node, and the user's program raised. `looked`: an operator did, or the next one sees it."""
    play(lambda: _ended_with_its_node(looked))


async def _ended_with_its_node(looked: bool) -> None:
    world = World(lambda _uid: Truth(samples=1e9), step_seconds=30.0)  # its pod is collected later
    world.nodes(6, 3)
    async with world.living():
        first = world.replica("a")
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        await asyncio.sleep(60.0)
        if not looked:
            await first.kill()
        process = world.cluster.process_of("digits-worker-0-0")
        assert process is not None
        message = termination_message(Outcome.FAILED, reason="UserError", message="the mount is gone")
        world.cluster.crash(process, EXIT_USER, message)
        world.cluster.step()
        world.server.remove(("nodes", "", process.machine.name))
        process.machine.powered = False
        if not looked:
            world.replica("b")
        await asyncio.sleep(60.0)
        status = world.job().status
        assert (status.phase, status.restarts.failures) == ("Running", 0), world.tell()
        assert status.restarts.disruptions == 1
