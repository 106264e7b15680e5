"""Where pods may run: workers on spot nodes, parameter servers on nodes that carry no known spot label.

Required as node affinity, which the user's template can replace. Tolerations are only for taints that say what a node
*is* (spot, GPU), never for those that say that it is going away. The short tolerations for unreachable nodes let
Kubernetes clean up after a lost machine in seconds and not in five minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.policy.disruption import SPOT_LABELS

MOST_AVOIDED = 10


def spot_terms() -> list[dict[str, Any]]:
    """Node selector terms (any of them): the node carries a known spot label."""
    return [
        {"matchExpressions": [{"key": key, "operator": "In", "values": list(values)}]}
        for key, values in SPOT_LABELS.items()
    ]


def not_spot_terms() -> list[dict[str, Any]]:
    """Node selector terms: the node carries none of the known spot labels."""
    return [
        {
            "matchExpressions": [
                {"key": key, "operator": "NotIn", "values": list(values)}
                for key, values in SPOT_LABELS.items()
            ]
        }
    ]


def affinity(role: str, avoid: Iterable[str]) -> dict[str, Any]:
    """Node affinity of a role. `avoid`: nodes on their way out; only a preference, since a name may come back."""
    terms = spot_terms() if role == "worker" else not_spot_terms()
    node: dict[str, Any] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    if names := sorted(set(avoid))[:MOST_AVOIDED]:
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in names]
        node["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": 100, "preference": {"matchFields": fields}}
        ]
    return {"nodeAffinity": node}


def tolerations(role: str) -> list[dict[str, Any]]:
    """Taints that a role lives with."""
    lived_with = [
        {
            "key": "node.kubernetes.io/not-ready",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": 15,
        },
        {
            "key": "node.kubernetes.io/unreachable",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": 15,
        },
    ]
    if role == "worker":
        lived_with += [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "kubernetes.azure.com/scalesetpriority", "value": "spot", "effect": "NoSchedule"},
            {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"},
            {"key": "cloud.google.com/gke-preemptible", "value": "true", "effect": "NoSchedule"},
        ]
    return lived_with
