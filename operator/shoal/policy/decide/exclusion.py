"""Which nodes new workers avoid (`workers.nodeExclusion`): where workers failed again and again, and others did not.

What three nodes or more, and most of the job's, see at about the same time is no fault of theirs: as when a storage is
away for moments. However they fail, of those on which the workers could be half are left. None is avoided where pods
may not name nodes, as with Karpenter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta

from shoal.api.training_job_status import ExcludedNode
from shoal.manifests.platforms import is_spot
from shoal.policy.decide.cleanup import MOST_KEPT
from shoal.policy.facts.read import Facts
from shoal.policy.model import Event, Observation

MOST = 64
FEWEST = 3
"""Two that fail at once are rather two bad nodes, or one worker that goes from the one to the other."""
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
    common = _common(facts, failed)
    # What was held against them as the first ones to fail is forgotten.
    blameless = set[str]().union(*common.values())
    counts = {node: count for node, count in before.node_failures.items() if node not in blameless}
    lately, events = facts.now + timedelta(seconds=rule.cooldown_seconds) - ABOUT, []
    kept = tuple(x for x in kept if x.until < lately or x.node not in common.get(x.reason, ()))
    for node, reason in failed:
        if reason in common or any(each.node == node for each in kept):
            continue
        counts[node] = counts.get(node, 0) + 1
        if counts[node] < rule.failures_before_exclude or _is_half(facts, node, kept):
            continue
        del counts[node]
        until = facts.now + timedelta(seconds=rule.cooldown_seconds)
        kept = (*kept, ExcludedNode(node=node, reason=reason, until=until))[-MOST:]
        words = f"workers failed on node {node} {rule.failures_before_exclude} times ({reason}); new ones avoid it"
        events.append(Event("Warning", "NodeExcluded", f"{words} for {rule.cooldown_seconds} s"))
    newest = dict(list(counts.items())[-MOST:])
    return Exclusions(kept, newest, tuple(events))


def _common(facts: Facts, failed: Sequence[tuple[str, str]]) -> Mapping[str, Set[str]]:
    """The reasons that most nodes of the job's workers, and not few, saw a moment ago, and these nodes.

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
    return {reason: where for reason, where in found.items() if FEWEST <= len(where) > few / 2}


def _is_half(facts: Facts, node: str, avoided: Sequence[ExcludedNode]) -> bool:
    """Whether half of the nodes on which a worker of this one could be, as far as is known, are avoided already."""
    slots = [each for each in facts.job.status.slots if each.role == "worker" and each.node]
    pool = next((each.pool for each in slots if each.node == node), "")
    names, nodes = {each.node for each in avoided}, {each.node for each in slots if each.pool == pool}
    nodes |= _alike(facts.seen, node, pool) if facts.seen.nodes else names
    return len(nodes & names) >= max(1, len(nodes) // 2)


def _alike(seen: Observation, node: str, pool: str) -> Set[str]:
    """The nodes of a pool; without one, those that are on spot as this node is, or are not."""
    known, this = seen.pools.get(pool), seen.nodes.get(node)
    if known is not None:
        labels = known.spec.node_selector.items()
        return {name for name, each in seen.nodes.items() if labels <= each.metadata.labels.items()}
    spot = this is not None and is_spot(this, seen.platform)
    return {name for name, each in seen.nodes.items() if is_spot(each, seen.platform) is spot}
