"""What a pool's controller sees of pods that wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Pod
from shoal.api.training_job import TrainingJob
from shoal.controllers.capacitypool.reconcile import PoolReconciler
from shoal.controllers.state import ClusterState, Wakes
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter, collection_path
from tests.unit.controllers.clusters import Cluster
from tests.unit.policy import build

GATED, LET_GO = "SchedulingGated", "Unschedulable"
QUEUED = {"schedulingPolicy": {"queue": "team"}}


@pytest.mark.parametrize(
    ("policy", "reason", "released", "waiting", "exhausted"),
    [
        ({}, LET_GO, None, 1, "True"),
        (QUEUED, GATED, None, 0, "False"),
        (QUEUED, LET_GO, timedelta(seconds=20), 1, "False"),
        (QUEUED, LET_GO, timedelta(minutes=20), 1, "True"),
    ],
    ids=["no queue", "held back", "just let go", "let go long ago"],
)
async def test_pod_waits_for_a_node_once_its_queue_has_let_it_go(
    policy: Any, reason: str, released: timedelta | None, waiting: int, exhausted: str
) -> None:
    """A job without quota made its pool Exhausted, for all jobs of all queues."""
    state, cluster, hour = ClusterState(Wakes()), Cluster(), timedelta(hours=1)
    look = PoolReconciler(
        state,
        StatusWriter(cluster, state.pools, CapacityPool),
        Recorder(cluster, reporter="test", wall=lambda: build.NOW),
        wall=lambda: build.NOW,
    )
    spec = {"nodeSelector": {"pool": "spot"}, "limits": {"nodes": 4}, "price": {"perHour": 1}}
    body = {"metadata": {"name": "spot", "uid": "spot", "resourceVersion": "1"}, "spec": spec}
    state.pools.put(
        CapacityPool.model_validate(cluster.add(f"{collection_path(CapacityPool, '')}/spot", body))
    )
    slot: dict[str, Any] = {"role": "worker", "index": 0, "state": "Starting", "queued": reason == GATED}
    slot["createdAt"] = build.stamp(build.NOW - (released or hour))
    state.jobs.put(build.job({"slots": [slot]}, runPolicy=policy))
    scheduled = {"type": "PodScheduled", "status": "False", "reason": reason}
    pod = build.pod_manifest(node=None, phase="Pending", created=build.NOW - hour, conditions=[scheduled])
    pod["metadata"]["labels"]["shoal.dev/pool"] = "spot"
    state.pods.put(Pod.model_validate(pod))
    await look(("", "spot"))
    seen = state.pools.get("spot")
    assert seen is not None
    told = next(each.status for each in seen.status.conditions if each.type == "Exhausted")
    assert (seen.status.waiting, told) == (waiting, exhausted)
    assert isinstance(state.jobs.get("digits", "team"), TrainingJob)
