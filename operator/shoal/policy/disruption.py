"""What Kubernetes and the clouds say before and when they take a pod away.

Two tables: what a node says and what a pod says. Sources: Kubernetes (node-shutdown, node conditions, well-known
taints, KEP-3329), Karpenter (interruption controller), aws-node-termination-handler, GKE's and AKS' guides,
cluster-autoscaler. The node says it first: on a graceful shutdown the kubelet holds the pod's own condition back until
the containers have stopped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from shoal.api.kube import Node, Pod
from shoal.api.training_job_status import Slot


class Meaning(IntEnum):
    """How sure a signal is; a greater one outweighs a lesser."""

    AT_RISK = 1
    """Perhaps, some time: nothing is done."""
    LEAVING = 2
    """Certain: the pod still runs, and will be gone soon."""
    LOST = 3
    """The machine is gone: what the API shows of its pods is history."""


@dataclass(frozen=True)
class Signal:
    """One thing that is said, and what it means."""

    reason: str
    meaning: Meaning


NODE_DELETED = Signal("NodeDeleted", Meaning.LOST)
NODE_REPLACED = Signal("NodeReplaced", Meaning.LOST)  # same name, another machine or another boot
NODE_LOST = Signal("NodeLost", Meaning.LOST)
NODE_SHUTDOWN = Signal("NodeShutdown", Meaning.LEAVING)
NODE_TERMINATING = Signal("NodeTerminating", Meaning.LEAVING)

TAINTS: dict[str, Signal] = {
    # Kubernetes itself
    "node.kubernetes.io/unreachable": NODE_LOST,
    "node.kubernetes.io/out-of-service": NODE_LOST,
    "node.cloudprovider.kubernetes.io/shutdown": NODE_LOST,
    # Google Kubernetes Engine, and its older termination handler
    "cloud.google.com/impending-node-termination": Signal("ImpendingNodeTermination", Meaning.LEAVING),
    # Karpenter (AWS, Azure), by its present and its former name
    "karpenter.sh/disrupted": Signal("NodeDisrupted", Meaning.LEAVING),
    "karpenter.sh/disruption": Signal("NodeDisrupted", Meaning.LEAVING),
    # aws-node-termination-handler
    "aws-node-termination-handler/spot-itn": Signal("SpotInterruption", Meaning.LEAVING),
    "aws-node-termination-handler/scheduled-maintenance": Signal("ScheduledMaintenance", Meaning.LEAVING),
    "aws-node-termination-handler/asg-lifecycle-termination": Signal("NodeTerminating", Meaning.LEAVING),
    "aws-node-termination-handler/rebalance-recommendation": Signal("RebalanceRecommended", Meaning.AT_RISK),
    # Azure Kubernetes Service
    "remediator.kubernetes.azure.com/unschedulable": Signal("NodeRemediated", Meaning.LEAVING),
    "aks-node-termination-handler/preempt": Signal("SpotInterruption", Meaning.LEAVING),
    # cluster-autoscaler
    "ToBeDeletedByClusterAutoscaler": Signal("ScaledDownByAutoscaler", Meaning.LEAVING),
    "DeletionCandidateOfClusterAutoscaler": Signal("ScaleDownCandidate", Meaning.AT_RISK),
}
_NOT_READY = "node.kubernetes.io/not-ready"

CONDITIONS: dict[str, Signal] = {"VMEventScheduled": Signal("VMEventScheduled", Meaning.LEAVING)}  # AKS

SPOT_LABELS: dict[str, tuple[str, ...]] = {
    "cloud.google.com/gke-spot": ("true",),
    "cloud.google.com/gke-preemptible": ("true",),
    "cloud.google.com/gke-provisioning": ("spot", "preemptible"),
    "eks.amazonaws.com/capacityType": ("SPOT",),
    "karpenter.sh/capacity-type": ("spot",),
    "kubernetes.azure.com/scalesetpriority": ("spot",),
}
"""How clouds label spot nodes: any of them is enough."""

POOL_LABELS = (
    "cloud.google.com/gke-nodepool",
    "karpenter.sh/nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
)


def is_spot(node: Node) -> bool:
    """Whether a known label says that the node is a spot node."""
    return any(node.metadata.labels.get(key) in values for key, values in SPOT_LABELS.items())


def pool_of(node: Node) -> str:
    """The node pool, as the cloud labels it; empty if it does not."""
    return next((node.metadata.labels[key] for key in POOL_LABELS if key in node.metadata.labels), "")


def node_signal(node: Node | None, slot: Slot) -> Signal | None:
    """The strongest signal of a pod's node.

    `slot` tells which machine it was: a node that is gone, has another uid, or was booted again under its old name
    took the pod with it. A node that was never seen says nothing (its own watch may be behind the pods').
    """
    if node is None:
        return NODE_DELETED if slot.node_uid else None
    if slot.node_uid and node.metadata.uid != slot.node_uid:
        return NODE_REPLACED
    boot = node.status.node_info.boot_id
    if slot.boot_id and boot and boot != slot.boot_id:
        return NODE_REPLACED
    said = [*_of_conditions(node), *_of_taints(node)]
    if node.metadata.deletion_timestamp:
        said.append(NODE_TERMINATING)
    return max(said, key=lambda signal: signal.meaning, default=None)


def _of_conditions(node: Node) -> list[Signal]:
    said = [CONDITIONS[c.type] for c in node.status.conditions if c.type in CONDITIONS and c.status == "True"]
    ready = node.condition("Ready")
    if ready is not None and ready.status == "Unknown":
        said.append(NODE_LOST)
    elif ready is not None and ready.status == "False" and "node is shutting down" in ready.message:
        said.append(NODE_SHUTDOWN)
    return said


def _of_taints(node: Node) -> list[Signal]:
    said = [TAINTS[taint.key] for taint in node.spec.taints if taint.key in TAINTS]
    if any(taint.key == _NOT_READY and taint.effect == "NoExecute" for taint in node.spec.taints):
        said.append(Signal("NodeNotReady", Meaning.LEAVING))
    return said


# --- what a pod says ------------------------------------------------------------------------------------------------

POD_CONDITION = "DisruptionTarget"
DISRUPTION_REASONS = frozenset(
    {
        "PreemptionByScheduler",
        "EvictionByEvictionAPI",
        "DeletionByTaintManager",
        "DeletionByPodGC",
        "TerminationByKubelet",
    }
)
_REJECTIONS = frozenset(
    {"NodeAffinity", "UnexpectedAdmissionError", "NodeShutdown", "Shutdown", "TopologyAffinityError"}
)
_OWN_LIMIT = re.compile(r"exceed(s|ed) .*limit", re.IGNORECASE)


def rejection(pod: Pod) -> str | None:
    """Why a kubelet would not take the pod that was bound to it (often: its machine was made anew), if it did not."""
    reason = pod.status.reason
    if reason.startswith("OutOf"):
        return "OutOfResource"
    return reason if reason in _REJECTIONS else None


def pod_disruption(pod: Pod) -> str | None:
    """The reason that the pod itself gives for being taken, in a bounded set of words."""
    target = pod.condition(POD_CONDITION)
    if target is not None and target.status == "True":
        return target.reason if target.reason in DISRUPTION_REASONS else POD_CONDITION
    if pod.status.reason in {"Evicted", "Preempting", "NodeLost"}:
        return pod.status.reason
    return None


def exceeded_its_own_limit(pod: Pod) -> bool:
    """Evicted not because the node was short of something but because the pod used more than it asked for."""
    return pod.status.reason == "Evicted" and _OWN_LIMIT.search(pod.status.message) is not None
