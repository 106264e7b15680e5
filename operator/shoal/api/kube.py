"""Slim views of pods and nodes, with only the fields that policies read.

The caches hold thousands of them, and each watch event is parsed straight into one. They are in `api` because both
`policy` and `cluster` use them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass

from shoal.api.amounts import Amounts, amounts_of, requested_by
from shoal.api.base import ObjectMeta, Status
from shoal.api.labels import OURS, SPOT_LABELS, Place, place_in
from shoal.api.rules import STORED
from shoal.api.scheduling_rules import apart_by, picks_by

ANNOUNCED_ENDS = frozenset({"DisruptionTarget", "TerminationTarget"})
"""Conditions by which Kubernetes and Kueue say that a pod is about to be ended."""
READY_TO_START = "PodReadyToStartContainers"
"""The condition of a pod whose volumes and network are ready."""
READ_CONDITIONS = frozenset({"Ready", "PodScheduled", READY_TO_START, "VMEventScheduled", *ANNOUNCED_ENDS})
"""The conditions of pods and nodes that anything depends on."""
DEFAULT_SCHEDULER = "default-scheduler"
"""Who gives pods a node that name nobody for it: it is in each cluster."""
MOST_SHARED = 4096
"""Parts that are remembered to be shared: 0.3 KiB each as a rule, and 8 at most."""
MOST_TEXT = 1024
"""Characters of a part that is remembered."""
MOST_WORDS = 4096
"""Characters of what a container said at its end, as the kubelet keeps it; and of any other words."""
MOST_NAME = 253
MOST_CONTAINERS = 16 + 256 + 32
"""Containers of a pod: those that a template may have, and those that others add."""
MOST_TOLERATIONS = 256 + 64
"""Likewise of tolerations; and the most taints of a node."""
MOST_RESOURCES = 64
"""Kinds of resources that a pod asks for, or a node has."""
MOST_FEW = 16
"""Of what there are a few: conditions that are read, containers that are remembered, labels of a selector."""
PART = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")
"""Of the parts of an object: dataclasses with slots, since a pod has about twenty of them and a model takes 0.5 KiB."""


T = TypeVar("T")
_shared: dict[Any, Any] = {}


def shared(part: T) -> T:
    """The part of another object that is equal to this one, if there is one: most pods of a job are alike."""
    if len(_shared) >= MOST_SHARED:
        _shared.clear()
    known: T = _shared.setdefault(part, part)
    return known


def few(most: int) -> AfterValidator:
    """The first so many of a tuple: whoever writes an object chooses how many there are, and has no use for more."""
    return AfterValidator(lambda found: found[:most])


Words = Annotated[str, few(MOST_WORDS)]
Name = Annotated[str, few(MOST_NAME + 1)]
"""Of something, or a reason: what is longer, which the API server does not check everywhere, is the name of nothing."""


def _ours(labels: dict[str, str]) -> dict[str, str]:
    """The labels that Shoal gives, and reads."""
    return {key: labels[key] for key in labels.keys() & OURS}


class Cached(Status):
    """An object that keeps what was once derived from it."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, which derives it anew."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy


def _length(amounts: Amounts) -> int:
    return sum(16 + len(name) for name, _ in amounts)


def _shared_amounts(amounts: Amounts) -> Amounts:
    return shared(amounts) if _length(amounts) <= MOST_TEXT else amounts


@dataclass(frozen=True, slots=True, config=PART)
class OwnerReference:
    """The parts of metav1.OwnerReference that Shoal reads."""

    uid: Name = ""
    kind: Name = ""
    name: Name = ""
    controller: bool = False


def _controller(owners: tuple[OwnerReference, ...]) -> tuple[OwnerReference, ...]:
    """The one that is read: of others there may be any number."""
    return shared(tuple(each for each in owners if each.controller)[:1])


@dataclass(frozen=True, slots=True, config=PART)
class OwnedMeta:
    """The parts of metav1.ObjectMeta that Shoal reads of an object that a job owns."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: Annotated[dict[str, str], AfterValidator(_ours)] = Field(default_factory=dict)
    """Those that Shoal gives."""
    owner_references: Annotated[tuple[OwnerReference, ...], AfterValidator(_controller)] = ()
    """The one that controls it."""
    deletion_grace_period_seconds: Annotated[int | None, STORED] = None
    """Any number that whoever deletes the object said."""

    @property
    def controller_uid(self) -> str | None:
        """The uid of the object that controls this one."""
        return next((o.uid for o in self.owner_references if o.controller), None)


@dataclass(frozen=True, slots=True, config=PART)
class Condition:
    """A condition of a pod or a node."""

    type: Name
    status: Name = "Unknown"
    reason: Name = ""
    message: Words = ""
    last_transition_time: str | None = None


def _read(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """The conditions that anything depends on; a message is of this one alone."""
    read = (each for each in conditions if each.type in READ_CONDITIONS)
    return tuple(each if each.message else shared(each) for each in islice(read, MOST_FEW))


Conditions = Annotated[tuple[Condition, ...], AfterValidator(_read)]
"""Those that anything depends on."""


@dataclass(frozen=True, slots=True, config=PART)
class Terminated:
    """How a container ended."""

    exit_code: int = 0
    started_at: str | None = None
    finished_at: str | None = None
    reason: Name = ""
    message: Words = ""


@dataclass(frozen=True, slots=True, config=PART)
class Waiting:
    """Why a container has not started."""

    reason: Name = ""
    message: Words = ""


@dataclass(frozen=True, slots=True, config=PART)
class RunningState:
    """Since when a container runs."""

    started_at: str | None = None


@dataclass(frozen=True, slots=True, config=PART)
class ContainerState:
    """waiting, terminated, or (with neither set) running."""

    waiting: Waiting | None = None
    running: RunningState | None = None
    terminated: Terminated | None = None


@dataclass(frozen=True, slots=True, config=PART)
class ContainerStatus:
    """A container of a pod."""

    name: Name
    ready: bool = False
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


def _alike(statuses: tuple[ContainerStatus, ...]) -> tuple[ContainerStatus, ...]:
    """The same of another pod, where all run: what a container said at its end is long, and its own."""
    statuses = statuses[:MOST_CONTAINERS]
    alike = len(statuses) <= MOST_FEW and all(
        each.state.running and not each.last_state.terminated and not each.restart_count for each in statuses
    )
    return shared(statuses) if alike else statuses


ContainerStatuses = Annotated[tuple[ContainerStatus, ...], AfterValidator(_alike)]


@dataclass(frozen=True, slots=True, config=PART)
class Taint:
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = ""
    time_added: str | None = None


@dataclass(frozen=True, slots=True, config=PART)
class Toleration:
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


@dataclass(frozen=True, slots=True, config=PART)
class PodSpec:
    """The parts of a pod's spec that Shoal reads."""

    node_name: str | None = None
    scheduler_name: Name = DEFAULT_SCHEDULER
    """Who is to give it a node."""
    priority: int = 0
    """The value of its PriorityClass."""
    tolerations: Annotated[tuple[Toleration, ...], few(MOST_TOLERATIONS)] = ()
    requests: Annotated[Amounts, few(MOST_RESOURCES), AfterValidator(_shared_amounts)] = ()
    """What it asks for, as the scheduler counts it."""
    apart_by: Annotated[tuple[Name, ...], few(MOST_FEW)] = ()
    """The labels of nodes, such as that of their zone, by each of which it is not to be beside some pods."""
    picks_by: Annotated[tuple[Name, ...], few(MOST_FEW)] = ()
    """The labels and fields that its node has to have as it says, by its nodeSelector and nodeAffinity."""

    @model_validator(mode="before")
    @classmethod
    def _requested(cls, found: object) -> object:
        """With what it asks for, of a spec as the API server says it."""
        if isinstance(found, dict) and "containers" in found:
            read = {
                "requests": requested_by(found),
                "apart_by": apart_by(found),
                "picks_by": picks_by(found),
            }
            return {**found, **read}
        return found


def _shared_spec(spec: PodSpec) -> PodSpec:
    text = sum(16 + len(each.key) + len(each.value) for each in spec.tolerations)
    text += sum(map(len, (*spec.apart_by, *spec.picks_by)))
    return shared(spec) if text + _length(spec.requests) <= MOST_TEXT else spec


@dataclass(frozen=True, slots=True, config=PART)
class PodStatus:
    """The parts of a pod's status that Shoal reads."""

    phase: str = "Pending"
    reason: Name = ""
    message: Words = ""
    start_time: str | None = None
    """When the kubelet of its node took it up."""
    pod_ip: Annotated[str | None, Field(alias="podIP")] = None
    conditions: Conditions = ()
    init_container_statuses: ContainerStatuses = ()
    container_statuses: ContainerStatuses = ()


_USUAL_WAITS = frozenset({"ContainerCreating", "PodInitializing"})
"""What kubelets say of containers until they begin."""


class Pod(Cached):
    """A pod of a job."""

    metadata: OwnedMeta
    spec: Annotated[PodSpec, AfterValidator(_shared_spec)] = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if set."""
        return next((c for c in self.status.conditions if c.type == kind), None)

    @cached_property
    def place(self) -> Place | None:
        """Its place in the job, according to its labels; None if they are incomplete."""
        return place_in(self.metadata.labels)

    @cached_property
    def untroubled(self) -> bool:
        """Whether it runs, and neither it nor a container of it says anything else."""
        waits = any(c.state.waiting for c in self.status.container_statuses)
        return self.status.phase == "Running" and not waits and self._says_nothing

    @cached_property
    def starts_quietly(self) -> bool:
        """Whether it has not started yet, and nothing says that it will not."""
        ended = any(c.state.terminated for c in self.status.init_container_statuses)
        return self.status.phase == "Pending" and not ended and self._says_nothing

    @cached_property
    def waits_since(self) -> datetime | None:
        """Since when it waits for its node or for its containers, and nothing says that it may be in vain."""
        waiting = (
            c.state.waiting for c in (*self.status.init_container_statuses, *self.status.container_statuses)
        )
        if not self.starts_quietly or self.queued or any(w and w.reason not in _USUAL_WAITS for w in waiting):
            return None
        scheduled = self.condition("PodScheduled")
        if scheduled is None or scheduled.status == "False":
            return None if self.misses_volume else self.created
        return self.bound_at

    @property
    def bound_at(self) -> datetime | None:
        """When it was bound to its node, as far as that is known."""
        scheduled = self.condition("PodScheduled")
        text = scheduled.last_transition_time if scheduled else None
        return (datetime.fromisoformat(text) if text else None) or self.created

    @property
    def _says_nothing(self) -> bool:
        """Whether neither it nor a container of it has ended, or is about to."""
        return (
            not self.status.reason
            and not self.metadata.deletion_timestamp
            and not any(c.type in ANNOUNCED_ENDS for c in self.status.conditions)
            and not any(c.state.terminated for c in self.status.container_statuses)
        )

    @cached_property
    def created(self) -> datetime | None:
        """When it was created."""
        text = self.metadata.creation_timestamp
        return datetime.fromisoformat(text) if text else None

    @cached_property
    def running(self) -> bool:
        """Whether its containers run."""
        return self.status.phase == "Running"

    @cached_property
    def queued(self) -> bool:
        """Whether a queue, such as Kueue, holds it back: it waits for no node yet."""
        scheduled = self.condition("PodScheduled")
        return scheduled is not None and scheduled.reason == "SchedulingGated"

    @property
    def starts_on_node(self) -> bool:
        """Whether it has a node, where its containers have not started: they may wait for what is missing."""
        return bool(self.spec.node_name) and self.status.phase == "Pending"

    @property
    def unschedulable_words(self) -> str:
        """Why the scheduler finds no node for it, in its words; empty: it has not said so."""
        scheduled = self.condition("PodScheduled")
        return scheduled.message if scheduled is not None and scheduled.status == "False" else ""

    @property
    def misses_volume(self) -> bool:
        """Whether no node can take it before it has a volume."""
        return "persistentvolumeclaim" in self.unschedulable_words.lower()

    @property
    def ended(self) -> bool:
        """Whether all its containers ended for good."""
        return self.status.phase in {"Failed", "Succeeded"}

    @property
    def ending(self) -> bool:
        """Whether all its containers ended well, and only its phase is behind: kubelets report that seconds later."""
        found = [each.state.terminated for each in self.status.container_statuses]
        return bool(found) and all(end is not None and end.exit_code == 0 for end in found)

    @property
    def ready(self) -> bool:
        """Whether the condition Ready is True."""
        found = self.condition("Ready")
        return found is not None and found.status == "True"


@dataclass(frozen=True, slots=True, config=PART)
class NodeInfo:
    """The kubelet's report on its machine. `boot_id` changes with every boot."""

    boot_id: Annotated[Name, Field(alias="bootID")] = ""
    kubelet_version: Name = ""


@dataclass(frozen=True, slots=True, config=PART)
class NodeSpec:
    """The parts of a node's spec that Shoal reads."""

    taints: Annotated[tuple[Taint, ...], few(MOST_TOLERATIONS)] = ()


@dataclass(frozen=True, slots=True, config=PART)
class NodeStatus:
    """The parts of a node's status that Shoal reads."""

    allocatable: Annotated[
        Amounts, BeforeValidator(amounts_of), few(MOST_RESOURCES), AfterValidator(_shared_amounts)
    ] = ()
    """What pods may have of it; nothing until it is said."""
    conditions: Conditions = ()
    node_info: NodeInfo = NodeInfo()

    @property
    def cores(self) -> float:
        """CPU cores that pods may have."""
        return dict(self.allocatable).get("cpu", 0.0)


class Node(Cached):
    """A node; its machine is identified by boot ID, or uid before it has one: a name can be reused."""

    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def created(self) -> datetime | None:
        """When it was created."""
        text = self.metadata.creation_timestamp
        return datetime.fromisoformat(text) if text else None

    @cached_property
    def ready_since(self) -> datetime | None:
        """Since when it has been Ready; None: it is not. A name and an object may outlive their machine."""
        ready = self.condition("Ready")
        if ready is None or ready.status != "True":
            return None
        text = ready.last_transition_time
        return datetime.fromisoformat(text) if text else self.created

    @cached_property
    def machine(self) -> str:
        """A digest of its uid and of its boot ID (empty before it has one), five characters each."""
        parts = (self.metadata.uid, self.status.node_info.boot_id)
        return "".join(hashlib.sha256(part.encode()).hexdigest()[:5] for part in parts if part)

    @cached_property
    def has_spot_label(self) -> bool:
        """Whether it has a label by which some platform marks spot nodes."""
        has = self.metadata.labels
        return any(has.get(key) in values for key, values in SPOT_LABELS.items())

    def has_uid(self, machine: str) -> bool:
        """Whether this is the node of the digest, perhaps in another boot."""
        return self.machine[:5] == machine[:5]

    def is_machine(self, machine: str) -> bool:
        """Whether this is the machine of the digest, in the same boot, as far as both say.

        A boot is of one machine, whatever uid its node has: it may be registered again while its pods run on.
        """
        boots = self.machine[5:], machine[5:]
        return boots[0] == boots[1] if all(boots) else self.has_uid(machine)

    @cached_property
    def untroubled(self) -> bool:
        """Whether it is Ready, has no taint and is not being deleted."""
        ready = self.condition("Ready")
        others = (c for c in self.status.conditions if c.type != "Ready")
        return (
            ready is not None
            and ready.status == "True"
            and not self.spec.taints
            and not self.metadata.deletion_timestamp
            and not any(c.type == "VMEventScheduled" and c.status == "True" for c in others)
        )

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if set."""
        return next((c for c in self.status.conditions if c.type == kind), None)


class DisruptionBudget(Status):
    """A PodDisruptionBudget of a job. That it exists is all that Shoal reads."""

    metadata: OwnedMeta


def _selector(found: dict[str, str]) -> dict[str, str]:
    """Of one that selects by more than Shoal's, which are fewer, the first: it is another one all the same."""
    return {key: value[: MOST_NAME + 1] for key, value in islice(found.items(), MOST_FEW)}


@dataclass(frozen=True, slots=True, config=PART)
class ServiceSpec:
    """The parts of a Service's spec that Shoal reads."""

    selector: Annotated[dict[str, str], AfterValidator(_selector)] = Field(default_factory=dict)


class Service(Status):
    """A Service of a job."""

    metadata: OwnedMeta
    spec: ServiceSpec = ServiceSpec()
