"""Manifests of a job's Services, its Secret, disruption budget and PodGroup. Those of its pods are in `pods`."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from shoal.api import labels
from shoal.api.base import API_VERSION
from shoal.api.training_job import TrainingJob
from shoal.manifests import names
from shoal_trainer.contract import CONTROL_PORT, DATA_PORT, METRICS_PORT

Manifest = dict[str, Any]
"""The JSON of an object to create."""
POD_GROUPS = "scheduling.x-k8s.io/v1alpha1"
"""The API of scheduler-plugins."""
PORTS = {"data": DATA_PORT, "control": CONTROL_PORT, "metrics": METRICS_PORT}


def owner(job: TrainingJob) -> dict[str, Any]:
    """The owner reference of all objects: Kubernetes deletes them with the job."""
    return {
        "apiVersion": API_VERSION,
        "kind": job.kind,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def service(job: TrainingJob, shard: int, incarnation: int) -> Manifest:
    """The Service of a shard. It includes pods that are not ready: a recovering server talks to the workers."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.service_name(job.metadata.name, shard),
            "namespace": job.metadata.namespace,
            "labels": {**names.job_labels(job), labels.ROLE: "ps", labels.INDEX: str(shard)},
            "ownerReferences": [owner(job)],
        },
        "spec": {
            "type": "ClusterIP",
            "publishNotReadyAddresses": True,
            "selector": names.service_selector(job, shard, incarnation),
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in PORTS.items()
            ],
        },
    }


def secret(job: TrainingJob, data: Mapping[str, bytes]) -> Manifest:
    """The job's Secret. The operator never reads or changes it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {
            "name": names.secret_name(job),
            "namespace": job.metadata.namespace,
            "labels": names.job_labels(job),
            "ownerReferences": [owner(job)],
        },
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }


def disruption_budget(job: TrainingJob) -> Manifest:
    """Prevents voluntary evictions of parameter servers.

    `minAvailable` is a number, since a percentage would need a controller with a scale. Shards change only while the
    job is suspended, when it has no budget.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": names.budget_name(job),
            "namespace": job.metadata.namespace,
            "labels": names.job_labels(job),
            "ownerReferences": [owner(job)],
        },
        "spec": {
            "minAvailable": job.spec.parameter_servers.replicas,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",  # one that is not ready has nothing to save
            "selector": {"matchLabels": {labels.JOB_UID: job.metadata.uid, labels.ROLE: "ps"}},
        },
    }


def pod_group(job: TrainingJob) -> Manifest:
    """Scheduler-plugins places none of the job's pods before there is room for so many."""
    return {
        "apiVersion": POD_GROUPS,
        "kind": "PodGroup",
        "metadata": {
            "name": names.group_name(job),
            "namespace": job.metadata.namespace,
            "labels": names.job_labels(job),
            "ownerReferences": [owner(job)],
        },
        "spec": {"minMember": names.gang_size(job)},
    }
