"""A queue, such as Kueue, in front of a job's pods, and the whole operator: nodes, and what they are bought for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal.api.labels import JOB, place_in
from tests.virtual.cluster import SPOT, Machine
from tests.virtual.loop import played, stamp
from tests.virtual.server import Faults, Json, Key
from tests.virtual.trainer import Truth
from tests.virtual.world import GROUP, World

MODES = pytest.mark.parametrize("mode", ["Manual", "Auto"])


class QueueWorld(World):
    """One pool, and a queue that holds back the pods of workers of which `is_held(job, index)` says so."""

    def __init__(
        self, is_held: Callable[[str, int], bool], nodes: int, limit: int, faults: Faults | None = None
    ) -> None:
        super().__init__(lambda _job: Truth(samples=1e13), step_seconds=1.0, faults=faults)
        self.nodes(0, 3)
        for number in range(nodes):
            self.cluster.add(Machine(f"a-{number}", {**SPOT, "pool": "a"}))
        spec = {
            "capacityType": "Spot",
            "nodeSelector": {"pool": "a"},
            "limits": {"nodes": limit},
            "price": {"perHour": 1},
            "startupSeconds": 10,
            "cores": 4,
            "accelerator": {"name": "T4"},
        }
        made = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": "a"}, "spec": spec}
        self.server.store(("capacitypools", "", "a"), made)
        store = self.server.store

        def gate(key: Key, body: Json) -> Json:
            is_new = key[0] == "pods" and key not in self.server.objects
            place = place_in(body["metadata"]["labels"]) if is_new else None
            if (
                place is not None
                and place.role == "worker"
                and is_held(body["metadata"]["labels"][JOB], place.index)
            ):
                held = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
                conditions = [{**held, "lastTransitionTime": stamp()}]
                body = {**body, "status": {"phase": "Pending", "conditions": conditions}}
            return store(key, body)

        self.server.store = gate  # type: ignore[method-assign]

    def queue(self, name: str, replicas: int, mode: str) -> None:
        self.apply(
            name,
            workers={"replicas": replicas, "maxReplicas": replicas, "pools": ["a"]},
            elasticity={"mode": mode, "objective": {"prefer": "MinTime"}},
            runPolicy={"schedulingPolicy": {"queue": "team"}},
        )

    def ready(self, name: str) -> int:
        return self.job(name).status.workers.ready


@MODES
@played
async def test_worker_that_is_lost_beside_queued_ones_is_made_again(mode: str) -> None:
    """Another job has the nodes of these: there was no room for it, for ever, and the pool's new node stood idle."""
    world = QueueWorld(lambda job, index: job == "first" and index >= 8, nodes=10, limit=10)
    async with world.living("a"):
        world.queue("first", 10, mode)
        await world.until(lambda: world.ready("first") == 8, 200, "all run that the queue lets go")
        world.queue("second", 2, "Manual")
        await world.until(
            lambda: world.ready("second") == 2, 200, "the other has the nodes of those in the queue"
        )
        for number in range(2):
            pods = (
                pod for pod in world.server.all("pods") if pod["metadata"]["name"].startswith("first-worker")
            )
            node = next(pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName"))
            world.cluster.notice(node)
            world.cluster.add(Machine(f"new-{number}", {**SPOT, "pool": "a"}))
            await asyncio.sleep(300)
        assert world.ready("first") == 8


class _Slow(Faults):
    """The API server makes ten pods a second."""

    async def before(self, client: Any, verb: str, key: str) -> None:
        if verb == "POST" and key.endswith("/pods"):
            await asyncio.sleep(0.4)


@MODES
@played
async def test_no_node_is_bought_for_a_job_whose_pods_a_queue_holds_back_while_they_are_made(
    mode: str,
) -> None:
    """A job that began so had its nodes bought, up to its size, which then were kept for ten minutes."""
    world = QueueWorld(lambda _job, _index: True, nodes=0, limit=100, faults=_Slow())
    async with world.living("a"):
        await asyncio.sleep(10)
        world.queue("first", 100, mode)
        bought = set[int]()
        for _ in range(300):
            await asyncio.sleep(0.1)
            pool = world.server.objects["capacitypools", "", "a"]
            bought.add(pool.get("status", {}).get("recommended", {}).get("nodes", 0))
        pods = [pod for pod in world.server.all("pods") if "-worker-" in pod["metadata"]["name"]]
        assert len(pods) == 100
        assert bought == {0}
