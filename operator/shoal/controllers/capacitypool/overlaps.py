"""Which pool may not use nodes because an older one selects them, too: pure.

Only the younger of two pools is told, so that a new pool never switches off what runs. And it stays told while it has
no node that shows otherwise: without its workers the shared nodes go, and it would be used and given up in turn. What
was told holds for the selectors that it was told of: once a person has changed one of them, it is seen anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sized

from shoal.api.capacity_pool import CapacityPool
from shoal.controllers.capacitypool.members import in_words


def older_overlap(
    pool: CapacityPool, others: Iterable[CapacityPool], sharing: Collection[str], nodes: Sized
) -> str:
    """What is said of an older pool that selects nodes of this one, or would; empty: there is none.

    `sharing`: pools that have some of its `nodes`.
    """
    told = _told(pool)
    for other in sorted(others, key=_age):
        if other.metadata.uid == pool.metadata.uid or _age(other) > _age(pool):
            continue
        if other.metadata.name in sharing or _includes(pool, other) or (_called(other) in told and not nodes):
            return (
                f"nodes of this pool are also selected by {_called(other)}, which is older: give each node one pool; "
                "what runs here stays, and no plan adds to it"
            )
    return ""


def _told(pool: CapacityPool) -> str:
    """What is said of this pool as it is: of another generation of its spec it was another pool."""
    ready = (each for each in pool.status.conditions if each.type == "Ready" and each.reason == "Overlaps")
    return next((c.message for c in ready if c.observed_generation == pool.metadata.generation), "")


def _called(older: CapacityPool) -> str:
    """With its selector: of another one, what was told does not hold."""
    return f"CapacityPool {older.metadata.name} ({in_words(older.spec.node_selector)})"


def _age(pool: CapacityPool) -> tuple[str, str]:
    """Older pools come first; of two that were made in one second, one."""
    return pool.metadata.creation_timestamp or "", pool.metadata.name


def _includes(one: CapacityPool, other: CapacityPool) -> bool:
    """Whether one of two pools selects all nodes that the other does."""
    first, second = one.spec.node_selector.items(), other.spec.node_selector.items()
    return bool(first) and bool(second) and (first <= second or second <= first)
