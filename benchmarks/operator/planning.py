"""How long one change of a large job holds the event loop, and the size of its status. Needs no cluster."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid
from collections.abc import Iterator

from benchmarks.harness import Measurement, summary
from benchmarks.operator import pool_look
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Pod
from tests.unit.controllers.clusters import Rig
from tests.unit.policy import build

REPEATS = 15


def measure(quick: bool) -> Iterator[Measurement]:
    """The rows."""
    workers = 100 if quick else 1000
    goal = 60.0 if workers == 1000 else None
    for where, pools in (("", 0), (" in two pools", 2)):
        held, anew, read, size = asyncio.run(_measured(workers, pools))
        name = f"loop held by one change of {workers} workers{where}"
        middle = statistics.median(held)
        yield summary(name, held, "ms", "", 10.0, at_most=True)
        yield summary(
            f"{name}, ratio", [middle / statistics.median(read)], "x", "json.loads of the job's pods"
        )
        name = f"{name}, of one that remembers no plan"
        yield summary(name, [middle / statistics.median(anew)], "x", "the same, just started")
        if not pools:
            yield summary(f"status of {workers} workers", [size], "KiB", "", goal, at_most=True)
    yield from pool_look.measure(quick)


async def _measured(workers: int, pools: int) -> tuple[list[float], list[float], list[float], float]:
    """Milliseconds of one change, with and without a memory of earlier plans, and of reading all pods as JSON.

    Last the size of the status, in KiB. Times are of the processor.
    """
    rig = Rig()
    names = [f"pool-{number}" for number in range(pools)]
    for name in names:
        rig.state.pools.put(_pool(name))
    rig.apply(
        workers={"replicas": workers, "maxReplicas": 1000, "pools": names},
        elasticity={"mode": "Auto" if pools else "Off"},
        runPolicy={"backoffLimit": 1000},
    )
    await rig.reconcile()
    _bind(rig)
    rig.run_pods()
    await rig.reconcile()
    status = rig.job.status.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)
    lines = [json.dumps(body) for path, body in rig.cluster.objects.items() if "/pods/" in path]
    held, anew, read = list[float](), list[float](), list[float]()
    for number in range(2 * REPEATS):
        began = time.process_time()
        for line in lines:
            json.loads(line)
        read.append((time.process_time() - began) * 1000)
        path = f"/api/v1/namespaces/ns/pods/digits-worker-{number}-0"
        event = json.dumps(rig.cluster.change(path, status={"phase": "Failed"}))
        rig.cluster.requests.clear()
        times = (held, anew)[number % 2]
        if times is anew:
            rig.forget()
        began = time.process_time()
        rig.state.pods.put(Pod.model_validate_json(event))
        await rig.once()  # as the operator does it: nothing is awaited
        times.append((time.process_time() - began) * 1000)
        await rig.tasks.idle()
        assert ("POST", "/api/v1/namespaces/ns/pods") in rig.cluster.requests  # the replacement
        await rig.reconcile()
    return held, anew, read, len(status) / 1024


def _pool(name: str) -> CapacityPool:
    spec = {
        "capacityType": "Spot",
        "accelerator": {"name": "T4"},
        "nodeSelector": {"pool": name},
        "limits": {"nodes": 1000},
        "price": {"perHour": 1},
    }
    metadata = {"name": name, "uid": name, "resourceVersion": "1"}
    return CapacityPool.model_validate({"metadata": metadata, "spec": spec})


def _bind(rig: Rig) -> None:
    """A node for each pod. The status has its name: a longer one adds its length for each worker."""
    for number, path in enumerate([path for path in rig.cluster.objects if "/pods/" in path]):
        name = f"node-{number}"
        uid, boot = (str(uuid.uuid5(uuid.NAMESPACE_DNS, name + kind)) for kind in ("uid", "boot"))
        rig.state.nodes.put(build.node(name, uid=uid, boot=boot))
        rig.cluster.change(path, spec={**rig.cluster.objects[path]["spec"], "nodeName": name})
