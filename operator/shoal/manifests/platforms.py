"""How the platforms label and taint spot nodes.

A pod carries the keys of one platform only: GKE Autopilot admits no others, and Karpenter tries terms one after
another. Where the platform is not known, it carries all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.api.kube import Node
from shoal.api.labels import SPOT_LABELS


@dataclass(frozen=True)
class Platform:
    """The labels of a platform's spot nodes (any one is enough), and the taints that tell nothing but spot."""

    name: str
    spot: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    taints: Mapping[str, str] = field(default_factory=dict)
    """Key -> value."""
    marks: tuple[str, ...] = ()
    """Labels of any node of the platform."""
    named_nodes: bool = True
    """Whether a pod's node affinity may name nodes, to avoid them."""

    def spot_terms(self) -> list[dict[str, Any]]:
        """Node selector terms, any of which matches a spot node."""
        return [{"matchExpressions": [_expression("In", key, values)]} for key, values in self.spot.items()]

    def on_demand_terms(self) -> list[dict[str, Any]]:
        """One node selector term, which matches nodes without a spot label."""
        return [{"matchExpressions": [_expression("NotIn", key, v) for key, v in self.spot.items()]}]

    def tolerations(self) -> list[dict[str, Any]]:
        """Tolerations of the taints of spot nodes."""
        return [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in self.taints.items()]


def _expression(operator: str, key: str, values: Iterable[str]) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


KARPENTER = Platform(
    "karpenter",
    spot={"karpenter.sh/capacity-type": ("spot",)},
    marks=("karpenter.sh/nodepool", "karpenter.sh/capacity-type"),
    named_nodes=False,  # it makes no node for a pod that names any, even to avoid it (karpenter issue 3214)
)
GKE = Platform(
    "gke",
    spot={"cloud.google.com/gke-spot": ("true",)},
    taints={"cloud.google.com/gke-spot": "true", "cloud.google.com/gke-preemptible": "true"},
    marks=("cloud.google.com/gke-nodepool", "cloud.google.com/gke-spot"),
)
AUTOPILOT = replace(GKE, name="autopilot", marks=(), named_nodes=False)
"""GKE Autopilot: nodes show no difference, so somebody has to say it."""
EKS = Platform(
    "eks",
    spot={"eks.amazonaws.com/capacityType": ("SPOT",)},
    marks=("eks.amazonaws.com/nodegroup", "eks.amazonaws.com/capacityType"),
)
AKS = Platform(
    "aks",
    spot={"kubernetes.azure.com/scalesetpriority": ("spot",)},
    taints={"kubernetes.azure.com/scalesetpriority": "spot"},
    marks=("kubernetes.azure.com/agentpool", "kubernetes.azure.com/cluster"),
)
GENERIC = Platform("generic", spot=SPOT_LABELS, taints={**AKS.taints, **GKE.taints})
"""A platform that is not known."""
PLATFORMS = {each.name: each for each in (KARPENTER, GKE, AUTOPILOT, EKS, AKS, GENERIC)}
"""In the order in which they are looked for: Karpenter runs on several clouds."""


def detect(nodes: Iterable[Node]) -> Platform:
    """The platform of these nodes, by their labels."""
    labels = {key for node in nodes for key in node.metadata.labels}
    return next((p for p in PLATFORMS.values() if any(mark in labels for mark in p.marks)), GENERIC)


def is_spot(node: Node, platform: Platform = GENERIC) -> bool:
    """Whether the node has a spot label, of its platform or of another one."""
    if node.has_spot_label or platform is GENERIC:
        return node.has_spot_label
    return any(node.metadata.labels.get(key) in values for key, values in platform.spot.items())
