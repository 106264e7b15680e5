"""How many nodes pods need, of which several may share one: pure.

What else runs on the nodes is not seen, and one whose driver is not up yet has less than it will: so it is the fewest
that what any of them has allows. Pods that wait in vain for what the nodes do not have correct that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from shoal.api.amounts import Amounts, nodes_for
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node, Pod
from shoal.manifests.pods import GPU
from shoal.policy.facts.waits import kept_apart

UNTOLD: Set[Amounts] = frozenset({()})
"""A node that does not say what it has: until one does, it may have room for all."""


def rooms_of(pool: CapacityPool, nodes: Iterable[Node]) -> Set[Amounts]:
    """What nodes of a pool have: as they say, else as the pool does; empty: nobody knows."""
    said = {has for node in nodes if (has := node.status.allocatable)}
    spec = pool.spec
    if said or not spec.cores:
        return said
    gpus = spec.accelerator.count if spec.accelerator is not None else 0
    return {(("cpu", spec.cores), (GPU, float(gpus)), ("ephemeral-storage", math.inf), ("memory", math.inf))}


def nodes_of(waiting: Iterable[Pod], rooms: Set[Amounts]) -> int:
    """How many nodes these pods need; one for each that is kept apart: its node takes none of the others."""
    pods = list(waiting)
    together = Counter(each.spec.requests for each in pods if rooms and not kept_apart(each))
    return len(pods) - together.total() + (_fewest(together, rooms) if together else 0)


def planned_nodes(workers: Iterable[tuple[Amounts | None, int]], rooms: Set[Amounts], least: int) -> int:
    """How many nodes the workers need that jobs have or, by a plan, are to have; one each where nobody knows.

    Args:
        workers: what those of a job ask for, and how many there are.
        rooms: what the nodes have.
        least: the nodes that some of them have, and that others wait for in vain.

    """
    asked = Counter[Amounts | None]()
    for each, count in workers:
        asked[each] += count
    planned = asked.total()
    known = {each: count for each, count in asked.items() if each is not None}
    if not rooms or not known:
        return planned
    return min(planned, max(_fewest(known, rooms) + asked[None], least))


def _fewest(pods: Mapping[Amounts, int], rooms: Set[Amounts]) -> int:
    return min(nodes_for(pods, room) for room in rooms)
