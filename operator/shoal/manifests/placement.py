"""Where pods may run: the labels, affinities and tolerations that follow from a decided `Where`.

Terms of the user's template are added to them (`merge`). Tolerations are only for taints that describe a node (spot,
GPU), never for those that announce its end. Where the operator cannot read nodes, short tolerations of unreachable ones
let Kubernetes clean up after a lost machine within seconds instead of five minutes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.api.capacity_pool import CapacityPool
from shoal.api.labels import JOB_UID, PLACEMENT, PLATFORM, ROLE, Place
from shoal.api.roles import Capacity
from shoal.api.training_job import TrainingJob
from shoal.manifests.merge import both_terms
from shoal.manifests.names import place_selector
from shoal.manifests.platforms import GENERIC, Platform

ZONE = "topology.kubernetes.io/zone"
HOSTNAME = "kubernetes.io/hostname"
_SOFT = "preferredDuringSchedulingIgnoredDuringExecution"
UNREAD_SECONDS = 15
"""How long a node that is not heard keeps a pod, where Kubernetes alone can tell."""
_HARD = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True)
class Assigned:
    """What a queue's admission adds to a pod."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Where:
    """The nodes that a pod may run on."""

    capacity: Capacity
    """The kind of nodes; without meaning with a pool."""
    pool: CapacityPool | None = None
    zone: Literal["Same", "Preferred", "Any"] = "Any"
    """Whether it runs in the zone of parameter server 0."""
    excluded: tuple[str, ...] = ()
    """Nodes to avoid."""
    excluded_until: int = 0
    """When the last of them is to be avoided no longer, in seconds since 1970."""
    assigned: Assigned | None = None
    """What the admission of the job's Workload says, for a pod that it stands for."""

    @property
    def key(self) -> tuple[str, str, bool]:
        """What tells this from the other answers of one plan for a role; those of later plans may have the same."""
        return self.capacity, self.pool.metadata.name if self.pool else "", self.assigned is not None


def default_where(job: TrainingJob, place: Place) -> Where:
    """As the spec says, without pools."""
    if place.role == "ps":
        return Where(job.spec.parameter_servers.capacity)
    return Where(job.spec.workers.capacity, zone=job.spec.workers.zone_policy)


def placement_labels(job: TrainingJob, where: Where, platform: Platform) -> dict[str, str]:
    """Digests of all that decides about the nodes of a pod, beside its template and an admission, as its labels.

    A pod that waits is made anew when one of them is another. Nodes to avoid are not in them, since they change often.
    """
    return {PLACEMENT: _digest(_written(job, where)), PLATFORM: _digest(of_platform(where, platform))}


def of_platform(where: Where, platform: Platform) -> object:
    """What a platform makes of `where`: the terms, and the tolerations of spot nodes."""
    return _node_terms(Where(where.capacity, where.pool), platform), _spot_tolerations(where, platform)


def _written(job: TrainingJob, where: Where) -> object:
    """What people wrote, not what is made of it: another version of Shoal may make something else of the same."""
    nodes: object = where.capacity
    if (pool := where.pool) is not None:
        spec = pool.spec
        tolerations = [each.model_dump(exclude_none=True) for each in spec.tolerations]
        gpus = spec.accelerator.count if spec.accelerator else 0
        nodes = [pool.metadata.name, spec.capacity_type, spec.zone, spec.node_selector, tolerations, gpus]
    return [job.spec.run_policy.scheduling_policy.queue, where.zone, nodes]


def _digest(of: object) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:12]


def affinity(
    job: TrainingJob, place: Place, where: Where | None = None, platform: Platform = GENERIC
) -> dict[str, Any]:
    """The nodes of a place; a replacement prefers another node than an earlier pod of its place.

    That node is terminating or silent. The affinity refers to the pod, since Karpenter provisions no node for a pod
    whose affinity names nodes. It is a preference, since no other node may be left. Schedulers ignore pods that have
    ended, so after a rejection by a kubelet only the back-off applies.
    """
    where = where or default_where(job, place)
    result = node_affinity(where, platform)
    if place.role == "worker" and where.zone != "Any":
        near = {
            "topologyKey": ZONE,
            "labelSelector": {"matchLabels": {JOB_UID: job.metadata.uid, ROLE: "ps"}},
        }
        result["podAffinity"] = (
            {_HARD: [near]} if where.zone == "Same" else {_SOFT: [{"weight": 100, "podAffinityTerm": near}]}
        )
    if place.incarnation > 0:
        elsewhere = {"topologyKey": HOSTNAME, "labelSelector": {"matchLabels": place_selector(job, place)}}
        result["podAntiAffinity"] = {_SOFT: [{"weight": 100, "podAffinityTerm": elsewhere}]}
    return result


def node_affinity(where: Where, platform: Platform) -> dict[str, Any]:
    """The part of an affinity that names nodes; empty if it names none."""
    terms = _node_terms(where, platform)
    return {"nodeAffinity": {_HARD: {"nodeSelectorTerms": terms}}} if terms else {}


def _node_terms(where: Where, platform: Platform) -> list[dict[str, Any]]:
    always: list[dict[str, Any]] = []
    terms: list[dict[str, Any]] = []
    if where.pool is not None:
        zone = where.pool.spec.zone
        if zone and ZONE not in where.pool.spec.node_selector:
            always.append({"key": ZONE, "operator": "In", "values": [zone]})
    elif where.capacity == "Spot":
        terms = platform.spot_terms()
    elif where.capacity == "OnDemand":
        terms = platform.on_demand_terms()
    # By their names, which the label of the host need not have. The scheduler takes one name in each requirement.
    unnamed = where.excluded if platform.named_nodes else ()
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in unnamed]
    if not always and not fields:
        return terms
    return [both_terms(each, {"matchExpressions": always, "matchFields": fields}) for each in terms or [{}]]


def node_selector(where: Where) -> dict[str, str]:
    """The labels of the pool's nodes, or of the admitted flavors'."""
    if where.assigned is not None:
        return dict(where.assigned.node_selector)
    return dict(where.pool.spec.node_selector) if where.pool else {}


def with_installed(
    installed: Mapping[str, str], where: Where, affinity: Mapping[str, Any] | None
) -> dict[str, str]:
    """The labels of `where`, over those that an installation's images need, where the affinity does not name them."""
    said = keys_of_nodes(affinity)
    return {**{key: value for key, value in installed.items() if key not in said}, **node_selector(where)}


def keys_of_nodes(affinity: Mapping[str, Any] | None) -> set[str]:
    """The labels that an affinity requires something of."""
    required = ((affinity or {}).get("nodeAffinity") or {}).get(_HARD) or {}
    terms = required.get("nodeSelectorTerms") or ()
    return {each.get("key", "") for term in terms for each in term.get("matchExpressions") or ()}


def tolerations(where: Where, platform: Platform, *, gpu: bool) -> list[dict[str, Any]]:
    """The tolerations of a pod. `gpu`: whether it requests one.

    An operator that can read nodes replaces the pods of one that is not heard itself, unless they are heard. Kubernetes
    deletes these, too, so it is given its time: 300 s, if the cluster has no other default.
    """
    tolerated: list[dict[str, Any]] = []
    if not platform.nodes_read:
        tolerated = [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": UNREAD_SECONDS}
            for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        ]
    if where.assigned is not None:
        tolerated += [dict(each) for each in where.assigned.tolerations]
    if gpu:
        tolerated.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if where.pool is not None:
        tolerated += [t.model_dump(by_alias=True, exclude_none=True) for t in where.pool.spec.tolerations]
    return tolerated + _spot_tolerations(where, platform)


def _spot_tolerations(where: Where, platform: Platform) -> list[dict[str, Any]]:
    capacity = where.pool.spec.capacity_type if where.pool is not None else where.capacity
    return [] if capacity == "OnDemand" else platform.tolerations()
