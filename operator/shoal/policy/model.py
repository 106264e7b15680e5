"""What a plan sees and what it answers: the seam between the pure policies and the controller.

The controller fills an `Observation` from its caches, calls `shoal.policy.plan.plan`, carries out the actions in their
order, looks and plans again (a pod that was made belongs into the first status after it), writes the last plan's
status if it changed, posts the events, and comes back after `wake_after` seconds or when something happens. Nothing
here is remembered between two calls: all memory is `job.status` (and what `apply` knows of refusals and of objects
that it need not create again, which may be lost at any time).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from shoal.api.base import Status
from shoal.api.kube import Node, OwnedMeta, Pod
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus
from shoal_trainer.contract import StatusReport

Manifest = dict[str, Any]
"""An object as it is POSTed: camelCase keys, JSON values."""


class ServiceSpec(Status):
    """The parts of a Service's spec that are read."""

    selector: dict[str, str] = Field(default_factory=dict)


class Service(Status):
    """A Service of a job."""

    metadata: OwnedMeta
    spec: ServiceSpec = ServiceSpec()


@dataclass(frozen=True)
class Images:
    """The images of pods whose template names none."""

    ps: str
    worker: str


class RefusalKind(StrEnum):
    """Why the API server did not take an object."""

    QUOTA = "Quota"  # 403 from a ResourceQuota: wait
    FORBIDDEN = "Forbidden"  # 403 otherwise: RBAC, Pod Security, a LimitRange, an admission webhook
    INVALID = "Invalid"  # 400, 422: terminal until the spec changes


@dataclass(frozen=True)
class Refusal:
    """A create that the API server refused.

    The controller keeps the last one for each name, until that succeeds.
    """

    kind: RefusalKind
    name: str
    """The object that was to be made."""
    message: str
    """The server's words."""
    generation: int
    """The job's generation at that time."""
    at: datetime


@dataclass(frozen=True)
class NameConflict:
    """Somebody else's object that has a name which we would use."""

    terminating: bool = False
    """It is going away: it has a deletionTimestamp, or it belonged to an earlier TrainingJob of this name."""
    until: datetime | None = None
    """Its deletionTimestamp: by then it should be gone."""
    node: str = ""
    """The node of a pod."""


@dataclass(frozen=True)
class Observation:
    """Everything about one job at one moment."""

    job: TrainingJob
    now: datetime
    """Wall clock, with a time zone."""
    images: Images
    pods: tuple[Pod, ...] = ()
    """Pods whose controller uid is the job's, terminating and finished ones too."""
    services: Mapping[str, Service] = field(default_factory=dict)
    """Services whose controller uid is the job's, by name."""
    existing: frozenset[str] = frozenset()
    """Names of Secrets and PodDisruptionBudgets of the job known to exist: created, or answered 409, by
    this process, within the last minutes."""
    foreign: Mapping[str, NameConflict] = field(default_factory=dict)
    """Names that we would use and that are taken by an object of somebody else. Pods and Services share the map: their
    names never meet."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """All nodes by name; empty where nodes cannot be read."""
    node_signals: bool = True
    """Whether nodes can be read at all."""
    report: StatusReport | None = None
    """What PS 0 last told."""
    report_age: float = 0.0
    """Seconds since it did."""
    refusals: tuple[Refusal, ...] = ()

    @property
    def nodes_if_read(self) -> Mapping[str, Node] | None:
        """The nodes, or None where they cannot be read: then one that is missing says nothing."""
        return self.nodes if self.node_signals else None


@dataclass(frozen=True)
class CreatePod:
    """POST with `fieldValidation=Strict`. A 409 of our own uid is success."""

    name: str
    manifest: Manifest
    role: Literal["ps", "worker"]
    index: int
    incarnation: int


@dataclass(frozen=True)
class DeletePod:
    """DELETE with the uid as precondition. `grace_seconds` None: the pod's own; 0: by force."""

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
    """PATCH (JSON merge) `spec.selector`: the shard's name leads to its current incarnation only."""

    name: str
    selector: dict[str, str]


@dataclass(frozen=True)
class DeleteService:
    """DELETE a Service of a shard that is no more wanted."""

    name: str
    uid: str


@dataclass(frozen=True)
class CreateSecret:
    """POST `shoal.policy.manifests.secret(job, data)`: the controller makes the data.

    Its name carries the job's uid, so a 409 means that it is there.
    """

    name: str


@dataclass(frozen=True)
class CreateDisruptionBudget:
    """POST a PodDisruptionBudget. A 409 means that it is there."""

    name: str
    manifest: Manifest


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
    | DeleteJob
)


@dataclass(frozen=True)
class Event:
    """An event about the job. Reasons are stable; the controller deduplicates by (reason, message)."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """The answer. Actions are to be done in this order; pods may be made concurrently."""

    actions: tuple[Action, ...]
    status: TrainingJobStatus
    events: tuple[Event, ...] = ()
    wake_after: float | None = None
    """Seconds until something is due though nothing happens; None: only an event."""


__all__ = [
    "Action",
    "CreateDisruptionBudget",
    "CreatePod",
    "CreateSecret",
    "CreateService",
    "DeleteJob",
    "DeletePod",
    "DeleteService",
    "Event",
    "Images",
    "Manifest",
    "NameConflict",
    "Observation",
    "Plan",
    "Refusal",
    "RefusalKind",
    "Service",
    "ServiceSpec",
    "UpdateService",
]
