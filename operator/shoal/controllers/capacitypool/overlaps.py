"""Which pool may not use nodes because an older one selects them, too: pure.

Only the younger of two pools is told, so that a new pool never switches off what runs. And it stays told while it has
no node that shows otherwise: without its workers the shared nodes go, and it would be used and given up in turn. What
was told holds for the selectors that it was told of: once a person has changed one of them, it is seen anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sized

from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_status import OlderPool


def older_overlap(
    pool: CapacityPool, others: Iterable[CapacityPool], sharing: Collection[str], nodes: Sized
) -> OlderPool | None:
    """The older pool that selects nodes of this one, or would; None: there is none.

    `sharing`: pools that have some of its `nodes`.
    """
    # Of another generation of its spec it was another pool.
    same = pool.status.observed_generation == pool.metadata.generation
    told = pool.status.overlaps if same and not nodes else None
    for other in sorted(others, key=_age):
        if other.metadata.uid == pool.metadata.uid or _age(other) > _age(pool):
            continue
        older = OlderPool(name=other.metadata.name, node_selector=other.spec.node_selector)
        if older.name in sharing or _includes(pool, other) or older == told:
            return older
    return None


def _age(pool: CapacityPool) -> tuple[str, str]:
    """Older pools come first; of two that were made in one second, one."""
    return pool.metadata.creation_timestamp or "", pool.metadata.name


def _includes(one: CapacityPool, other: CapacityPool) -> bool:
    """Whether one of two pools selects all nodes that the other does."""
    first, second = one.spec.node_selector.items(), other.spec.node_selector.items()
    return bool(first) and bool(second) and (first <= second or second <= first)
