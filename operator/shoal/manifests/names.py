"""Names and labels of all objects of a job: deterministic, so that a repeated create is a 409 and not a duplicate."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime

from shoal.api.labels import INCARNATION, INDEX, JOB, JOB_UID, POOL, ROLE, SHARDS, TEMPLATE, Place
from shoal.api.roles import ParameterServers, Workers
from shoal.api.training_job import TrainingJob

PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
"""Kueue's label of a job: its WorkloadPriorityClass."""
_PLACEMENT = (
    "affinity",
    "nodeSelector",
    "overhead",
    "priorityClassName",
    "resources",
    "runtimeClassName",
    "tolerations",
)
"""Fields of a PodSpec by which quota and nodes are chosen."""
_OF_A_CONTAINER = ("name", "resources", "restartPolicy")
_YEAR_2020 = 1_577_836_800
"""Unix seconds; to keep names short."""


def pod_name(job: str, place: Place) -> str:
    """`<job>-worker-<slot>-<incarnation>` or `<job>-ps-<shard>-<incarnation>`."""
    return f"{job}-{place.role}-{place.index}-{place.incarnation}"


def place_of_name(name: str) -> Place | None:
    """The place of a pod according to its name; None if it is not the name of a pod."""
    if not (found := re.search(r"-(ps|worker)-(\d+)-(\d+)$", name)):
        return None
    return Place("ps" if found[1] == "ps" else "worker", int(found[2]), int(found[3]))


def first_incarnation(job: TrainingJob) -> int:
    """The first incarnation of a place.

    An incarnation is never used twice in a run. A run with a name may have had another TrainingJob, so it begins with
    the time at which this one was created.
    """
    if not job.spec.storage.run or not job.metadata.creation_timestamp:
        return 0
    return int(datetime.fromisoformat(job.metadata.creation_timestamp).timestamp()) - _YEAR_2020


def service_name(job: str, shard: int) -> str:
    """The Service of a shard, the same for all its incarnations."""
    return f"{job}-ps-{shard}"


def service_host(job: TrainingJob, shard: int) -> str:
    """The DNS name of a shard's Service."""
    return f"{service_name(job.metadata.name, shard)}.{job.metadata.namespace}.svc"


def secret_name(job: TrainingJob) -> str:
    """The job's Secret. The name contains the uid, so it differs from the Secret of an earlier job of this name."""
    return secret_name_of(job.metadata.name, job.metadata.uid)


def secret_name_of(name: str, uid: str) -> str:
    """The Secret of a job of this name and uid."""
    return f"{name}-shoal-{uid[:8]}"


def budget_name(job: TrainingJob) -> str:
    """The PodDisruptionBudget of the parameter servers."""
    return f"{job.metadata.name}-ps-{job.metadata.uid[:8]}"


def group_name(job: TrainingJob) -> str:
    """The PodGroup of all pods."""
    return f"{job.metadata.name}-gang-{job.metadata.uid[:8]}"


def group_key(job: TrainingJob) -> str:
    """Its name with its content: by this it is known whether it is as it should be."""
    return f"{group_name(job)}-{gang_size(job)}"


def workload_name(job: TrainingJob) -> str:
    """Kueue's Workload of the job: `<job>-<uid>-<what it asks for>`.

    What is admitted cannot change, so that who asks for something else has another Workload. The digest is one of the
    spec and not of the pods: a newer operator with other defaults must queue no job again.
    """
    spec = job.spec
    asked = [
        spec.run_policy.scheduling_policy.queue,
        job.metadata.labels.get(PRIORITY_CLASS, ""),
        spec.parameter_servers.replicas,
        spec.workers.min_replicas,
        *(_asks(role) for role in (spec.parameter_servers, spec.workers)),
    ]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
    return f"{job.metadata.name}-{job.metadata.uid[:8]}-{digest}"


def _asks(role: ParameterServers | Workers) -> list[object]:
    """What of a role decides about its quota and its nodes."""
    spec = role.template.read().get("spec") or {}
    containers = {
        kind: [[each.get(field) for field in _OF_A_CONTAINER] for each in spec.get(kind) or ()]
        for kind in ("initContainers", "containers")
    }
    return [role.capacity, containers, *(spec.get(field) for field in _PLACEMENT)]


def gang_size(job: TrainingJob) -> int:
    """How many pods there must be room for before the first one starts."""
    return job.spec.parameter_servers.replicas + job.spec.workers.min_replicas


def job_labels(job: TrainingJob) -> dict[str, str]:
    """Labels of everything that belongs to a job."""
    return {
        JOB: job.metadata.name,
        JOB_UID: job.metadata.uid,
        "app.kubernetes.io/managed-by": "shoal",
        "app.kubernetes.io/instance": job.metadata.name,
    }


def place_labels(job: TrainingJob, place: Place, pool: str = "") -> dict[str, str]:
    """Labels of a pod. `pool`: the CapacityPool that it is for."""
    role = job.spec.parameter_servers if place.role == "ps" else job.spec.workers
    return {
        **job_labels(job),
        "app.kubernetes.io/component": "parameter-server" if place.role == "ps" else "worker",
        ROLE: place.role,
        INDEX: str(place.index),
        INCARNATION: str(place.incarnation),
        TEMPLATE: role.template_digest,
        **({SHARDS: str(job.spec.parameter_servers.replicas)} if place.role == "ps" else {}),
        **({POOL: pool} if pool else {}),
    }


def place_selector(job: TrainingJob, place: Place) -> dict[str, str]:
    """Selects every incarnation of a place of one run."""
    return {JOB_UID: job.metadata.uid, ROLE: place.role, INDEX: str(place.index)}


def service_selector(job: TrainingJob, shard: int, incarnation: int) -> dict[str, str]:
    """Selects one incarnation of one shard of one run, and nothing else."""
    return {JOB_UID: job.metadata.uid, ROLE: "ps", INDEX: str(shard), INCARNATION: str(incarnation)}


def worker_selector(job: TrainingJob) -> str:
    """Selects the workers of a job, as `kubectl get -l` takes it."""
    return f"{JOB_UID}={job.metadata.uid},{ROLE}=worker"
