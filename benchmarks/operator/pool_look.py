"""How long a look at a pool, each 15 s, holds the event loop where there are many nodes and jobs. Needs no cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import Measurement, summary
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node, Pod
from shoal.api.training_job import TrainingJob
from shoal.controllers.capacitypool.reconcile import PoolReconciler
from shoal.controllers.state import ClusterState, Wakes
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter, collection_path
from tests.unit.controllers.clusters import NOW, Cluster
from tests.unit.policy import build

WORKERS = 4
REPEATS = 15


def measure(quick: bool) -> Iterator[Measurement]:
    """The rows."""
    jobs, nodes = (100, 500) if quick else (1000, 5000)
    for pools, which in ((10, "one of ten pools"), (1, "the only pool")):
        held = asyncio.run(_held(pools, jobs, nodes))
        name = f"loop held by one look at {which} of {jobs} jobs on {nodes} nodes"
        yield summary(name, [held], "ms", "", 10.0, at_most=True)


async def _held(pools: int, jobs: int, nodes: int) -> float:
    """Milliseconds of processor time of the shortest look, which is least affected by other processes."""
    state, cluster = ClusterState(Wakes()), Cluster()
    writer = StatusWriter(cluster, state.pools, CapacityPool)
    recorder = Recorder(cluster, reporter="bench", wall=lambda: NOW)
    look = PoolReconciler(state, writer, recorder, wall=lambda: NOW, operator="bench")
    for number in range(pools):
        spec = {
            "nodeSelector": {"pool": f"pool-{number}"},
            "limits": {"nodes": nodes},
            "price": {"perHour": 1},
        }
        pool = {"metadata": _metadata(f"pool-{number}"), "spec": spec}
        made = cluster.add(f"{collection_path(CapacityPool, '')}/pool-{number}", pool)
        state.pools.put(CapacityPool.model_validate(made, extra="ignore"))
    for number in range(nodes):
        labels = {"pool": f"pool-{number % pools}"}
        state.nodes.put(Node.model_validate({"metadata": {**_metadata(f"node-{number}"), "labels": labels}}))
    for number in range(jobs):
        _start(state, number, [(number * WORKERS + index) % nodes for index in range(WORKERS)], pools)
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        await look(("", "pool-0"))
        times.append(time.process_time() - began)
    pool_now = state.pools.get("pool-0")
    assert pool_now is not None
    assert pool_now.status.used > 0
    return min(times) * 1000


def _start(state: ClusterState, number: int, nodes: list[int], pools: int) -> None:
    """A job whose workers run on these nodes, of whatever pool."""
    of = sorted({f"pool-{node % pools}" for node in nodes})
    manifest = build.job_manifest(workers={"replicas": WORKERS, "pools": of})
    manifest["metadata"] |= _metadata(f"job-{number}")
    status = {
        "slots": [
            {"index": index, "node": f"node-{node}", "pool": f"pool-{node % pools}"}
            for index, node in enumerate(nodes)
        ],
        "poolUsage": {pool: {"nodeSeconds": 1000, "starts": 1, "startSeconds": 60} for pool in of},
    }
    state.jobs.put(TrainingJob.model_validate({**manifest, "status": status}))
    for index, node in enumerate(nodes):
        pod = build.pod_manifest("worker", index, node=f"node-{node}")
        pod["metadata"] |= _metadata(f"job-{number}-worker-{index}-0")
        pod["metadata"]["labels"]["shoal.dev/job"] = f"job-{number}"
        state.pods.put(Pod.model_validate(pod))


def _metadata(name: str) -> dict[str, Any]:
    return {"name": name, "uid": name, "resourceVersion": "1"}
