"""The caches of the cluster's objects (jobs, their pods and Services, nodes), and which jobs a change wakes.

A terminating pod or a changed node wakes its jobs with urgent priority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shoal.api.base import API_VERSION
from shoal.api.kube import Node, Pod, Service
from shoal.api.labels import JOB
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.cluster.reflector import Source
from shoal.cluster.work_queue import Priority

Key = tuple[str, str]
"""(namespace, name) of a job."""

Wake = Callable[[Key, Priority], None]


def _job_of(owned: Pod | Service) -> Key | None:
    name = owned.metadata.labels.get(JOB)
    return (owned.metadata.namespace, name) if name else None


class ClusterState:
    """The caches. `wake` is called for every job that a change may affect."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._nodes: dict[str, Node] = {}
        self.jobs: Cache[TrainingJob] = Cache(self._job_changed)
        self.pods: Cache[Pod] = Cache(
            self._pod_changed, {"job": _job_of, "node": lambda pod: pod.spec.node_name}
        )
        self.services: Cache[Service] = Cache(self._service_changed, {"job": _job_of})
        self.nodes: Cache[Node] = Cache(self._node_changed)
        self.nodes_by_name: Mapping[str, Node] = MappingProxyType(self._nodes)

    def _job_changed(self, old: TrainingJob | None, new: TrainingJob | None) -> None:
        seen = new or old
        if seen is not None:
            self._wake((seen.metadata.namespace, seen.metadata.name), Priority.NORMAL)

    def _pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        seen = new or old
        if seen is not None and (key := _job_of(seen)) is not None:
            self._wake(key, Priority.URGENT if new is None or _is_leaving(new) else Priority.NORMAL)

    def _service_changed(self, old: Service | None, new: Service | None) -> None:
        seen = new or old
        if seen is not None and (key := _job_of(seen)) is not None:
            self._wake(key, Priority.NORMAL)

    def _node_changed(self, old: Node | None, new: Node | None) -> None:
        if new is not None:
            name = new.metadata.name
            self._nodes[name] = new
        elif old is not None:
            name = old.metadata.name
            if (known := self._nodes.get(name)) is not None and known.metadata.uid == old.metadata.uid:
                del self._nodes[name]
        if old is not None and new is not None and _without_version(old) == _without_version(new):
            return  # only a heartbeat
        for key in {key for pod in self.pods.indexed("node", name) if (key := _job_of(pod)) is not None}:
            self._wake(key, Priority.URGENT)


def _is_leaving(pod: Pod) -> bool:
    disrupted = pod.condition("DisruptionTarget")
    return (
        pod.metadata.deletion_timestamp is not None
        or pod.status.phase in {"Failed", "Succeeded"}
        or (disrupted is not None and disrupted.status == "True")
    )


def _without_version(node: Node) -> Node:
    return node.model_copy(update={"metadata": node.metadata.model_copy(update={"resource_version": ""})})


def sources(namespace: str) -> tuple[Source[TrainingJob], Source[Pod], Source[Service], Source[Node]]:
    """What to list and watch, in one namespace or, if empty, in all."""
    within = f"/namespaces/{namespace}" if namespace else ""
    return (
        Source(f"/apis/{API_VERSION}{within}/{TrainingJob.PLURAL}", TrainingJob),
        Source(f"/api/v1{within}/pods", Pod, JOB),
        Source(f"/api/v1{within}/services", Service, JOB),
        Source("/api/v1/nodes", Node),
    )
