"""Who sizes a Kubernetes object, from its own words: pure.

An applier (server-side) of `spec.replicas` sets it again and again, as GitOps does; so do an autoscaler and an owner.
Those are found before anything is changed. Whoever only updates the field is found when the size changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.api.base import Reason

MANAGER = "shoal-pools"
"""The field manager of every write."""

_CLUSTER_API = "cluster.x-k8s.io/"
_AUTOSCALER = f"{_CLUSTER_API}cluster-api-autoscaler-node-group-"
_BY_OTHER = f"{_CLUSTER_API}replicas-managed-by"
KARPENTER = "karpenter.sh"


def sized_by(found: Mapping[str, Any]) -> Reason | None:
    """Who other than Shoal sizes the object, and what to do; None: nobody, as far as it says."""
    meta: Mapping[str, Any] = found.get("metadata") or {}
    annotations: Mapping[str, str] = meta.get("annotations") or {}
    if meta.get("deletionTimestamp"):
        return Reason("Deleted", "it is being deleted: name another target, or set spec.scaling.mode to Pods")
    if limits := sorted(key for key in annotations if key.startswith(_AUTOSCALER)):
        words = f"the cluster's autoscaler sizes it: set spec.scaling.mode to Pods, or remove {' and '.join(limits)}"
        return Reason("AutoscalerActive", words)
    if (manager := annotations.get(_BY_OTHER)) is not None:
        return Reason("AutoscalerActive", f"{manager or 'another'} manages its replicas ({_BY_OTHER})")
    for owner in meta.get("ownerReferences") or ():
        if owner.get("controller"):
            name = f"{owner.get('kind')} {owner.get('name')}"
            return Reason("Controlled", f"{name} sizes it: name that one in spec.scaling.target")
    if _group(found) == KARPENTER and "replicas" not in (found.get("spec") or {}):
        words = "Karpenter sizes a NodePool without spec.replicas by its pending pods: set spec.scaling.mode to Pods"
        return Reason("AutoscalerActive", words)
    if (applier := _applier(meta)) is not None:
        words = f"{applier} applies spec.replicas: leave the field out of what it applies"
        return Reason("FieldManager", words)
    return None


def _applier(meta: Mapping[str, Any]) -> str | None:
    for entry in meta.get("managedFields") or ():
        fields: Mapping[str, Any] = (entry.get("fieldsV1") or {}).get("f:spec") or {}
        if entry.get("operation") == "Apply" and entry.get("manager") != MANAGER and "f:replicas" in fields:
            return str(entry.get("manager"))
    return None


def most_nodes(found: Mapping[str, Any]) -> int | None:
    """The most nodes that the object itself allows; None: it names no limit."""
    limit = str(((found.get("spec") or {}).get("limits") or {}).get("nodes"))
    return int(limit) if _group(found) == KARPENTER and limit.isdigit() else None


def takes_empty_first(found: Mapping[str, Any]) -> bool:
    """Whether a smaller size takes nodes without pods first, as Karpenter's static NodePools do.

    A MachineDeployment takes any, the newest or the oldest, unless single Machines are marked for it.
    """
    return _group(found) == KARPENTER


def _group(found: Mapping[str, Any]) -> str:
    return str(found.get("apiVersion", "")).partition("/")[0]
