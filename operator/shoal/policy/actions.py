"""What a plan asks of the API server: one frozen value for each kind of request.

Each may be carried out twice, because its answer can be lost: then a 404 or a 409 is a success.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shoal.api.labels import Place, RoleName
from shoal.manifests.objects import Manifest


@dataclass(frozen=True)
class _Sent:
    name: str
    manifest: Manifest


@dataclass(frozen=True)
class _OfOne:
    name: str
    uid: str
    """Of this object, and of no other that has its name by then."""


@dataclass(frozen=True)
class CreatePod:
    """POST with `fieldValidation=Strict`. A 409 for a pod of this job is success."""

    name: str
    make: Callable[[], Manifest] = field(compare=False, repr=False)
    """Makes the manifest, when it is sent."""
    role: RoleName
    index: int
    incarnation: int
    pool: str = ""
    """The CapacityPool that it is for."""
    replaces: bool = False
    """It follows a pod that was lost: it goes before those of jobs that begin, grow or are resumed."""

    @property
    def manifest(self) -> Manifest:
        """The pod."""
        return self.make()

    @property
    def place(self) -> Place:
        """The place in the job."""
        return Place(self.role, self.index, self.incarnation)


@dataclass(frozen=True)
class DeletePod:
    """DELETE with the uid as precondition. `grace_seconds`: None for the pod's own, 0 for force.

    `why`: in a word, for the log. `version`: the resourceVersion, of one that is deleted only if it is as it was seen.
    `homeless`: only while it has no node. `successor`: only if the API server would take this pod, by a dry run.
    """

    name: str
    uid: str
    grace_seconds: int | None = None
    why: str = ""
    version: str = ""
    homeless: bool = False
    successor: CreatePod | None = None


class CreateService(_Sent):
    """POST a Service."""


@dataclass(frozen=True)
class UpdateService:
    """PATCH (JSON merge) `spec.selector`, so that the Service selects the current incarnation only.

    `back_from`, `back_to`: the pods, if clients are sent back from a later one to an earlier one. Both are asked for
    before.
    """

    name: str
    selector: dict[str, str]
    back_from: str = ""
    back_to: str = ""


class DeleteService(_OfOne):
    """DELETE the Service of a removed shard."""


@dataclass(frozen=True)
class CreateSecret:
    """POST `shoal.manifests.objects.secret(job, data)`, with data from the controller.

    The name contains the job's uid, so a 409 means that it exists already.
    """

    name: str


class CreateDisruptionBudget(_Sent):
    """POST a PodDisruptionBudget. A 409 means that it exists already."""


class ApplyPodGroup(_Sent):
    """Server-side apply of a PodGroup of scheduler-plugins. A 404 means that they are not installed."""


class CreateWorkload(_Sent):
    """POST a Workload of Kueue, with the priority that its class has now. A 409 means that it exists already."""


@dataclass(frozen=True)
class TellWorkload:
    """Server-side apply of one condition of a Workload."""

    name: str
    uid: str
    kind: str
    status: Literal["True", "False"]
    reason: str
    message: str


class RequeueWorkload(_OfOne):
    """Give the quota of an evicted Workload back (`shoal.manifests.workload.requeued`), so that it is queued again."""


class DeleteWorkload(_OfOne):
    """DELETE a Workload of Kueue, which gives its quota back."""


@dataclass(frozen=True)
class DeleteDisruptionBudget:
    """DELETE a PodDisruptionBudget. The name contains the job's uid; a 404 means that it is gone already."""

    name: str


@dataclass(frozen=True)
class ConfirmAbsent:
    """GET an object that is recorded and not in the cache.

    A 404 puts its name into `gone_pods` (or `absent_nodes`) of the next observation, an answer into the cache.
    """

    name: str
    kind: Literal["Pod", "Node"] = "Pod"


@dataclass(frozen=True)
class DeleteJob(_OfOne):
    """DELETE the TrainingJob (ttlSecondsAfterFinished) with Background propagation, if it is as it was seen.

    Else somebody keeps it by now.
    """

    version: str
    """The resourceVersion."""


Action = (
    CreatePod
    | DeletePod
    | CreateService
    | UpdateService
    | DeleteService
    | CreateSecret
    | CreateDisruptionBudget
    | ApplyPodGroup
    | CreateWorkload
    | TellWorkload
    | RequeueWorkload
    | DeleteWorkload
    | DeleteDisruptionBudget
    | ConfirmAbsent
    | DeleteJob
)
