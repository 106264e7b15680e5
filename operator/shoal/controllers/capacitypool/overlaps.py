"""Which pool may not use nodes because an older one selects them, too: pure.

Only the younger of two pools is told, so that a new pool never switches off what runs. And it stays told while it has
no node that shows otherwise: without its workers the shared nodes go, and it would be used and given up in turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sized

from shoal.api.capacity_pool import CapacityPool


def older_overlap(
    pool: CapacityPool, others: Iterable[CapacityPool], sharing: Collection[str], nodes: Sized
) -> str:
    """The name of an older pool that selects nodes of this one, or would; empty: none.

    `sharing`: pools that have some of its `nodes`.
    """
    ready = (each for each in pool.status.conditions if each.type == "Ready")
    told = any(each.reason == "Overlaps" for each in ready)
    for other in sorted(others, key=_age):
        if other.metadata.uid == pool.metadata.uid or _age(other) > _age(pool):
            continue
        shared = other.metadata.name in sharing
        if shared or _includes(pool, other) or (told and not nodes and _may_share(pool, other)):
            return other.metadata.name
    return ""


def _age(pool: CapacityPool) -> tuple[str, str]:
    """Older pools come first; of two that were made in one second, one."""
    return pool.metadata.creation_timestamp or "", pool.metadata.name


def _includes(one: CapacityPool, other: CapacityPool) -> bool:
    """Whether one of two pools selects all nodes that the other does."""
    first, second = one.spec.node_selector.items(), other.spec.node_selector.items()
    return bool(first) and bool(second) and (first <= second or second <= first)


def _may_share(one: CapacityPool, other: CapacityPool) -> bool:
    """Whether a node may have the labels of both."""
    first, second = one.spec.node_selector, other.spec.node_selector
    return bool(first and second) and all(second.get(key, value) == value for key, value in first.items())
