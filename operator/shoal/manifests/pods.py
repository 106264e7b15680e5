"""Manifests of a job's pods.

They meet the restricted Pod Security Standard and have no API token. The user's template is merged over the defaults;
fields that the operator depends on are set last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.api.amounts import NVIDIA, Amounts, requested_by
from shoal.api.capacity_pool import CapacityPool
from shoal.api.labels import AVOIDS_UNTIL, ON_DEMAND, Place, RoleName
from shoal.api.training_job import TrainingJob
from shoal.manifests import names
from shoal.manifests.merge import merge
from shoal.manifests.objects import PORTS, Manifest, owner
from shoal.manifests.placement import (
    Assigned,
    Where,
    affinity,
    default_where,
    placement_labels,
    tolerations,
    with_installed,
)
from shoal.manifests.platforms import GENERIC, Platform
from shoal.manifests.runtime_config import NODE_NAME_ENV, POD_IP_ENV, ConfigTemplate, OfPool
from shoal_trainer.contract import ACCELERATORS_ENV, CODE_DIR, CONFIG_ENV, DATA_PORT, SECRET_DIR, STORAGE_DIR

USER = 65532
GRACE_SECONDS = {"worker": 20, "ps": 60}
"""A worker finishes its step and pushes within the notice of a spot node. A server takes a final snapshot."""
KUBERNETES_GRACE_SECONDS = 30
SMALL_BYTES = 16 << 10
"""Of a usual template as JSON."""
RESTARTS = {"worker": "Never", "ps": "OnFailure"}
QUEUE = "kueue.x-k8s.io/queue-name"
POD_GROUP = "scheduling.x-k8s.io/pod-group"
GPU = "nvidia.com/gpu"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"

_COMMAND = {"worker": ["shoal-trainer", "work"], "ps": ["shoal-trainer", "serve"]}
_REQUESTS = {"worker": {"cpu": "500m", "memory": "1Gi"}, "ps": {"cpu": "250m", "memory": "256Mi"}}


@dataclass(frozen=True)
class Images:
    """The images of pods whose template sets none, and the nodes that they run on."""

    ps: str
    worker: str
    worker_gpu: str = ""
    """Of workers that request GPUs; empty: there is none with CUDA."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of nodes, such as their architecture, where neither the pool nor the template has the key."""


def has_gpu_image(job: TrainingJob, images: Images) -> bool:
    """Whether the job's workers on nodes with GPUs have an image that can use them: their own, or one with CUDA."""
    kept = job.status.images
    return bool(
        images.worker_gpu
        or (kept is not None and kept.worker_gpu)
        or job.spec.workers.container("worker").get("image")
    )


class PodFactory:
    """Makes the pods of one job. What pods have in common is merged once, and again where it is to be another node."""

    def __init__(self, job: TrainingJob, images: Images, platform: Platform = GENERIC) -> None:
        self._job, self._images, self._platform = job, images, platform
        self._configs: dict[tuple[str, OfPool], ConfigTemplate] = {}
        self._merged: dict[tuple[object, ...], tuple[Where, Manifest]] = {}
        self._templates: dict[str, Manifest] = {}

    @property
    def is_small(self) -> bool:
        """Whether it may be kept: as Python's objects a template is up to sixty times as large as its text."""
        return all(len(each.template.text) <= SMALL_BYTES for each in self._job.spec.roles)

    def serves(self, job: TrainingJob, images: Images, platform: Platform) -> bool:
        """Whether it makes the pods of this job as it is now: nothing of a status is in them."""
        return self._job.spec is job.spec and (self._images, self._platform) == (images, platform)

    def pod(self, place: Place, where: Where | None = None, *, on_demand: bool = False) -> Manifest:
        """The pod of a place. `on_demand`: it is for an on-demand node, though the job's workers are not."""
        job = self._job
        where = where or default_where(job, place)
        merged = self._template(place, where)
        metadata, spec = merged["metadata"], merged["spec"]
        of_pool = OfPool()
        if where.pool is not None:
            pool = where.pool.spec
            of_pool = OfPool(pool.core_count, pool.batch_size if place.role == "worker" else None)
        key = place.role, of_pool
        if key not in self._configs:
            grace = spec["terminationGracePeriodSeconds"]
            self._configs[key] = ConfigTemplate(job, place.role, grace, of_pool)
        config = self._configs[key].of(place)
        containers = [
            {**each, "env": _environment(each, config)} if each["name"] == place.role else each
            for each in spec["containers"]
        ]
        policy = job.spec.run_policy.scheduling_policy
        given = where.assigned or Assigned()
        labels = {
            **({QUEUE: policy.queue} if policy.queue else {}),
            **({POD_GROUP: names.group_name(job)} if policy.gang == "PodGroup" else {}),
            **(metadata.get("labels") or {}),
            **given.labels,
            **names.place_labels(job, place, where.pool.metadata.name if where.pool else ""),
            **placement_labels(job, where, self._platform),
            **({AVOIDS_UNTIL: str(where.excluded_until)} if where.excluded else {}),
            **({ON_DEMAND: "true"} if on_demand else {}),
        }
        if where.assigned is not None:
            labels.pop(QUEUE, None)  # the job's Workload stands for it
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": names.pod_name(job.metadata.name, place),
                "namespace": job.metadata.namespace,
                "labels": labels,
                "annotations": {**(metadata.get("annotations") or {}), **given.annotations},
                "ownerReferences": [owner(job)],
            },
            "spec": {
                **spec,
                "containers": containers,
                "restartPolicy": RESTARTS[place.role],
            },
        }

    def template(self, role: RoleName) -> Manifest:
        """What the pods of a role have in common, for whoever decides about all of them at once."""
        place = Place(role, 0, 0)
        merged = self._template(place, default_where(self._job, place))
        return {
            "metadata": {"labels": merged["metadata"].get("labels") or {}},
            "spec": {**merged["spec"], "restartPolicy": RESTARTS[role]},
        }

    def _template_of(self, role: RoleName) -> Manifest:
        if role not in self._templates:
            self._templates[role] = _template(self._job, role)
        return self._templates[role]

    def _template(self, place: Place, where: Where) -> Manifest:
        """The user's template over the defaults. A replacement's affinity names its own place."""
        key = (place[:2] if place.incarnation else place.role, where.key)
        known = self._merged.get(key)
        if known is None or known[0] != where:
            template = self._template_of(place.role)
            defaults = _defaults(self._job, place, self._images, where, self._platform, template)
            merged = merge(defaults, {k: v for k, v in template.items() if v is not None})
            # A null removes what Shoal sets: these two are then as Kubernetes has them, or as they were.
            merged["spec"].setdefault("terminationGracePeriodSeconds", KUBERNETES_GRACE_SECONDS)
            merged["spec"].setdefault("containers", defaults["spec"]["containers"])
            given = merged["spec"].get("nodeSelector") or {}
            ours = with_installed(self._images.node_selector, where, merged["spec"].get("affinity"))
            selector = {**ours, **given}
            if selector:
                merged["spec"]["nodeSelector"] = selector
            known = self._merged[key] = where, merged
        return known[1]


def pod(
    job: TrainingJob, place: Place, images: Images, where: Where | None = None, platform: Platform = GENERIC
) -> Manifest:
    """The pod of a place."""
    return PodFactory(job, images, platform).pod(place, where)


def volumes_of(job: TrainingJob, role: str) -> list[Manifest]:
    """The volumes of the pods of a role."""
    theirs = (_template(job, role).get("spec") or {}).get("volumes") or []
    merged: list[Manifest] = merge({"volumes": _volumes(job, role)[0]}, {"volumes": theirs})["volumes"]
    return merged


def _template(job: TrainingJob, role: str) -> dict[str, Any]:
    return (job.spec.parameter_servers if role == "ps" else job.spec.workers).template.read()


def _defaults(
    job: TrainingJob, place: Place, images: Images, where: Where, platform: Platform, template: Manifest
) -> dict[str, dict[str, Any]]:
    role = place.role
    volumes, mounts = _volumes(job, role)
    limited = _resources(template, role, "limits")
    asked = {*limited, *_resources(template, role, "requests")}
    gpus = _gpus(where, asked) if role == "worker" else 0
    computes = gpus > 0 or any(name.startswith(NVIDIA) for name in asked)
    image = images.ps if role == "ps" else (images.worker_gpu if computes else "") or images.worker
    container: dict[str, Any] = {
        "name": role,
        "image": image,
        "command": _COMMAND[role],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {
            "requests": {k: v for k, v in _REQUESTS[role].items() if k not in limited},
            **({"limits": {GPU: gpus}} if gpus else {}),
        },
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
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in PORTS.items()
        ]
        container["readinessProbe"] = {
            "tcpSocket": {"port": DATA_PORT},
            "initialDelaySeconds": 2,  # it starts in 0.5 s of CPU time; each probe that fails is a Warning event
            "periodSeconds": 1,
            "failureThreshold": 2,
        }
    spec: dict[str, Any] = {
        "containers": [container],
        "volumes": volumes,
        "affinity": affinity(job, place, where, platform),
        "tolerations": tolerations(where, platform, gpu=GPU in asked or gpus > 0),
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
    return {"metadata": {"labels": {}, "annotations": _annotations(role, platform)}, "spec": spec}


def _annotations(role: str, platform: Platform) -> dict[str, str]:
    """What autoscalers may do with the pod's node; a disruption budget holds servers, too."""
    if role == "worker":
        return {SAFE_TO_EVICT: "true"}
    kept = {SAFE_TO_EVICT: "false"} if platform.keeps_nodes else {}
    return {"karpenter.sh/do-not-disrupt": "true", **kept}


def _resources(template: Manifest, role: str, kind: str) -> Collection[str]:
    """The resources that the template limits or requests.

    Kubernetes requests as much as a limit, and a default request above it would be rejected.
    """
    containers = (template.get("spec") or {}).get("containers") or ()
    return {
        name
        for each in containers
        for name in (each.get("resources") or {}).get(kind) or ()
        if kind == "requests" or each["name"] == role
    }


def worker_requests(job: TrainingJob, pool: CapacityPool) -> Amounts:
    """What a worker of a pool asks for, as far as its template and the pool say."""
    template = _template(job, "worker")
    spec = template.get("spec") or {}
    asked = {*_resources(template, "worker", "limits"), *_resources(template, "worker", "requests")}
    containers = spec.get("containers") or ()
    own = next((each.get("resources") or {} for each in containers if each["name"] == "worker"), {})
    said = {*(own.get("limits") or ()), *(own.get("requests") or ())}
    defaults: dict[str, Any] = {
        name: amount for name, amount in _REQUESTS["worker"].items() if name not in said
    }
    if gpus := _gpus(Where(job.spec.workers.capacity, pool), asked):
        defaults[GPU] = gpus
    return requested_by({**spec, "containers": [*containers, {"resources": {"requests": defaults}}]})


def _gpus(where: Where, asked: Collection[str]) -> int:
    """The GPUs that a worker requests because of its pool: all of a node, unless the template names any itself."""
    accelerator = where.pool.spec.accelerator if where.pool else None
    return accelerator.count if accelerator and not any(name.startswith(NVIDIA) for name in asked) else 0


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
    if role == "worker" and code is not None and code.config_map is not None:
        volumes.append({"name": "shoal-code", "configMap": {"name": code.config_map}})
        mounts.append({"name": "shoal-code", "mountPath": CODE_DIR, "readOnly": True})
    storage = job.spec.storage
    if role == "ps" and storage.uri is None:
        claim = storage.volume_claim
        source = {"persistentVolumeClaim": {"claimName": claim.name}} if claim else {"emptyDir": {}}
        volumes.append({"name": "shoal-storage", **source})
        mounts.append({"name": "shoal-storage", "mountPath": STORAGE_DIR})
    return volumes, mounts


def _environment(container: dict[str, Any], config: str) -> list[dict[str, Any]]:
    """The user's variables, then Shoal's; the configuration refers to the two before it."""
    env: list[dict[str, Any]] = container.get("env") or []
    gpus = str(((container.get("resources") or {}).get("limits") or {}).get(GPU, 0))
    ours: list[dict[str, Any]] = [
        {"name": POD_IP_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": NODE_NAME_ENV, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": CONFIG_ENV, "value": config},
        *([{"name": ACCELERATORS_ENV, "value": gpus}] if gpus.isdigit() and int(gpus) else []),
    ]
    reserved = {variable["name"] for variable in ours}
    return [*(variable for variable in env if variable["name"] not in reserved), *ours]
