"""How the platforms label and taint spot nodes.

A pod for spot nodes carries the keys of the platforms whose nodes there are, and Karpenter's where it may run: that
has no nodes until a pod waits for one. Where no platform is known, it carries all keys. A pod that avoids spot nodes
carries all anyway, in one term; but on GKE Autopilot, which admits no keys of others, and EKS's only where its node
groups are: the Karpenter of EKS Auto Mode makes no node for a pod that names it. A cluster may have spot nodes of
labels of its own, which an installation names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
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
    keeps_nodes: bool = True
    """Whether a pod may keep its node from cluster-autoscaler, and asks for nothing else with that."""
    nodes_read: bool = True
    """Whether the operator can read nodes."""
    said: bool = False
    """Whether somebody says that it is this one, whatever nodes there are."""

    @cached_property
    def unread(self) -> Platform:
        """The same where it cannot."""
        return replace(self, nodes_read=False)

    @property
    def is_known(self) -> bool:
        """Whether somebody or all nodes say what it is: until the last one is read, it may be of more platforms."""
        return self.nodes_read or self.said

    def spot_terms(self) -> list[dict[str, Any]]:
        """Node selector terms, any of which matches a spot node. Karpenter's is the last.

        Karpenter simulates a pod with its first term, and then drops terms before it drops any preference, but never
        the last one: with its own key in another, a pod with a preference that cannot be met would get no node.
        """
        ordered = sorted(self.spot.items(), key=lambda each: each[0] in KARPENTER.spot)
        return [{"matchExpressions": [_expression("In", key, values)]} for key, values in ordered]

    def on_demand_terms(self) -> list[dict[str, Any]]:
        """One node selector term, which matches nodes without a spot label."""
        others = {key: v for key, v in SPOT_LABELS.items() if self.admits_others and key != NODE_GROUPS_KEY}
        avoided = {**others, **self.spot}
        return [{"matchExpressions": [_expression("NotIn", key, v) for key, v in avoided.items()]}]

    def tolerations(self) -> list[dict[str, Any]]:
        """Tolerations of the taints of spot nodes."""
        return [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in self.taints.items()]


def _expression(operator: str, key: str, values: Iterable[str]) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


NODE_GROUPS_KEY = "eks.amazonaws.com/capacityType"
"""Of EKS's node groups. Karpenter ignores a pod that names a label of its provider's own domain which it does not know,
even to avoid it, and the provider of EKS Auto Mode has this one."""
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
    keeps_nodes=False,
)
"""GKE Autopilot: nodes show no difference, so somebody has to say it. A pod that keeps its node asks for a longer run
time there, which is neither for spot pods nor for those with a term about other pods."""
EKS = Platform(
    "eks",
    spot={NODE_GROUPS_KEY: ("SPOT",), **KARPENTER.spot},
    marks=("eks.amazonaws.com/nodegroup", NODE_GROUPS_KEY),
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
MARKS = {mark for each in PLATFORMS.values() for mark in each.marks}

NO_OWN = Platform("own")
"""An installation that names no labels and taints of its own."""


def platform_of(nodes: Iterable[Node], said: Platform | None = None, own: Platform = NO_OWN) -> Platform:
    """That of these nodes, by their labels or as somebody `said`, with what the installation names as its `own`."""
    return platform_by({mark for node in nodes for mark in marks_of(node)}, said, own)


def marks_of(node: Node) -> Set[str]:
    """The labels of a node that tell its platform."""
    return MARKS & node.metadata.labels.keys()


def platform_by(marks: Set[str], said: Platform | None = None, own: Platform = NO_OWN) -> Platform:
    """That of nodes with these marks; see `platform_of`."""
    if said is not None:
        return _joined(replace(said, said=True), own)
    found = [each for each in PLATFORMS.values() if not marks.isdisjoint(each.marks)]
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
