"""What a pool's controller sees of pods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.capacity_pool import CapacityPool, CapacityPoolStatus
from shoal.api.kube import Pod
from shoal.api.labels import RoleName
from shoal.controllers.capacitypool.reconcile import PoolReconciler
from shoal.controllers.state import ClusterState, Wakes
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter, collection_path
from tests.unit.controllers.clusters import Cluster
from tests.unit.policy import build

GATED, LET_GO = "SchedulingGated", "Unschedulable"
QUEUED = {"schedulingPolicy": {"queue": "team"}}


@pytest.mark.parametrize(
    ("message", "nodes", "exhausted"),
    [
        ("0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't match node selector.", 1, "True"),
        ("0/3 nodes are available: 1 node(s) had untolerated taint {shoal: going}, 2 didn't match.", 1, "True"),
        ("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.", 0, "True"),
        ("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.", 1, "False"),
        ("0/3 nodes are available: 3 node(s) had volume node affinity conflict.", 1, "False"),
        ('0/3 nodes are available: persistentvolumeclaim "data" not found.', 0, "False"),
        ("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.", 0, "False"),
    ],
)  # fmt: skip
async def test_pod_that_can_never_run_does_not_switch_its_pool_off_for_everybody(
    message: str, nodes: int, exhausted: str
) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": message}
    assert _told(await _look({}, scheduled, {}, nodes)) == (int(exhausted == "True"), exhausted)


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
    slot: dict[str, Any] = {"role": "worker", "index": 0, "state": "Starting", "queued": reason == GATED}
    slot["createdAt"] = build.stamp(build.NOW - (released or timedelta(minutes=20)))
    scheduled = {"type": "PodScheduled", "status": "False", "reason": reason}
    assert _told(await _look(policy, scheduled, {"slots": [slot]})) == (waiting, exhausted)


@pytest.mark.parametrize(("role", "recommended"), [("ps", 1), ("worker", 0)])
async def test_parameter_server_that_waits_asks_for_a_node_of_its_pool(
    role: RoleName, recommended: int
) -> None:
    """Workers' nodes are those of their plan; no plan is made of servers'."""
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO}
    assert (await _look({}, scheduled, {}, role=role)).recommended.nodes == recommended


async def test_nodes_with_a_parameter_server_are_told_whoever_else_they_have() -> None:
    """A pool does not shrink while it has one: it would not say which node goes."""
    runs = {"type": "PodScheduled", "status": "True"}
    pods = [("ps", 0, "spot-0"), ("worker", 0, "spot-0"), ("ps", 1, "spot-1"), ("worker", 1, "spot-2")]
    [share] = (await _look({}, runs, {}, nodes=4, running=pods)).shares
    assert (share.used, share.serving) == (3, 2)


def _told(status: CapacityPoolStatus) -> tuple[int, str]:
    """How many wait, and whether it is Exhausted."""
    return status.waiting, next(each.status for each in status.conditions if each.type == "Exhausted")


async def _look(
    policy: Any,
    scheduled: Any,
    status: Any,
    nodes: int = 0,
    role: RoleName = "worker",
    running: Sequence[tuple[RoleName, int, str]] = (),
) -> CapacityPoolStatus:
    """The status of a pool with a pod that is twenty minutes old, or with these on nodes."""
    state, cluster, long = ClusterState(Wakes()), Cluster(), timedelta(minutes=20)
    look = PoolReconciler(
        state,
        StatusWriter(cluster, state.pools, CapacityPool),
        Recorder(cluster, reporter="test", wall=lambda: build.NOW),
        wall=lambda: build.NOW,
    )
    spec = {
        "nodeSelector": {"cloud.google.com/gke-nodepool": "spot-pool"},
        "limits": {"nodes": 4},
        "price": {"perHour": 1},
    }
    body = {"metadata": {"name": "spot", "uid": "spot", "resourceVersion": "1"}, "spec": spec}
    state.pools.put(
        CapacityPool.model_validate(cluster.add(f"{collection_path(CapacityPool, '')}/spot", body))
    )
    for number in range(nodes):
        state.nodes.put(build.node(f"spot-{number}"))
    state.jobs.put(build.job(status, runPolicy=policy))
    created, conditions = build.NOW - long, [scheduled]
    for of, index, node in running:
        state.pods.put(Pod.model_validate(build.pod_manifest(of, index, node=node, conditions=conditions)))
    if not running:
        pod = build.pod_manifest(role, node=None, phase="Pending", created=created, conditions=conditions)
        pod["metadata"]["labels"]["shoal.dev/pool"] = "spot"
        state.pods.put(Pod.model_validate(pod))
    await look(("", "spot"))
    seen = state.pools.get("spot")
    assert seen is not None
    return seen.status
