"""Where pods may run: workers on spot nodes, parameter servers on nodes without a known spot label.

Both are required node affinities, which the user's template can replace. Tolerations are only for taints that describe
a node (spot, GPU), never for those that announce its end. Short tolerations of unreachable nodes let Kubernetes clean
up after a lost machine within seconds instead of five minutes.
"""

from __future__ import annotations

from typing import Any

from shoal.api.training_job import TrainingJob
from shoal.policy.disruption import SPOT_LABELS
from shoal.policy.names import Place, place_selector


def spot_terms() -> list[dict[str, Any]]:
    """Node selector terms, any of which matches a node with a known spot label."""
    return [
        {"matchExpressions": [{"key": key, "operator": "In", "values": list(values)}]}
        for key, values in SPOT_LABELS.items()
    ]


def not_spot_terms() -> list[dict[str, Any]]:
    """Node selector terms for nodes without any known spot label."""
    return [
        {
            "matchExpressions": [
                {"key": key, "operator": "NotIn", "values": list(values)}
                for key, values in SPOT_LABELS.items()
            ]
        }
    ]


def affinity(job: TrainingJob, place: Place) -> dict[str, Any]:
    """The nodes of the role; a replacement prefers another node than an earlier pod of its place.

    That node is terminating or silent. The affinity refers to the pod, since Karpenter provisions no node for a pod
    whose affinity names nodes. It is a preference, since no other node may be left. Schedulers ignore pods that have
    ended, so after a rejection by a kubelet only the back-off applies.
    """
    terms = spot_terms() if place.role == "worker" else not_spot_terms()
    result: dict[str, Any] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    if place.incarnation > 0:
        elsewhere = {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": place_selector(job, place)},
        }
        preferred = [{"weight": 100, "podAffinityTerm": elsewhere}]
        result["podAntiAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    return result


def tolerations(role: str) -> list[dict[str, Any]]:
    """The tolerations of a role."""
    tolerated = [
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
        tolerated += [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "kubernetes.azure.com/scalesetpriority", "value": "spot", "effect": "NoSchedule"},
            {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"},
            {"key": "cloud.google.com/gke-preemptible", "value": "true", "effect": "NoSchedule"},
        ]
    return tolerated
