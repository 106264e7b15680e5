"""Which nodes new workers avoid (`workers.nodeExclusion`): where workers failed again and again, and others did not.

What most nodes see at about the same time is no fault of theirs: as when a storage is away for moments. And however
they fail, of several nodes half are left. None is avoided where pods may not name nodes, as with Karpenter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta

from shoal.api.training_job_status import ExcludedNode
from shoal.policy.decide.cleanup import MOST_KEPT
from shoal.policy.facts.read import Facts
from shoal.policy.model import Event

MOST = 64
ABOUT = timedelta(seconds=60)
"""Failures are of about the same time within this: each worker fails, and is replaced, in its own time."""


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
    nodes, common = _common(facts, failed)
    blameless = set[str]().union(*common.values())
    # What was held against them as the first ones to fail is forgotten.
    counts = {node: count for node, count in before.node_failures.items() if node not in blameless}
    lately, events = facts.now + timedelta(seconds=rule.cooldown_seconds) - ABOUT, []
    kept = tuple(x for x in kept if x.until < lately or x.node not in common.get(x.reason, ()))
    for node, reason in failed:
        if reason in common or any(each.node == node for each in kept):
            continue
        counts[node] = counts.get(node, 0) + 1
        most = max(1, len(nodes | {each.node for each in kept}) // 2)
        if counts[node] < rule.failures_before_exclude or len(kept) >= most:
            continue
        del counts[node]
        until = facts.now + timedelta(seconds=rule.cooldown_seconds)
        kept = (*kept, ExcludedNode(node=node, reason=reason, until=until))[-MOST:]
        words = f"workers failed on node {node} {rule.failures_before_exclude} times ({reason}); new ones avoid it"
        events.append(Event("Warning", "NodeExcluded", f"{words} for {rule.cooldown_seconds} s"))
    newest = dict(list(counts.items())[-MOST:])
    return Exclusions(kept, newest, tuple(events))


def _common(facts: Facts, failed: Sequence[tuple[str, str]]) -> tuple[Set[str], Mapping[str, Set[str]]]:
    """The nodes of the job's workers, and by reason those that saw the same a moment ago, if they are most of them.

    Of those that failed before, as many are remembered as have their pods.
    """
    nodes, found = {node for node, _ in failed}, defaultdict[str, set[str]](set)
    for node, reason in failed:
        found[reason].add(node)
    for slot in facts.job.status.slots:
        if slot.role == "worker" and slot.node:
            nodes.add(slot.node)
            if slot.cause in found and slot.ended_at and abs(facts.now - slot.ended_at) <= ABOUT:
                found[slot.cause].add(slot.node)
    few = min(len(nodes), 2 * MOST_KEPT - 1)
    return nodes, {reason: where for reason, where in found.items() if len(where) > max(1, few / 2)}
