"""Pods that wait for a node: they go where one may be had, are made anew when an edit unblocks them, and stay else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.virtual.cluster import SPOT, Machine
from tests.virtual.loop import played
from tests.virtual.server import Change, Json
from tests.virtual.trainer import Truth
from tests.virtual.world import GROUP, World


def pool_world(**a: Any) -> World:
    """Two nodes of the spot pool `a`, and those of no pool for servers. `a`: more of the spec of that pool."""
    world = World(lambda _: Truth(samples=1e12), plan_seconds=60.0, step_seconds=1.0)
    world.nodes(0, 2)
    for number in range(2):
        world.cluster.add(Machine(f"a-{number}", {**SPOT, "pool": "a"}))
    add_pool(world, "a", "Spot", **a)
    add_pool(world, "od", "OnDemand")
    return world


def add_pool(world: World, name: str, kind: str, **more: Any) -> None:
    spec = {
        "capacityType": kind,
        "nodeSelector": {"pool": name},
        "limits": {"nodes": 6},
        "price": {"perHour": 1},
        "startupSeconds": 10,
        **more,
    }
    body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": name}, "spec": spec}
    world.server.store(("capacitypools", "", name), body)


def placed(world: World, role: str = "worker") -> dict[str, str | None]:
    """The node of each pod that has not ended."""
    found = [
        each for each in world.server.all("pods") if each["status"].get("phase") in {"Pending", "Running"}
    ]
    return {
        each["metadata"]["name"]: each["spec"].get("nodeName")
        for each in found
        if each["metadata"]["labels"]["shoal.dev/role"] == role
    }


def exhausted(world: World, name: str) -> bool:
    conditions = world.server.objects["capacitypools", "", name].get("status", {}).get("conditions", ())
    return any((each["type"], each["status"]) == ("Exhausted", "True") for each in conditions)


def workers(**more: Any) -> dict[str, Any]:
    return {"replicas": 2, "maxReplicas": 6, "pools": ["a", "od"], **more}


@played
async def test_a_worker_of_an_old_job_that_loses_its_spot_node_runs_on_demand_and_stays() -> None:
    world = pool_world()
    for number in range(2):
        world.cluster.add(Machine(f"od-{number}", {"pool": "od"}))
    async with world.living("a"):
        world.apply(workers=workers(fallback={"afterSeconds": 30, "returnAfterSeconds": 150}))
        await asyncio.sleep(200)
        assert set(placed(world).values()) == {"a-0", "a-1"}
        world.cluster.kill("a-1")
        await world.until(
            lambda: (placed(world).get("digits-worker-1-2") or "").startswith("od-"), 180, "it fell back"
        )
        made = world.writes()["POST pods"]
        await asyncio.sleep(140)
        assert world.writes()["POST pods"] == made


@played
async def test_the_base_of_a_job_waits_for_an_exhausted_pool_with_one_pod() -> None:
    world = pool_world()
    async with world.living("a"):
        world.apply("first", workers=workers(replicas=1, onDemandBase=1))
        await world.until(lambda: exhausted(world, "od"), 120, "the pool is exhausted")
        before = world.writes()
        world.apply("second", workers=workers(onDemandBase=1))
        await asyncio.sleep(60)
        after = world.writes()
        assert after["POST pods"] - before["POST pods"] == 3, "a server and two workers"
        assert after["DELETE pods"] == before["DELETE pods"]
        assert after["PUT trainingjobs/status"] - before["PUT trainingjobs/status"] < 20


@played
async def test_workers_that_wait_for_nodes_of_a_kind_that_no_node_is_run_after_an_edit() -> None:
    world = World(lambda _: Truth(samples=1e12))
    world.nodes(0, 4)
    async with world.living("a"):
        world.apply()
        await asyncio.sleep(20)
        assert placed(world) == dict.fromkeys(f"digits-worker-{number}-0" for number in range(3))
        spec = world.server.objects["trainingjobs", "team", "digits"]["spec"]["workers"]
        world.edit(workers={**spec, "capacity": "Any"})
        await world.until(lambda: world.job().status.workers.ready == 3, 30, "they run")
        assert placed(world).keys() == {f"digits-worker-{number}-1" for number in range(3)}


@played
async def test_workers_that_wait_for_a_pool_with_a_wrong_selector_run_when_it_is_corrected() -> None:
    world = pool_world(nodeSelector={"pool": "typo"})
    async with world.living("a"):
        world.apply(workers=workers(pools=["a"]))
        await asyncio.sleep(20)
        assert set(placed(world).values()) == {None}
        key = ("capacitypools", "", "a")
        found = world.server.objects[key]
        world.server.store(key, {**found, "spec": {**found["spec"], "nodeSelector": {"pool": "a"}}})
        await world.until(lambda: world.job().status.workers.ready == 2, 30, "they run")


@played
async def test_a_server_that_waits_for_an_exhausted_pool_runs_in_the_next_one_under_a_new_epoch() -> None:
    world = pool_world()
    add_pool(world, "od-b", "OnDemand")
    world.cluster.add(Machine("od-b-0", {"pool": "od-b"}))

    def alone() -> None:
        assert len(placed(world, "ps")) <= 1, "two servers of one shard"

    world.watchers.append(alone)
    async with world.living("a"):
        world.apply(parameterServers={"replicas": 1, "pools": ["od", "od-b"]}, workers=workers(pools=["a"]))
        await asyncio.sleep(5)
        assert placed(world, "ps") == {"digits-ps-0-0": None}
        await world.until(lambda: world.job().status.parameter_servers.ready == 1, 180, "the server runs")
        assert placed(world, "ps") == {"digits-ps-0-1": "od-b-0"}
        await world.until(lambda: world.job().status.workers.ready == 2, 30, "the workers run")


def causes_told(world: World) -> set[str]:
    """The causes that a status says from now on, if only for a moment."""
    told = set[str]()

    def see(change: Change, _old: Json | None) -> None:
        if change.key[0] == "trainingjobs":
            told.update(slot.get("cause", "") for slot in change.object.get("status", {}).get("slots", ()))

    world.server.on_change.append(see)
    return told


@pytest.mark.parametrize("spare", [0, 3])
@played
async def test_pods_that_run_stay_though_their_operator_sees_them_wait(spare: int) -> None:
    """Edited while they waited, and at work since: all were deleted, workers before a successor ran."""
    world = World(lambda _: Truth(samples=1e12), plan_seconds=60.0, step_seconds=1.0)
    async with world.living("a"):
        world.apply()
        await asyncio.sleep(60)
        waiting = placed(world) | placed(world, "ps")
        assert set(waiting.values()) == {None}
        world.server.lag = lambda watch, _change: 30.0 if watch.plural == "pods" else 0.0
        world.nodes(3 + spare, 3)
        pods = ("pods", "team")
        await world.until(
            lambda: all(world.server.objects[*pods, n]["status"]["phase"] == "Running" for n in waiting)
        )
        note = {"metadata": {"annotations": {"note": "changed"}}}
        world.edit(parameterServers={"template": note}, workers={"replicas": 3, "template": note})
        await asyncio.sleep(120)
        assert placed(world).keys() | placed(world, "ps").keys() == waiting.keys()
        status = world.job().status
        assert (status.workers.ready, status.restarts.disruptions, status.restarts.failures) == (3, 0, 0)
        assert {slot.cause for slot in status.slots} <= {"", "TakenBack"}


@played
async def test_pods_that_wait_are_made_anew_though_their_scheduler_says_anew_why_they_do() -> None:
    """Each word makes a version that the watch tells late: a deletion of the one before taught nothing, and paused all
    others."""
    world = World(lambda _: Truth(samples=1e12), plan_seconds=60.0, step_seconds=1.0)
    world.nodes(0, 1)
    async with world.living("a"):
        world.apply(workers={"replicas": 60, "maxReplicas": 60})
        await asyncio.sleep(60)

        async def speak() -> None:
            for number in range(1_000_000):
                for name, node in placed(world).items():
                    words = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                    words["message"] = f"0/{number} nodes are available"
                    status = world.server.objects["pods", "team", name]["status"]
                    if node is None:
                        world.server.change(("pods", "team", name), status={**status, "conditions": [words]})
                    await asyncio.sleep(0.01)

        speaker = asyncio.create_task(speak())
        world.server.lag = lambda watch, _change: 1.0 if watch.plural == "pods" else 0.0
        note = {"metadata": {"annotations": {"note": "changed"}}}
        world.edit(workers={"replicas": 60, "maxReplicas": 60, "template": note})
        await world.until(
            lambda: set(placed(world)) == {f"digits-worker-{n}-1" for n in range(60)}, 20, "made anew"
        )
        speaker.cancel()


@played
async def test_a_server_at_work_stays_though_it_was_taken_back_while_it_was_seen_to_wait_for_a_node() -> None:
    """Its predecessor's node is heard again, and the watch of pods is late: it had fenced that one, and was deleted."""
    world = World(lambda _: Truth(samples=1e12))
    world.nodes(3, 1)
    world.trainers.deaf = lambda _uid: True
    new = ("pods", "team", "digits-ps-0-1")
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, 60, "it runs")
        world.cluster.disconnect("safe-0")
        await world.until(lambda: new in world.server.objects, 120, "its successor waits for a node")
        await asyncio.sleep(5)
        world.server.lag = lambda watch, _change: 30.0 if watch.plural == "pods" else 0.0
        world.cluster.add(Machine("safe-1", {}))
        await world.until(lambda: world.server.objects[new]["status"]["phase"] == "Running", 20, "it runs")
        causes = causes_told(world)
        world.cluster.reconnect("safe-0")
        await asyncio.sleep(60)
        assert "TakenBack" in causes, "as it was seen"
        assert placed(world, "ps") == {"digits-ps-0-1": "safe-1"}
        assert world.job().status.parameter_servers.ready == 1


@pytest.mark.parametrize("pulls", [2.0, 45.0], ids=["runs", "pulls its image"])
@played
async def test_a_worker_stays_on_its_spot_node_that_came_as_it_was_seen_to_fall_back(pulls: float) -> None:
    """It was deleted while it did not run yet, or when its successor did; a node stood idle beside one on demand."""
    world = World(lambda _: Truth(samples=1e12), plan_seconds=60.0)
    world.nodes(0, 2)
    world.cluster.start_seconds = lambda process: pulls if process.role == "worker" else 2.0
    async with world.living("a"):
        rule = {"afterSeconds": 60, "returnAfterSeconds": 1800}
        world.apply(workers={"replicas": 1, "maxSurge": 1, "fallback": rule})
        await asyncio.sleep(55)
        causes = causes_told(world)
        world.server.lag = lambda watch, _change: 30.0 if watch.plural == "pods" else 0.0
        world.cluster.add(Machine("spot-0", SPOT))
        await asyncio.sleep(120)
        assert "FellBack" in causes, "as it was seen"
        assert placed(world) == {"digits-worker-0-0": "spot-0"}
        status = world.job().status
        assert (status.workers.ready, status.restarts.disruptions) == (1, 0)
