"""Input and output of a plan: the interface between the pure policies and the controller.

The controller fills an `Observation` from its caches, calls `shoal.policy.plan.plan`, carries out the actions in order,
observes and plans again (so that the status includes new pods), writes the last plan's status if it changed, posts the
events, and returns after `wake_after` seconds or at the next change. All state between two calls is in `job.status`;
the answers of the API server that `apply` keeps may be lost at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from pydantic import Field

from shoal.api.base import Status
from shoal.api.events import Event
from shoal.api.kube import Node, OwnedMeta, Pod
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus
from shoal_trainer.contract import StatusReport

Manifest = dict[str, Any]
"""The JSON of an object to create."""


class ServiceSpec(Status):
    """The parts of a Service's spec that Shoal reads."""

    selector: dict[str, str] = Field(default_factory=dict)


class Service(Status):
    """A Service of a job."""

    metadata: OwnedMeta
    spec: ServiceSpec = ServiceSpec()


class Reason(NamedTuple):
    """Why a condition is set: one word for programs, and a message for people."""

    reason: str
    message: str


@dataclass(frozen=True)
class Images:
    """The images of pods whose template sets none."""

    ps: str
    worker: str


class RefusalKind(StrEnum):
    """Why the API server refused an object."""

    QUOTA = "Quota"  # 403 from a ResourceQuota: wait
    FORBIDDEN = (
        "Forbidden"  # 403 otherwise: RBAC, Pod Security, a LimitRange; or an admission webhook or policy
    )
    INVALID = "Invalid"  # 400, 422: terminal until the spec changes


@dataclass(frozen=True)
class Refusal:
    """A create that the API server refused.

    The controller keeps the last one for each name until a create succeeds.
    """

    kind: RefusalKind
    name: str
    """The name of the object."""
    message: str
    """The server's message."""
    generation: int
    """The job's generation at that time."""
    at: datetime


@dataclass(frozen=True)
class NameConflict:
    """An object of another owner that has a name which the job needs."""

    terminating: bool = False
    """It has a deletionTimestamp, or it belongs to an earlier TrainingJob of this name."""
    deadline: datetime | None = None
    """Its deletionTimestamp: when its grace period ends."""
    node: str = ""
    """The node, if it is a pod."""


@dataclass(frozen=True)
class Observation:
    """Everything about one job at one moment."""

    job: TrainingJob
    now: datetime
    """Wall clock, with a time zone."""
    images: Images
    pods: tuple[Pod, ...] = ()
    """Pods controlled by the job, including terminating and finished ones."""
    services: Mapping[str, Service] = field(default_factory=dict)
    """Services controlled by the job, by name."""
    existing: frozenset[str] = frozenset()
    """Names of the job's Secrets and PodDisruptionBudgets that exist: the API server confirmed it within the last
    minutes."""
    absent: frozenset[str] = frozenset()
    """Names of the job's PodDisruptionBudgets that were deleted."""
    name_conflicts: Mapping[str, NameConflict] = field(default_factory=dict)
    """Names that the job needs and objects of other owners have. Names of pods and Services never coincide."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """All nodes by name; empty where nodes cannot be read."""
    node_signals: bool = True
    """Whether nodes can be read at all."""
    report: StatusReport | None = None
    """The last report of parameter server 0."""
    report_age: float = 0.0
    """Age of the report in seconds."""
    refusals: tuple[Refusal, ...] = ()

    @property
    def nodes_if_readable(self) -> Mapping[str, Node] | None:
        """The nodes; None where they cannot be read, so that a missing node is not a signal."""
        return self.nodes if self.node_signals else None


@dataclass(frozen=True)
class CreatePod:
    """POST with `fieldValidation=Strict`. A 409 for a pod of this job is success."""

    name: str
    manifest: Manifest
    role: Literal["ps", "worker"]
    index: int
    incarnation: int


@dataclass(frozen=True)
class DeletePod:
    """DELETE with the uid as precondition. `grace_seconds`: None for the pod's own, 0 for force."""

    name: str
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class CreateService:
    """POST a Service."""

    name: str
    manifest: Manifest


@dataclass(frozen=True)
class UpdateService:
    """PATCH (JSON merge) `spec.selector`, so that the Service selects the current incarnation only."""

    name: str
    selector: dict[str, str]


@dataclass(frozen=True)
class DeleteService:
    """DELETE the Service of a removed shard."""

    name: str
    uid: str


@dataclass(frozen=True)
class CreateSecret:
    """POST `shoal.policy.manifests.secret(job, data)`, with data from the controller.

    The name contains the job's uid, so a 409 means that it exists already.
    """

    name: str


@dataclass(frozen=True)
class CreateDisruptionBudget:
    """POST a PodDisruptionBudget. A 409 means that it exists already."""

    name: str
    manifest: Manifest


@dataclass(frozen=True)
class DeleteDisruptionBudget:
    """DELETE a PodDisruptionBudget. The name contains the job's uid; a 404 means that it is gone already."""

    name: str


@dataclass(frozen=True)
class DeleteJob:
    """DELETE the TrainingJob (ttlSecondsAfterFinished): uid as precondition, Background propagation."""

    name: str
    uid: str


Action = (
    CreatePod
    | DeletePod
    | CreateService
    | UpdateService
    | DeleteService
    | CreateSecret
    | CreateDisruptionBudget
    | DeleteDisruptionBudget
    | DeleteJob
)


@dataclass(frozen=True)
class Plan:
    """The result. Actions are carried out in this order; those of one kind may run concurrently."""

    actions: tuple[Action, ...]
    status: TrainingJobStatus
    events: tuple[Event, ...] = ()
    wake_after: float | None = None
    """Seconds until the next plan if nothing changes before; None: only after a change."""


__all__ = [
    "Action",
    "CreateDisruptionBudget",
    "CreatePod",
    "CreateSecret",
    "CreateService",
    "DeleteDisruptionBudget",
    "DeleteJob",
    "DeletePod",
    "DeleteService",
    "Event",
    "Images",
    "Manifest",
    "NameConflict",
    "Observation",
    "Plan",
    "Reason",
    "Refusal",
    "RefusalKind",
    "Service",
    "ServiceSpec",
    "UpdateService",
]
