"""Kueue's Workload of a job: what all parameter servers and workers.minReplicas ask of a queue, and what is told of it.

The pods that it stands for are not queued themselves. They run where its admission says: on the nodes of the flavors.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from shoal.api.kueue import KUEUE, ResourceFlavor, Workload
from shoal.api.labels import Place, RoleName
from shoal.api.training_job import TrainingJob
from shoal.manifests import names
from shoal.manifests.objects import Manifest, owner
from shoal.manifests.placement import Assigned
from shoal.manifests.platforms import GENERIC, Platform
from shoal.manifests.pods import Images, PodFactory
from shoal.words import stamp

ADMISSION_MANAGER = "kueue-admission"
"""The field manager of an admission: of Kueue, and of whoever gives the quota back."""
_OF_AN_ADMISSION = ("QuotaReserved", "Evicted", "Admitted", "Preempted", "Requeued", "DeactivationTarget")

POD_PRIORITY = {"group": "scheduling.k8s.io", "kind": "PriorityClass"}
WORKLOAD_PRIORITY = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass"}
"""How a Workload names the two kinds of priority classes (`priorityClassRef`)."""


def workload(job: TrainingJob, images: Images, platform: Platform = GENERIC) -> Manifest:
    """The Workload, without its priority, which is read when it is created."""
    pods = PodFactory(job, images, platform)
    counts: dict[RoleName, int] = {
        "ps": job.spec.parameter_servers.replicas,
        "worker": job.spec.workers.min_replicas,
    }
    return {
        "apiVersion": KUEUE,
        "kind": "Workload",
        "metadata": {
            "name": names.workload_name(job),
            "namespace": job.metadata.namespace,
            "labels": names.job_labels(job),
            "ownerReferences": [owner(job)],
        },
        "spec": {
            "queueName": job.spec.run_policy.scheduling_policy.queue,
            "podSets": [
                {"name": role, "count": count, "template": pods.template(role)}
                for role, count in counts.items()
                if count
            ],
        },
    }


def priority_class(job: TrainingJob) -> dict[str, str] | None:
    """The `priorityClassRef` of the job's priority; None if it names none.

    As of Kueue's own kinds of jobs: the job's label, or else the first PriorityClass of a template.
    """
    if name := job.metadata.labels.get(names.PRIORITY_CLASS):
        return {**WORKLOAD_PRIORITY, "name": name}
    for role in job.spec.roles:
        if name := (role.template.read().get("spec") or {}).get("priorityClassName"):
            return {**POD_PRIORITY, "name": name}
    return None


def stands_for(job: TrainingJob, place: Place) -> bool:
    """Whether the job's Workload stands for the pod of a place: it is not queued itself."""
    policy = job.spec.run_policy.scheduling_policy
    return policy.queue_as == "Workload" and (
        place.role == "ps" or place.index < job.spec.workers.min_replicas
    )


def assigned(admitted: Workload, role: RoleName, flavors: Mapping[str, ResourceFlavor]) -> Assigned | None:
    """What an admission adds to the pods of a role; None while one of its flavors is not known.

    As Kueue does for its own kinds of jobs: the flavors first, then what admission checks add.
    """
    found = admitted.status.admission
    sets = [each for each in found.pod_set_assignments if each.name == role] if found else []
    named = dict.fromkeys(flavor for each in sets for flavor in each.flavors.values())
    if not sets or named.keys() - flavors.keys():
        return None
    updates = [u for c in admitted.status.admission_checks for u in c.pod_set_updates if u.name == role]
    selectors = [*(flavors[name].spec.node_labels for name in named), *(u.node_selector for u in updates)]
    tolerations = [*(flavors[name].spec.tolerations for name in named), *(u.tolerations for u in updates)]
    return Assigned(
        node_selector={key: value for each in reversed(selectors) for key, value in each.items()},
        tolerations=tuple(each for several in tolerations for each in several),
        labels={key: value for each in updates for key, value in each.labels.items()},
        annotations={key: value for each in updates for key, value in each.annotations.items()},
    )


def requeued(found: Manifest, now: datetime) -> Manifest | None:
    """The status that gives an evicted Workload's quota back, to apply as `ADMISSION_MANAGER`; None if it has none.

    What Kueue does for its own kinds of jobs once their pods have ended (jobframework, `UnsetQuotaReservation`). Only a
    preempted one is queued again at once: what else evicts, says itself when.
    """
    status: dict[str, Any] = found.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    evicted = conditions.get("Evicted") or {}
    if evicted.get("status") != "True" or (conditions.get("QuotaReserved") or {}).get("status") != "True":
        return None
    reason, message = evicted["reason"], evicted.get("message", "")
    generation, admitted = found["metadata"].get("generation", 0), conditions.get("Admitted") or {}
    past = status.get("accumulatedPastExecutionTimeSeconds", 0)
    if admitted.get("status") == "True":
        past += int((now - datetime.fromisoformat(admitted["lastTransitionTime"])).total_seconds())

    def condition(kind: str, status: str, reason: str, message: str) -> None:
        conditions[kind] = _condition(kind, status, reason, message, generation, now)

    condition("Requeued", "True" if reason == "Preempted" else "False", reason, message)
    condition("QuotaReserved", "False", "Pending", message)
    condition("Admitted", "False", "NoReservation", "The workload has no reservation")
    return _status(
        found["metadata"],
        {
            **{key: value for key, value in status.items() if key in {"requeueState", "admissionChecks"}},
            "conditions": [conditions[kind] for kind in _OF_AN_ADMISSION if kind in conditions],
            "accumulatedPastExecutionTimeSeconds": past,
        },
        resourceVersion=found["metadata"]["resourceVersion"],
    )


def told(
    metadata: Mapping[str, Any], kind: str, status: str, reason: str, message: str, now: datetime
) -> Manifest:
    """A status with one condition, to apply as a manager that has this one only."""
    return _status(metadata, {"conditions": [_condition(kind, status, reason, message, 0, now)]})


def _status(metadata: Mapping[str, Any], status: dict[str, Any], **more: str) -> Manifest:
    identity = {key: metadata[key] for key in ("name", "namespace", "uid")}
    return {"apiVersion": KUEUE, "kind": "Workload", "metadata": {**identity, **more}, "status": status}


def _condition(
    kind: str, status: str, reason: str, message: str, generation: int, now: datetime
) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": stamp(now),
    }
