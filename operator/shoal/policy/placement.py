"""Where pods may run: workers on spot nodes, parameter servers on nodes that carry no known spot label.

Required as node affinity, which the user's template can replace. Tolerations are only for taints that say what a node
*is* (spot, GPU), never for those that say that it is going away. The short tolerations for unreachable nodes let
Kubernetes clean up after a lost machine in seconds and not in five minutes.
"""

from __future__ import annotations

from typing import Any

from shoal.api.training_job import TrainingJob
from shoal.policy.disruption import SPOT_LABELS
from shoal.policy.names import Place, place_selector


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


def affinity(job: TrainingJob, place: Place) -> dict[str, Any]:
    """The nodes of the role; for a replacement rather not the one that still holds an earlier pod of the place.

    That node is going, or silent. The pod is avoided and not the node by its name: Karpenter makes no node for a pod
    whose affinity names nodes. Only a preference, since the old node may be the last one. Schedulers look at pods that
    have not ended: after one that a kubelet rejected there is the back-off alone.
    """
    terms = spot_terms() if place.role == "worker" else not_spot_terms()
    wanted: dict[str, Any] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    if place.incarnation > 0:
        elsewhere = {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": place_selector(job, place)},
        }
        preferred = [{"weight": 100, "podAffinityTerm": elsewhere}]
        wanted["podAntiAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    return wanted


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
