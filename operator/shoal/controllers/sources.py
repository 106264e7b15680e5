"""What the operator lists and watches."""

from __future__ import annotations

from typing import Any

from shoal.api.base import API_VERSION
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import DisruptionBudget, Node, Pod, Service
from shoal.api.kueue import KUEUE, ResourceFlavor, Workload
from shoal.api.labels import JOB
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.cluster.reflector import Source


def sources(namespace: str, *, kueue: bool = False) -> dict[str, Source[Any]]:
    """What to list and watch, by name of the resource: in one namespace or, if empty, in all.

    `kueue`: also what jobs that are queued as a Workload need.
    """
    within = f"/namespaces/{namespace}" if namespace else ""
    custom = f"/apis/{API_VERSION}"
    queues: dict[str, Source[Any]] = {
        "workloads": Source(f"/apis/{KUEUE}{within}/workloads", Workload, JOB),
        "resourceflavors": Source(f"/apis/{KUEUE}/resourceflavors", ResourceFlavor),
    }
    return {
        **(queues if kueue else {}),
        "trainingjobs": Source(f"{custom}{within}/{TrainingJob.PLURAL}", TrainingJob),
        "pods": Source(f"/api/v1{within}/pods", Pod, JOB),
        "services": Source(f"/api/v1{within}/services", Service, JOB),
        "poddisruptionbudgets": Source(
            f"/apis/policy/v1{within}/poddisruptionbudgets", DisruptionBudget, JOB
        ),
        "nodes": Source("/api/v1/nodes", Node),
        "capacitypools": Source(f"{custom}/{CapacityPool.PLURAL}", CapacityPool),
        "speedprofiles": Source(f"{custom}{within}/{SpeedProfile.PLURAL}", SpeedProfile),
    }
