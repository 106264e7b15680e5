"""The CPU cores of a pool's nodes, also while it has none: what was measured on them holds for the next ones.

Forgotten, the pool would have those that are usual for its accelerator: where its nodes have fewer, it looks faster
than it is as soon as it is at zero, is bought again, and is left when its node is seen.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node
from shoal.controllers.capacitypool.selectors import Selectors

__all__ = ["Cores"]

Described = tuple[str, tuple[tuple[str, str], ...]]


class Cores:
    """Those of all pools, since the operator began. A pool whose `nodeSelector` is changed has other nodes."""

    def __init__(self) -> None:
        self._known: dict[Described, float] = {}

    def see(self, pools: Mapping[str, CapacityPool], nodes: Mapping[str, Node]) -> dict[str, float]:
        """The most cores that a node of a pool has, or had when it had one; of those that were ever seen."""
        selectors, now = Selectors(), dict[str, float]()
        for name, pool in pools.items():
            selectors.put(name, pool.spec.node_selector)
        for node in nodes.values():
            for name in selectors.selecting(node.metadata.labels):
                now[name] = max(now.get(name, 0.0), node.status.cores)
        described = {name: _described(pool) for name, pool in pools.items()}
        before = {name: self._known[key] for name, key in described.items() if key in self._known}
        found = before | {name: cores for name, cores in now.items() if cores}
        self._known = {described[name]: cores for name, cores in found.items()}
        return found


def _described(pool: CapacityPool) -> Described:
    return pool.metadata.uid, tuple(sorted(pool.spec.node_selector.items()))
