"""Slim views of Kueue's Workload and ResourceFlavor (kueue.x-k8s.io/v1beta2), with only the fields that Shoal reads.

As in `kube`. The Workloads are those that Shoal makes for jobs; Kueue's own, of single pods, are not read.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.api.base import ObjectMeta, Status
from shoal.api.kube import MOST_FEW, PART, Condition, OwnedMeta, few

KUEUE = "kueue.x-k8s.io/v1beta2"

Text = Annotated[str, Field(max_length=1024)]
"""As long as Kueue or Kubernetes let any name, label or value here be. An annotation of an admission check has no
limit: it is refused here, since a pod without it would not be what was admitted."""
Texts = Annotated[dict[Text, Text], Field(max_length=64)]
Toleration = Annotated[dict[Text, Text | int | None], Field(max_length=8)]
Tolerations = Annotated[tuple[Toleration, ...], Field(max_length=32)]
MOST_SETS = 16
"""More than Kueue has of one Workload, of which Shoal's have two."""


@dataclass(frozen=True, slots=True, config=PART)
class PodSetAssignment:
    """What was admitted of one pod set: a flavor for each resource."""

    name: Text
    flavors: Texts = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=PART)
class Admission:
    """What was admitted."""

    pod_set_assignments: Annotated[tuple[PodSetAssignment, ...], Field(max_length=MOST_SETS)] = ()


@dataclass(frozen=True, slots=True, config=PART)
class PodSetUpdate:
    """What an admission check adds to the pods of a pod set."""

    name: Text
    labels: Texts = Field(default_factory=dict)
    annotations: Texts = Field(default_factory=dict)
    node_selector: Texts = Field(default_factory=dict)
    tolerations: Tolerations = ()


@dataclass(frozen=True, slots=True, config=PART)
class AdmissionCheck:
    """The state of an admission check."""

    name: Text
    pod_set_updates: Annotated[tuple[PodSetUpdate, ...], Field(max_length=MOST_SETS)] = ()


@dataclass(frozen=True, slots=True, config=PART)
class WorkloadStatus:
    """The parts of a Workload's status that Shoal reads."""

    admission: Admission | None = None
    conditions: Annotated[tuple[Condition, ...], few(MOST_FEW)] = ()
    admission_checks: Annotated[tuple[AdmissionCheck, ...], Field(max_length=MOST_SETS)] = ()


class Workload(Status):
    """A Workload of a job: what the job asks of a queue, and Kueue's answer."""

    metadata: OwnedMeta
    status: WorkloadStatus = WorkloadStatus()

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if set."""
        return next((c for c in self.status.conditions if c.type == kind), None)

    def says(self, kind: str, status: str = "True") -> bool:
        """Whether the condition of this type has this status."""
        found = self.condition(kind)
        return found is not None and found.status == status


@dataclass(frozen=True, slots=True, config=PART)
class FlavorSpec:
    """The nodes of a flavor."""

    node_labels: Texts = Field(default_factory=dict)
    tolerations: Tolerations = ()


class ResourceFlavor(Status):
    """A ResourceFlavor: which nodes an admitted quota is of."""

    metadata: ObjectMeta
    spec: FlavorSpec = FlavorSpec()
