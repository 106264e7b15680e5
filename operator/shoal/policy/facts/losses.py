"""The reasons of losses of workers: a closed set, since they are keys of a map and labels of metrics."""

from __future__ import annotations

from shoal.policy.facts.signals import (
    CONDITIONS,
    DISRUPTION_REASONS,
    EVICTED_BY_KUEUE,
    NODE_DELETED,
    NODE_NOT_READY,
    NODE_REPLACED,
    NODE_SHUTDOWN,
    NODE_TERMINATING,
    POD_CONDITION,
    REJECTIONS,
    TAINTS,
    Meaning,
)
from shoal_trainer.contract import FAILURE_REASONS

_NODES = (NODE_DELETED, NODE_NOT_READY, NODE_REPLACED, NODE_SHUTDOWN, NODE_TERMINATING)
BY_NODE = frozenset(
    signal.reason
    for signal in (*TAINTS.values(), *CONDITIONS.values(), *_NODES)
    if signal.meaning >= Meaning.LEAVING
)
"""What is said of nodes: it comes in waves."""
DISRUPTIONS = (
    BY_NODE
    | DISRUPTION_REASONS
    | REJECTIONS
    | {
        POD_CONDITION,
        EVICTED_BY_KUEUE,
        "Evicted",
        "Preempting",
        "OutOfResource",
        "Deleted",
        "Gone",
        "LabelRemoved",
    }
    | {"Silent", "Killed", "Fenced", "FailureRule", "Unknown"}
)
FAILURES = FAILURE_REASONS | {
    "Error", "Evicted", "ExitedEarly", "FailJob", "InitContainerFailed", "KilledRepeatedly", "OOMKilled"
}  # fmt: skip
LOSSES = DISRUPTIONS | FAILURES
