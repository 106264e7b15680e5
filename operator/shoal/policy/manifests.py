"""Manifests of a job's objects: pods, Services, the Secret, the disruption budget.

Pods meet the restricted Pod Security Standard and have no API token. The user's template is merged over the defaults;
fields that the operator depends on are set last.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from typing import Any

from shoal.api.base import API_VERSION
from shoal.api.training_job import TrainingJob
from shoal.policy import names
from shoal.policy.merge import merge
from shoal.policy.model import Images, Manifest
from shoal.policy.placement import affinity, tolerations
from shoal.policy.runtime_config import NODE_NAME_ENV, POD_IP_ENV, as_environment, runtime_config
from shoal_trainer.contract import (
    CODE_DIR,
    CONFIG_ENV,
    CONTROL_PORT,
    DATA_PORT,
    METRICS_PORT,
    SECRET_DIR,
    STORAGE_DIR,
)

USER = 65532
GRACE_SECONDS = {"worker": 20, "ps": 60}
"""A worker finishes its step and pushes within the notice of a spot node. A server takes a final snapshot."""

_COMMAND = {"worker": ["shoal-trainer", "work"], "ps": ["shoal-trainer", "serve"]}
_REQUESTS = {"worker": {"cpu": "500m", "memory": "1Gi"}, "ps": {"cpu": "250m", "memory": "256Mi"}}
_PS_ANNOTATIONS = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
_WORKER_ANNOTATIONS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
_PORTS = {"data": DATA_PORT, "control": CONTROL_PORT, "metrics": METRICS_PORT}


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


def pod(job: TrainingJob, place: names.Place, images: Images) -> Manifest:
    """The pod of a place."""
    template = (job.spec.parameter_servers if place.role == "ps" else job.spec.workers).template
    merged = merge(_defaults(job, place, images), {k: v for k, v in template.items() if v is not None})
    metadata, spec = merged["metadata"], merged["spec"]
    config = as_environment(runtime_config(job, place))
    for container in spec["containers"]:
        if container["name"] == place.role:
            container["env"] = _environment(container.get("env") or [], config)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.pod_name(job.metadata.name, place),
            "namespace": job.metadata.namespace,
            "labels": {**(metadata.get("labels") or {}), **names.place_labels(job, place)},
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [owner(job)],
        },
        "spec": {**spec, "restartPolicy": "OnFailure" if place.role == "ps" else "Never"},
    }


def _defaults(job: TrainingJob, place: names.Place, images: Images) -> dict[str, dict[str, Any]]:
    role = place.role
    volumes, mounts = _volumes(job, role)
    container: dict[str, Any] = {
        "name": role,
        "image": images.ps if role == "ps" else images.worker,
        "command": _COMMAND[role],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": {k: v for k, v in _REQUESTS[role].items() if k not in _limited(job, role)}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    if role == "ps":
        container["ports"] = [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in _PORTS.items()
        ]
        container["readinessProbe"] = {
            "tcpSocket": {"port": DATA_PORT},
            "periodSeconds": 1,
            "failureThreshold": 2,
        }
    spec: dict[str, Any] = {
        "containers": [container],
        "volumes": volumes,
        "affinity": affinity(job, place),
        "tolerations": tolerations(role),
        "terminationGracePeriodSeconds": GRACE_SECONDS[role],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    annotations = _PS_ANNOTATIONS if role == "ps" else _WORKER_ANNOTATIONS
    return {"metadata": {"labels": {}, "annotations": dict(annotations)}, "spec": spec}


def _limited(job: TrainingJob, role: str) -> Collection[str]:
    """The resources that the template limits: Kubernetes requests as much, and a default above it would be rejected."""
    template = (job.spec.parameter_servers if role == "ps" else job.spec.workers).template
    containers = (template.get("spec") or {}).get("containers") or ()
    found: list[dict[str, Any]] = [each for each in containers if each["name"] == role]
    return {name for each in found for name in (each.get("resources") or {}).get("limits") or ()}


def _volumes(job: TrainingJob, role: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    secret = {"secretName": names.secret_name(job), "defaultMode": 0o440}
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shoal-secret", "secret": secret},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shoal-secret", "mountPath": SECRET_DIR, "readOnly": True},
    ]
    code = job.spec.training.code
    if role == "worker" and code is not None:
        volumes.append({"name": "shoal-code", "configMap": {"name": code.config_map}})
        mounts.append({"name": "shoal-code", "mountPath": CODE_DIR, "readOnly": True})
    storage = job.spec.storage
    if role == "ps" and storage.uri is None:
        claim = storage.volume_claim
        source = {"persistentVolumeClaim": {"claimName": claim.name}} if claim else {"emptyDir": {}}
        volumes.append({"name": "shoal-storage", **source})
        mounts.append({"name": "shoal-storage", "mountPath": STORAGE_DIR})
    return volumes, mounts


def _environment(env: list[dict[str, Any]], config: str) -> list[dict[str, Any]]:
    """The user's variables, then Shoal's; the configuration refers to the two before it."""
    ours: list[dict[str, Any]] = [
        {"name": POD_IP_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": NODE_NAME_ENV, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": CONFIG_ENV, "value": config},
    ]
    reserved = {variable["name"] for variable in ours}
    return [*(variable for variable in env if variable["name"] not in reserved), *ours]


def service(job: TrainingJob, shard: int, incarnation: int) -> Manifest:
    """The Service of a shard. It includes pods that are not ready: a recovering server talks to the workers."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.service_name(job.metadata.name, shard),
            "namespace": job.metadata.namespace,
            "labels": {**names.job_labels(job), names.ROLE: "ps", names.INDEX: str(shard)},
            "ownerReferences": [owner(job)],
        },
        "spec": {
            "type": "ClusterIP",
            "publishNotReadyAddresses": True,
            "selector": names.service_selector(job, shard, incarnation),
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in _PORTS.items()
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
            "selector": {"matchLabels": {names.JOB_UID: job.metadata.uid, names.ROLE: "ps"}},
        },
    }
