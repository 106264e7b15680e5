"""Names and labels of all objects of a job: deterministic, so that a repeated create is a 409 and not a duplicate."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Literal

from shoal.api.base import GROUP
from shoal.api.kube import Pod
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import Slot

RoleName = Literal["ps", "worker"]

JOB = f"{GROUP}/job"
JOB_UID = f"{GROUP}/job-uid"
ROLE = f"{GROUP}/role"
INDEX = f"{GROUP}/index"
INCARNATION = f"{GROUP}/incarnation"
TEMPLATE = f"{GROUP}/template"


@dataclass(frozen=True, order=True)
class Place:
    """A worker's slot or a server's shard, and which of its pods."""

    role: RoleName
    index: int
    incarnation: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this is parameter server 0."""
        return self.role == "ps" and self.index == 0


def pod_name(job: str, place: Place) -> str:
    """`<job>-worker-<slot>-<incarnation>` or `<job>-ps-<shard>-<incarnation>`."""
    return f"{job}-{place.role}-{place.index}-{place.incarnation}"


def place_of(pod: Pod) -> Place | None:
    """The place of a pod according to its labels; None if they are incomplete."""
    labels = pod.metadata.labels
    role, index, incarnation = labels.get(ROLE), labels.get(INDEX, ""), labels.get(INCARNATION, "")
    if not (index.isdigit() and incarnation.isdigit()):
        return None
    if role == "ps":
        return Place("ps", int(index), int(incarnation))
    if role == "worker":
        return Place("worker", int(index), int(incarnation))
    return None


def place_of_slot(slot: Slot) -> Place:
    """The place of a recorded pod."""
    return Place(slot.role, slot.index, slot.incarnation)


def place_of_name(name: str) -> Place | None:
    """The place of a pod according to its name; None if it is not the name of a pod."""
    if not (found := re.search(r"-(ps|worker)-(\d+)-(\d+)$", name)):
        return None
    return Place("ps" if found[1] == "ps" else "worker", int(found[2]), int(found[3]))


def service_name(job: str, shard: int) -> str:
    """The Service of a shard, the same for all its incarnations."""
    return f"{job}-ps-{shard}"


def service_host(job: TrainingJob, shard: int) -> str:
    """The DNS name of a shard's Service."""
    return f"{service_name(job.metadata.name, shard)}.{job.metadata.namespace}.svc"


def secret_name(job: TrainingJob) -> str:
    """The job's Secret. The name contains the uid, so it differs from the Secret of an earlier job of this name."""
    return f"{job.metadata.name}-shoal-{job.metadata.uid[:8]}"


def budget_name(job: TrainingJob) -> str:
    """The PodDisruptionBudget of the parameter servers."""
    return f"{job.metadata.name}-ps-{job.metadata.uid[:8]}"


def job_labels(job: TrainingJob) -> dict[str, str]:
    """Labels of everything that belongs to a job."""
    return {
        JOB: job.metadata.name,
        JOB_UID: job.metadata.uid,
        "app.kubernetes.io/managed-by": "shoal",
        "app.kubernetes.io/instance": job.metadata.name,
    }


def place_labels(job: TrainingJob, place: Place) -> dict[str, str]:
    """Labels of a pod."""
    return {
        **job_labels(job),
        "app.kubernetes.io/component": "parameter-server" if place.role == "ps" else "worker",
        ROLE: place.role,
        INDEX: str(place.index),
        INCARNATION: str(place.incarnation),
        TEMPLATE: template_digest(job, place.role),
    }


def template_digest(job: TrainingJob, role: RoleName) -> str:
    """A digest of the role's template: pods with another one were created before the template changed."""
    template = (job.spec.parameter_servers if role == "ps" else job.spec.workers).template
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:12]


def place_selector(job: TrainingJob, place: Place) -> dict[str, str]:
    """Selects every incarnation of a place of one run."""
    return {JOB_UID: job.metadata.uid, ROLE: place.role, INDEX: str(place.index)}


def service_selector(job: TrainingJob, shard: int, incarnation: int) -> dict[str, str]:
    """Selects one incarnation of one shard of one run, and nothing else."""
    return {JOB_UID: job.metadata.uid, ROLE: "ps", INDEX: str(shard), INCARNATION: str(incarnation)}


def worker_selector(job: TrainingJob) -> str:
    """Selects the workers of a job, as `kubectl get -l` takes it."""
    return f"{JOB_UID}={job.metadata.uid},{ROLE}=worker"
