"""How the platforms label and taint spot nodes.

A pod for spot nodes carries the keys of the platforms whose nodes there are, and Karpenter's where it may run: that
has no nodes until a pod waits for one. Where no platform is known, it carries all keys. A pod that avoids spot nodes
carries all anyway, in one term; but on GKE Autopilot, which admits no keys of others. A cluster may have spot nodes of
labels of its own, which an installation names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shoal.api.kube import Node
from shoal.api.labels import SPOT_LABELS


@dataclass(frozen=True)
class Platform:
    """The labels of the spot nodes of its clusters (any one is enough), and the taints that tell nothing but spot."""

    name: str
    spot: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    taints: Mapping[str, str] = field(default_factory=dict)
    """Key -> value."""
    marks: tuple[str, ...] = ()
    """Labels of any node of the platform."""
    admits_others: bool = True
    """Whether it admits a pod that names keys of other platforms, to avoid their spot nodes."""
    named_nodes: bool = True
    """Whether a pod's node affinity may name nodes, to avoid them."""
    nodes_read: bool = True
    """Whether the operator can read nodes."""

    @cached_property
    def unread(self) -> Platform:
        """The same where it cannot."""
        return replace(self, nodes_read=False)

    @cached_property
    def widened(self) -> Platform:
        """With the keys of all platforms, as a pod has them that was made while none was known."""
        return _joined(GENERIC, self)

    @property
    def is_known(self) -> bool:
        """Whether nodes or somebody say what it is; they do not before the first node is read."""
        return self.nodes_read or self.name != GENERIC.name

    def spot_terms(self) -> list[dict[str, Any]]:
        """Node selector terms, any of which matches a spot node. Karpenter's is the last.

        Karpenter simulates a pod with its first term, and then drops terms before it drops any preference, but never
        the last one: with its own key in another, a pod with a preference that cannot be met would get no node.
        """
        ordered = sorted(self.spot.items(), key=lambda each: each[0] in KARPENTER.spot)
        return [{"matchExpressions": [_expression("In", key, values)]} for key, values in ordered]

    def on_demand_terms(self) -> list[dict[str, Any]]:
        """One node selector term, which matches nodes without a spot label."""
        avoided = {**(SPOT_LABELS if self.admits_others else {}), **self.spot}
        return [{"matchExpressions": [_expression("NotIn", key, v) for key, v in avoided.items()]}]

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
    spot={key: SPOT_LABELS[key] for key in ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")},
    taints={"cloud.google.com/gke-spot": "true", "cloud.google.com/gke-preemptible": "true"},
    marks=("cloud.google.com/gke-nodepool", "cloud.google.com/gke-spot"),
)
AUTOPILOT = replace(
    GKE,
    name="autopilot",
    spot={"cloud.google.com/gke-spot": ("true",)},
    marks=(),
    admits_others=False,
    named_nodes=False,
)
"""GKE Autopilot: nodes show no difference, so somebody has to say it."""
EKS = Platform(
    "eks",
    spot={"eks.amazonaws.com/capacityType": ("SPOT",), **KARPENTER.spot},
    marks=("eks.amazonaws.com/nodegroup", "eks.amazonaws.com/capacityType"),
)
AKS = Platform(
    "aks",
    spot={"kubernetes.azure.com/scalesetpriority": ("spot",), **KARPENTER.spot},  # AKS' own provisioning
    taints={"kubernetes.azure.com/scalesetpriority": "spot"},
    marks=("kubernetes.azure.com/agentpool", "kubernetes.azure.com/cluster"),
)
GENERIC = Platform("generic", spot=SPOT_LABELS, taints={**AKS.taints, **GKE.taints})
"""A platform that is not known."""
PLATFORMS = {each.name: each for each in (KARPENTER, GKE, AUTOPILOT, EKS, AKS, GENERIC)}
"""In the order in which they are looked for: Karpenter runs on several clouds."""


NO_OWN = Platform("own")
"""An installation that names no labels and taints of its own."""


def platform_of(nodes: Iterable[Node], said: Platform | None = None, own: Platform = NO_OWN) -> Platform:
    """That of these nodes, by their labels or as somebody `said`, with what the installation names as its `own`."""
    if said is not None:
        return _joined(said, own)
    labels = {key for node in nodes for key in node.metadata.labels}
    found = [each for each in PLATFORMS.values() if any(mark in labels for mark in each.marks)]
    return _joined(*(found or [GENERIC]), own)


def _joined(first: Platform, *others: Platform) -> Platform:
    """A cluster of nodes of all these platforms, by the name of the first."""
    for each in others:
        if each.spot or each.taints:
            first = replace(
                first,
                spot={**first.spot, **each.spot},
                taints={**first.taints, **each.taints},
                named_nodes=first.named_nodes and each.named_nodes,
            )
    return first


def is_spot(node: Node, platform: Platform = GENERIC) -> bool:
    """Whether the node has a spot label, of any platform or of the installation's own."""
    labels = node.metadata.labels
    return node.has_spot_label or any(labels.get(key) in values for key, values in platform.spot.items())
