"""Whether a drained node was reclaimed: EKS and aws-node-termination-handler announce that by nothing else.

Both cordon a spot node at its notice and evict its pods, as everybody does who drains a node, and its machine goes
minutes later. So an eviction shows to be an interruption once its machine goes, and the record of the pod waits for
that. Whose machine stays was only drained. On-demand nodes are not reclaimed: what drains them is an upgrade, or a
person, and says nothing of how often the pool loses nodes. An upgrade of spot nodes looks like a reclaim, and counts.
"""

from __future__ import annotations

from datetime import timedelta

from shoal.api.training_job_status import Slot
from shoal.policy.facts.read import Facts

EVICTED = "EvictionByEvictionAPI"
GOES_WITHIN = timedelta(minutes=10)
"""From an eviction until its node is deleted: a notice is two minutes, and the node goes some time after."""


def may_be_reclaimed(facts: Facts, slot: Slot) -> bool:
    """Whether it may still show that the platform took the node of an evicted worker."""
    pool, ended = facts.seen.pools.get(slot.pool), slot.ended_at
    drained = slot.role == "worker" and slot.cause == EVICTED and bool(slot.machine) and not slot.interrupted
    if not drained or ended is None or pool is None or pool.spec.capacity_type != "Spot":
        return False
    return facts.seen.node_signals and facts.timers.pending(ended + GOES_WITHIN)


def was_reclaimed(facts: Facts, slot: Slot) -> bool:
    """Whether the platform took the node of an evicted worker."""
    if not may_be_reclaimed(facts, slot):
        return False
    node = facts.seen.nodes.get(slot.node)
    return node is None or not node.is_machine(slot.machine)
