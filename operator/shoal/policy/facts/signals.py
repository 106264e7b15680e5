"""How Kubernetes and cloud providers announce that a pod is disrupted: signals of nodes and of pods.

Sources: Kubernetes (node shutdown, node conditions, well-known taints, KEP-3329), Karpenter (interruption controller),
aws-node-termination-handler, the guides of GKE and AKS, cluster-autoscaler. The node signals first: on a graceful
shutdown the kubelet sets the pod's own condition only after the containers have stopped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import IntEnum

from shoal.api.kube import Condition, Node, Pod, Toleration
from shoal.api.labels import RoleName
from shoal.api.training_job_status import Slot
from shoal.policy.common.times import parse_time


class Meaning(IntEnum):
    """How certain a signal is; the greater of two applies."""

    AT_RISK = 1
    """Possible: no action."""
    LEAVING = 2
    """Announced: the pod still runs, but ends soon."""
    UNREACHABLE = 3
    """Its kubelet is not heard, or knows nothing of its pods: the pod may run on, or be gone."""
    LOST = 4
    """The machine is gone: what the API shows of its pods is outdated."""


@dataclass(frozen=True)
class Signal:
    """A reason in one word, and what it means."""

    reason: str
    meaning: Meaning
    revocable: bool = False
    """Whoever gave it may change its mind."""
    since: datetime | None = None
    """Since when it holds, where that is known."""
    patience: timedelta = timedelta()
    """How long it is to hold before it is acted upon, if longer than others."""


NODE_DELETED = Signal("NodeDeleted", Meaning.LOST)
NODE_REPLACED = Signal("NodeReplaced", Meaning.LOST)  # same name, but another machine or boot
NODE_LOST = Signal("NodeLost", Meaning.UNREACHABLE)
NODE_NOT_READY = Signal("NodeNotReady", Meaning.UNREACHABLE)
"""Its kubelet is heard, and cannot tell of its pods, or start any: as when a container runtime restarts."""
NODE_GONE = Signal("NodeLost", Meaning.LOST)
NODE_SHUTDOWN = Signal("NodeShutdown", Meaning.LEAVING)
NODE_TERMINATING = Signal("NodeTerminating", Meaning.LEAVING)
NODE_CORDONED = Signal("NodeCordoned", Meaning.LEAVING)

TAINTS: dict[str, Signal] = {
    # Kubernetes itself. Not `unreachable`: it says that the node is Unknown, and goes up to 5 s later
    "node.kubernetes.io/out-of-service": NODE_GONE,
    "node.cloudprovider.kubernetes.io/shutdown": NODE_GONE,
    # Google Kubernetes Engine, and its former termination handler
    "cloud.google.com/impending-node-termination": Signal("ImpendingNodeTermination", Meaning.LEAVING),
    # Karpenter (AWS, Azure), current and former name
    "karpenter.sh/disrupted": Signal("NodeDisrupted", Meaning.LEAVING, revocable=True),
    "karpenter.sh/disruption": Signal("NodeDisrupted", Meaning.LEAVING, revocable=True),
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
_TAINT_PATIENCE = timedelta(seconds=60)
"""For Kubernetes' taint of a node that is not ready, which comes within seconds; never in a small zone where more than
half of the nodes are not (`PartialDisruption`)."""
_CORDONED = "node.kubernetes.io/unschedulable"

_AKS = "VMEventScheduled"
CONDITIONS: dict[str, Signal] = {_AKS: Signal("VMEventScheduled", Meaning.LEAVING)}
"""AKS: reason or message name the event (Preempt, Terminate, Redeploy, Reboot, Freeze).

It is True since the first of several, so one that follows a freeze seems to have been said when that was: of a pod that
was bound meanwhile it says nothing, unless the node is cordoned, too, as for all of them but a reboot.
"""
VM_FROZEN = Signal("VMFreezeScheduled", Meaning.AT_RISK)
_HARMLESS = re.compile(r"freeze|live.?migration", re.IGNORECASE)  # a pause of seconds

NODES_HEARD_WITHIN = timedelta(seconds=10)
"""The scheduler knows after so long that a node is not ready, and binds no pod to it. What is bound before may show
that the node is back, or that the scheduler is behind."""


def node_signal(
    node: Node | None,
    slot: Slot,
    tolerations: Sequence[Toleration] = (),
    *,
    bound: datetime | None = None,
    ended: bool = False,
    heard: bool = False,
) -> Signal | None:
    """The strongest signal of a pod's node, of those that say something of this pod.

    `tolerations`: the pod's; `bound`: when it was bound; `ended`: whether it has, which an announcement may explain;
    `heard`: but those that the process refutes.

    `slot` identifies the machine: if its node is deleted, has another uid, or was rebooted, the pod is lost. A node
    that was never seen is not a signal: the watch of nodes may lag behind that of pods.
    """
    if node is None:
        return NODE_DELETED if slot.machine else None
    if slot.machine and not node.is_machine(slot.machine) and not heard:
        return NODE_REPLACED
    if node.untroubled:
        return None
    signals = [*_condition_signals(node, slot.role), *_taint_signals(node, slot.role, tolerations)]
    if node.metadata.deletion_timestamp:
        signals.append(replace(NODE_TERMINATING, since=parse_time(node.metadata.deletion_timestamp)))
    if bound is not None:
        comes_back = not ended and not _keeps_off(node, tolerations)
        signals = [each for each in signals if not _was_said_before(each, bound, comes_back=comes_back)]
    if heard:
        signals = [each for each in signals if each.meaning is not Meaning.UNREACHABLE]
    return max(signals, key=lambda signal: signal.meaning, default=None)


def _was_said_before(signal: Signal, bound: datetime, *, comes_back: bool) -> bool:
    """Whether it was said of the node before the scheduler put the pod there, and so says nothing of that pod.

    Of a node that is not ready the scheduler hears, if late: who is bound long after that shows that it is well again,
    and the watch of nodes behind. That a node goes is told to no scheduler but by a taint. Without one, the successor
    of a pod that is moved `comes_back`, is moved, too, and so on: whoever is put there meanwhile stays. Who is in the
    same second is rather that successor than a pod that had come just before.
    """
    if signal.since is None or signal.meaning is Meaning.LOST:
        return False
    if signal.meaning is Meaning.UNREACHABLE or signal.reason == NODE_SHUTDOWN.reason:
        return bound - signal.since > NODES_HEARD_WITHIN
    return comes_back and bound >= signal.since


def _keeps_off(node: Node, tolerations: Sequence[Toleration]) -> bool:
    """Whether the scheduler puts no such pod there: one that is there was bound a moment before it could know."""
    taints = (taint for taint in node.spec.taints if taint.effect in {"NoSchedule", "NoExecute"})
    return any(not any(each.tolerates(taint) for each in tolerations) for taint in taints)


def _condition_signals(node: Node, role: RoleName) -> list[Signal]:
    """That a node is not ready counts by its taint; of a server, which nobody else replaces, also without, if later."""
    signals = []
    tainted = any(taint.key == _NOT_READY and taint.effect == "NoExecute" for taint in node.spec.taints)
    for condition in node.status.conditions:
        since = parse_time(condition.last_transition_time)
        if condition.type == _AKS and condition.status == "True":
            frozen = _HARMLESS.search(f"{condition.reason} {condition.message}") is not None
            signals.append(replace(VM_FROZEN if frozen else CONDITIONS[_AKS], since=since))
        elif condition.type == "Ready" and condition.status == "Unknown":
            signals.append(replace(NODE_LOST, since=since))
        elif _shuts_down(condition):
            signals.append(replace(NODE_SHUTDOWN, since=since))
        elif (condition.type, condition.status, role) == ("Ready", "False", "ps") and since and not tainted:
            signals.append(replace(NODE_NOT_READY, since=since, patience=_TAINT_PATIENCE))
    return signals


def _shuts_down(condition: Condition) -> bool:
    """Whether it says that the kubelet ends the node's pods, within their grace periods."""
    not_ready = (condition.type, condition.status) == ("Ready", "False")
    return not_ready and "node is shutting down" in condition.message


def _taint_signals(node: Node, role: RoleName, tolerations: Sequence[Toleration]) -> list[Signal]:
    """Some taints mean something else for a server, which would stop for nothing.

    Karpenter taints a node before it has another one, and may change its mind: a server is moved when the node is
    deleted, of which the taint says no more. The disruption budget prevents the eviction of a server, so it is moved
    when its node is cordoned, which every drain does first; a worker stays until it is evicted. A pod that tolerates a
    taint that only keeps others away could be scheduled onto the same node again.
    """
    signals, ready = [], node.condition("Ready")
    unready = ready is not None and ready.status == "False" and not _shuts_down(ready)
    for taint in node.spec.taints:
        found = TAINTS.get(taint.key)
        if taint.key == _NOT_READY and taint.effect == "NoExecute" and unready:
            found = NODE_NOT_READY
        elif taint.key == _CORDONED and role == "ps":
            found = NODE_CORDONED
        if found is None or (found.revocable and node.metadata.deletion_timestamp):
            continue
        keeps_away = taint.effect != "NoExecute" and found.meaning is Meaning.LEAVING
        if (role == "ps" and found.revocable) or (
            keeps_away and any(each.tolerates(taint) for each in tolerations)
        ):
            found = replace(found, meaning=Meaning.AT_RISK)
        signals.append(replace(found, since=parse_time(taint.time_added)))
    return signals


# --- signals of pods ------------------------------------------------------------------------------------------------

POD_CONDITION = "DisruptionTarget"
KUEUES_CONDITION, EVICTED_BY_KUEUE = "TerminationTarget", "EvictedByKueue"
"""Kueue sets this before it deletes a pod whose Workload gives way."""
DISRUPTION_REASONS = frozenset(
    {
        "PreemptionByScheduler",
        "EvictionByEvictionAPI",
        "DeletionByTaintManager",
        "DeletionByPodGC",
        "TerminationByKubelet",
    }
)
REJECTIONS = frozenset(
    {"NodeAffinity", "UnexpectedAdmissionError", "NodeShutdown", "Shutdown", "TopologyAffinityError"}
)
_OWN_LIMIT = re.compile(r"exceed(s|ed) .*limit", re.IGNORECASE)


def rejection(pod: Pod) -> str | None:
    """Why the kubelet did not admit the pod (often because its machine was recreated); None if it did."""
    reason = pod.status.reason
    if reason.startswith("OutOf"):
        return "OutOfResource"
    return reason if reason in REJECTIONS else None


def pod_disruption(pod: Pod) -> str | None:
    """The reason of a disruption according to the pod itself, from a bounded set; None if there is none."""
    target = pod.condition(POD_CONDITION)
    if target is not None and target.status == "True":
        return target.reason if target.reason in DISRUPTION_REASONS else POD_CONDITION
    stopped = pod.condition(KUEUES_CONDITION)
    if stopped is not None and stopped.status == "True":
        return EVICTED_BY_KUEUE
    if pod.status.reason in {"Evicted", "Preempting", "NodeLost"}:
        return pod.status.reason
    return None


def exceeded_own_limit(pod: Pod) -> bool:
    """Whether the pod was evicted because it exceeded its own limit, not because the node ran short."""
    return pod.status.reason == "Evicted" and _OWN_LIMIT.search(pod.status.message) is not None
