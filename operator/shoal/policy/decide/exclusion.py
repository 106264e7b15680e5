"""Which nodes new workers avoid (`workers.nodeExclusion`): where workers failed again and again.

None where pods may not name nodes, as with Karpenter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from shoal.api.training_job_status import ExcludedNode
from shoal.policy.facts.read import Facts
from shoal.policy.model import Event

MOST = 64


@dataclass(frozen=True)
class Exclusions:
    """The excluded nodes, and failures on others."""

    nodes: tuple[ExcludedNode, ...]
    failures: Mapping[str, int]
    events: tuple[Event, ...] = ()


def exclude(facts: Facts, failed: Sequence[tuple[str, str]]) -> Exclusions:
    """Exclude nodes. `failed`: (node, reason) of the failures of workers that this plan counts."""
    rule, before = facts.job.spec.workers.node_exclusion, facts.job.status
    kept = tuple(each for each in before.excluded_nodes if facts.timers.pending(each.until))
    if kept == before.excluded_nodes:
        kept = before.excluded_nodes
    if rule is None or not failed or not facts.seen.platform.named_nodes:
        return Exclusions(kept, before.node_failures)
    counts, events = dict(before.node_failures), []
    for node, reason in failed:
        if any(each.node == node for each in kept):
            continue
        counts[node] = counts.get(node, 0) + 1
        if counts[node] < rule.failures_before_exclude:
            continue
        del counts[node]
        until = facts.now + timedelta(seconds=rule.cooldown_seconds)
        kept = (*kept, ExcludedNode(node=node, reason=reason, until=until))[-MOST:]
        words = f"workers failed on node {node} {rule.failures_before_exclude} times ({reason}); new ones avoid it"
        events.append(Event("Warning", "NodeExcluded", f"{words} for {rule.cooldown_seconds} s"))
    newest = dict(list(counts.items())[-MOST:])
    return Exclusions(kept, newest, tuple(events))
