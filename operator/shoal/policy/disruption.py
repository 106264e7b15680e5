"""How Kubernetes and cloud providers announce that a pod is disrupted: signals of nodes and of pods.

Sources: Kubernetes (node shutdown, node conditions, well-known taints, KEP-3329), Karpenter (interruption controller),
aws-node-termination-handler, the guides of GKE and AKS, cluster-autoscaler. The node signals first: on a graceful
shutdown the kubelet sets the pod's own condition only after the containers have stopped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from shoal.api.kube import Node, Pod, Toleration
from shoal.api.training_job_status import Slot
from shoal.policy.names import RoleName


class Meaning(IntEnum):
    """How certain a signal is; the greater of two applies."""

    AT_RISK = 1
    """Possible: no action."""
    LEAVING = 2
    """Certain: the pod still runs, but ends soon."""
    LOST = 3
    """The machine is gone: what the API shows of its pods is outdated."""


@dataclass(frozen=True)
class Signal:
    """A reason in one word, and what it means."""

    reason: str
    meaning: Meaning


NODE_DELETED = Signal("NodeDeleted", Meaning.LOST)
NODE_REPLACED = Signal("NodeReplaced", Meaning.LOST)  # same name, but another machine or boot
NODE_LOST = Signal("NodeLost", Meaning.LOST)
NODE_SHUTDOWN = Signal("NodeShutdown", Meaning.LEAVING)
NODE_TERMINATING = Signal("NodeTerminating", Meaning.LEAVING)

TAINTS: dict[str, Signal] = {
    # Kubernetes itself
    "node.kubernetes.io/unreachable": NODE_LOST,
    "node.kubernetes.io/out-of-service": NODE_LOST,
    "node.cloudprovider.kubernetes.io/shutdown": NODE_LOST,
    # Google Kubernetes Engine, and its former termination handler
    "cloud.google.com/impending-node-termination": Signal("ImpendingNodeTermination", Meaning.LEAVING),
    # Karpenter (AWS, Azure), current and former name
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
_CORDONED = "node.kubernetes.io/unschedulable"

CONDITIONS: dict[str, Signal] = {"VMEventScheduled": Signal("VMEventScheduled", Meaning.LEAVING)}  # AKS

SPOT_LABELS: dict[str, tuple[str, ...]] = {
    "cloud.google.com/gke-spot": ("true",),
    "cloud.google.com/gke-preemptible": ("true",),
    "cloud.google.com/gke-provisioning": ("spot", "preemptible"),
    "eks.amazonaws.com/capacityType": ("SPOT",),
    "karpenter.sh/capacity-type": ("spot",),
    "kubernetes.azure.com/scalesetpriority": ("spot",),
}
"""Labels of spot nodes by cloud provider; any one is enough."""

POOL_LABELS = (
    "cloud.google.com/gke-nodepool",
    "karpenter.sh/nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
)


def is_spot(node: Node) -> bool:
    """Whether the node has a known spot label."""
    return any(node.metadata.labels.get(key) in values for key, values in SPOT_LABELS.items())


def pool_of(node: Node) -> str:
    """The node pool from the cloud provider's label; empty if there is none."""
    return next((node.metadata.labels[key] for key in POOL_LABELS if key in node.metadata.labels), "")


def node_signal(node: Node | None, slot: Slot, tolerations: Sequence[Toleration] = ()) -> Signal | None:
    """The strongest signal of a pod's node. `tolerations`: the pod's.

    `slot` identifies the machine: if its node is deleted, has another uid, or was rebooted, the pod is lost. A node
    that was never seen is not a signal: the watch of nodes may lag behind that of pods.
    """
    if node is None:
        return NODE_DELETED if slot.node_uid else None
    if slot.node_uid and node.metadata.uid != slot.node_uid:
        return NODE_REPLACED
    boot = node.status.node_info.boot_id
    if slot.boot_id and boot and boot != slot.boot_id:
        return NODE_REPLACED
    signals = [*_condition_signals(node), *_taint_signals(node, slot.role, tolerations)]
    if node.metadata.deletion_timestamp:
        signals.append(NODE_TERMINATING)
    return max(signals, key=lambda signal: signal.meaning, default=None)


def _condition_signals(node: Node) -> list[Signal]:
    signals = [
        CONDITIONS[c.type] for c in node.status.conditions if c.type in CONDITIONS and c.status == "True"
    ]
    ready = node.condition("Ready")
    if ready is not None and ready.status == "Unknown":
        signals.append(NODE_LOST)
    elif ready is not None and ready.status == "False" and "node is shutting down" in ready.message:
        signals.append(NODE_SHUTDOWN)
    return signals


def _taint_signals(node: Node, role: RoleName, tolerations: Sequence[Toleration]) -> list[Signal]:
    """Two taints mean something else for each role.

    A worker on a node that is not ready gets a replacement, which is taken back if the node recovers. A server would
    stop for nothing: it is moved when Kubernetes evicts it. The disruption budget prevents the eviction of a server, so
    it is moved when its node is cordoned, which every drain does first; a worker stays until it is evicted.
    """
    signals = [TAINTS[taint.key] for taint in node.spec.taints if taint.key in TAINTS]
    for taint in node.spec.taints:
        if taint.key == _NOT_READY and taint.effect == "NoExecute":
            signals.append(Signal("NodeNotReady", Meaning.LEAVING if role == "worker" else Meaning.AT_RISK))
        # A server that tolerates the taint could be scheduled onto the same node again.
        if taint.key == _CORDONED and role == "ps" and not any(each.tolerates(taint) for each in tolerations):
            signals.append(Signal("NodeCordoned", Meaning.LEAVING))
    return signals


# --- signals of pods ------------------------------------------------------------------------------------------------

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
    """Why the kubelet did not admit the pod (often because its machine was recreated); None if it did."""
    reason = pod.status.reason
    if reason.startswith("OutOf"):
        return "OutOfResource"
    return reason if reason in _REJECTIONS else None


def pod_disruption(pod: Pod) -> str | None:
    """The reason of a disruption according to the pod itself, from a bounded set; None if there is none."""
    target = pod.condition(POD_CONDITION)
    if target is not None and target.status == "True":
        return target.reason if target.reason in DISRUPTION_REASONS else POD_CONDITION
    if pod.status.reason in {"Evicted", "Preempting", "NodeLost"}:
        return pod.status.reason
    return None


def exceeded_own_limit(pod: Pod) -> bool:
    """Whether the pod was evicted because it exceeded its own limit, not because the node ran short."""
    return pod.status.reason == "Evicted" and _OWN_LIMIT.search(pod.status.message) is not None
