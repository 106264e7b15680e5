"""Which size a pool should have, and whether that can be relied on: pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from shoal.api.amounts import quantity
from shoal.api.base import Reason
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_scaling import Subject
from shoal.pools.rules import Wish
from shoal.pools.subject import identity, subject_of


def wish_of(pool: CapacityPool, subject: Subject, now: datetime, pools: Iterable[CapacityPool] = ()) -> Wish:
    """What is recommended, and whether it can be relied on.

    Of several operators each leaves out the ones that do not run any more, so it can if one of them runs.
    `pools`: all that there are.
    """
    status = pool.status
    nodes, limit, problem = status.recommended.nodes, pool.spec.limits.nodes, None
    no_more: Reason | None = None
    if subject.buffer is not None:
        coming = status.waiting if status.waiting_nodes is None else status.waiting_nodes
        nodes = max(0, nodes - status.used - coming)
    ready = next((condition for condition in status.conditions if condition.type == "Ready"), None)
    if (other := other_holder(pool, subject, pools)) is not None:
        words = f"CapacityPool {other} sizes {identity(pool, subject)}: give each pool a target of its own"
        problem = Reason("SharedTarget", words)
    elif not any(share.runs(now) for share in status.shares):
        problem = Reason("Stale", "no operator runs, so the recommendation may be an old one")
    elif status.observed_generation != pool.metadata.generation:
        problem = Reason("Stale", "the operator has not read the pool's spec yet")
    elif status.lacks_accelerator is not None:  # idle ones go: they cost, and the next ones may be good
        no_more = Reason("PoolNotReady", "it gets no more nodes: see the condition Ready")
    elif ready is None or ready.status != "True":
        problem = Reason("PoolNotReady", "see the condition Ready")
    idle = pool.spec.scaling.shrink == "WhenIdle"
    in_use = status.used if idle else sum(share.serving for share in status.shares)
    if subject.buffer is not None:
        return Wish(nodes, limit, problem, no_more)
    return Wish(nodes, limit, problem, no_more, in_use=in_use, least=_least(pool))


def _least(pool: CapacityPool) -> int | None:
    if (least := pool.spec.scaling.min_nodes) is not None:
        return least
    sums = pool.status.sums
    return 0 if pool.status.used or (sums is not None and quantity(sums.node_seconds) > 0) else None


def other_holder(pool: CapacityPool, subject: Subject, pools: Iterable[CapacityPool]) -> str | None:
    """Another pool that sizes the same: the one that holds it, else the first by name."""
    mine, name = identity(pool, subject), pool.metadata.name
    for other in pools:
        theirs = other.status.scaling.subject if other.status.scaling else subject_of(other.spec.scaling)
        if other.metadata.uid == pool.metadata.uid or theirs is None or identity(other, theirs) != mine:
            continue
        held, holds = pool.status.scaling is not None, other.status.scaling is not None
        if holds > held or (holds == held and other.metadata.name < name):
            return other.metadata.name
    return None
