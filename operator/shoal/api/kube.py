"""Slim views of pods and nodes: only what a decision reads.

Thousands of these live in the caches, and each watch event is parsed straight into one of them: fields that nobody
reads are never built. They are in `api` because policy decides on them and cluster fills them.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from shoal.api.base import ObjectMeta, Status


class OwnerReference(Status):
    """metav1.OwnerReference, as far as it is read."""

    uid: str = ""
    kind: str = ""
    name: str = ""
    controller: bool = False


class OwnedMeta(ObjectMeta):
    """Metadata of an object that a job owns."""

    owner_references: tuple[OwnerReference, ...] = ()
    deletion_grace_period_seconds: int | None = None

    @property
    def controller_uid(self) -> str | None:
        """The uid of the object that controls this one."""
        return next((o.uid for o in self.owner_references if o.controller), None)


class Condition(Status):
    """A condition of a pod or a node."""

    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class Terminated(Status):
    """How a container ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None


class Waiting(Status):
    """Why a container has not started."""

    reason: str = ""
    message: str = ""


class ContainerState(Status):
    """One of: waiting, running (neither of the two here), terminated."""

    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(Status):
    """A container of a pod."""

    name: str
    ready: bool = False
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodSpec(Status):
    """The parts of a pod's spec that are read."""

    node_name: str | None = None


class PodStatus(Status):
    """The parts of a pod's status that are read."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    pod_ip: str | None = Field(None, alias="podIP")
    start_time: datetime | None = None
    conditions: tuple[Condition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Status):
    """A pod of a job."""

    metadata: OwnedMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if it is there."""
        return next((c for c in self.status.conditions if c.type == kind), None)

    @property
    def ready(self) -> bool:
        """Ready=True."""
        found = self.condition("Ready")
        return found is not None and found.status == "True"


class Taint(Status):
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = ""


class NodeInfo(Status):
    """What the kubelet says of its machine. `boot_id` changes when a machine comes back under its old name."""

    boot_id: str = Field("", alias="bootID")


class NodeSpec(Status):
    """The parts of a node's spec that are read."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeStatus(Status):
    """The parts of a node's status that are read."""

    conditions: tuple[Condition, ...] = ()
    node_info: NodeInfo = NodeInfo()


class Node(Status):
    """A node, known by uid and boot id, never by name alone."""

    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if it is there."""
        return next((c for c in self.status.conditions if c.type == kind), None)
