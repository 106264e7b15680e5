"""Slim views of Kueue's Workload and ResourceFlavor (kueue.x-k8s.io/v1beta2), with only the fields that Shoal reads.

As in `kube`. The Workloads are those that Shoal makes for jobs; Kueue's own, of single pods, are not read.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from shoal.api.base import ObjectMeta, Status
from shoal.api.kube import PART, Condition, OwnedMeta

KUEUE = "kueue.x-k8s.io/v1beta2"


@dataclass(frozen=True, slots=True, config=PART)
class PodSetAssignment:
    """What was admitted of one pod set: a flavor for each resource."""

    name: str
    flavors: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=PART)
class Admission:
    """What was admitted."""

    pod_set_assignments: tuple[PodSetAssignment, ...] = ()


@dataclass(frozen=True, slots=True, config=PART)
class PodSetUpdate:
    """What an admission check adds to the pods of a pod set."""

    name: str
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, config=PART)
class AdmissionCheck:
    """The state of an admission check."""

    name: str
    pod_set_updates: tuple[PodSetUpdate, ...] = ()


@dataclass(frozen=True, slots=True, config=PART)
class WorkloadStatus:
    """The parts of a Workload's status that Shoal reads."""

    admission: Admission | None = None
    conditions: tuple[Condition, ...] = ()
    admission_checks: tuple[AdmissionCheck, ...] = ()


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

    node_labels: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()


class ResourceFlavor(Status):
    """A ResourceFlavor: which nodes an admitted quota is of."""

    metadata: ObjectMeta
    spec: FlavorSpec = FlavorSpec()
