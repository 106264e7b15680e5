"""Slim views of pods and nodes, with only the fields that policies read.

The caches hold thousands of them, and each watch event is parsed straight into one. They are in `api` because both
`policy` and `cluster` use them.
"""

from __future__ import annotations

from pydantic import Field

from shoal.api.base import ObjectMeta, Status


class OwnerReference(Status):
    """The parts of metav1.OwnerReference that Shoal reads."""

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


class Terminated(Status):
    """How a container ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""


class Waiting(Status):
    """Why a container has not started."""

    reason: str = ""
    message: str = ""


class ContainerState(Status):
    """waiting, terminated, or (with neither set) running."""

    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(Status):
    """A container of a pod."""

    name: str
    ready: bool = False
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class Taint(Status):
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = ""


class Toleration(Status):
    """A toleration of a pod. An empty key with `Exists` tolerates everything."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Whether it matches the taint, as the scheduler decides."""
        if self.effect not in {"", taint.effect}:
            return False
        if self.operator == "Exists":
            return self.key in {"", taint.key}
        return (self.key, self.value) == (taint.key, taint.value)


class PodSpec(Status):
    """The parts of a pod's spec that Shoal reads."""

    node_name: str | None = None
    priority: int = 0
    """The value of its PriorityClass."""
    tolerations: tuple[Toleration, ...] = ()


class PodStatus(Status):
    """The parts of a pod's status that Shoal reads."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    pod_ip: str | None = Field(None, alias="podIP")
    conditions: tuple[Condition, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Status):
    """A pod of a job."""

    metadata: OwnedMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if set."""
        return next((c for c in self.status.conditions if c.type == kind), None)

    @property
    def running(self) -> bool:
        """Whether its containers run."""
        return self.status.phase == "Running"

    @property
    def ended(self) -> bool:
        """Whether all its containers ended for good."""
        return self.status.phase in {"Failed", "Succeeded"}

    @property
    def ready(self) -> bool:
        """Whether the condition Ready is True."""
        found = self.condition("Ready")
        return found is not None and found.status == "True"


class NodeInfo(Status):
    """The kubelet's report on its machine. `boot_id` changes with every boot."""

    boot_id: str = Field("", alias="bootID")


class NodeSpec(Status):
    """The parts of a node's spec that Shoal reads."""

    taints: tuple[Taint, ...] = ()


class Capacity(Status):
    """The parts of a node's capacity that Shoal reads."""

    cpu: str = "0"

    @property
    def cores(self) -> float:
        """CPU cores, from a Kubernetes quantity."""
        number, milli = (self.cpu[:-1], 1000) if self.cpu.endswith("m") else (self.cpu, 1)
        try:
            return float(number) / milli
        except ValueError:
            return 0.0


class NodeStatus(Status):
    """The parts of a node's status that Shoal reads."""

    allocatable: Capacity = Capacity()

    conditions: tuple[Condition, ...] = ()
    node_info: NodeInfo = NodeInfo()


class Node(Status):
    """A node, identified by uid and boot ID: a name can be reused."""

    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if set."""
        return next((c for c in self.status.conditions if c.type == kind), None)
