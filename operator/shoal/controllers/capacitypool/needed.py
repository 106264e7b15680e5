"""How many nodes pods need, of which several may share one: pure.

What else runs on the nodes is not seen, and one whose driver is not up yet has less than it will: so a node counts with
as much of each resource as any of those that are looked at. Pods that wait in vain for what the nodes do not have
correct that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from shoal.api.amounts import Amounts, nodes_for
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node, Pod
from shoal.manifests.placement import ZONE
from shoal.manifests.pods import GPU
from shoal.policy.facts.waits import kept_apart

LOOKED_AT = 256
"""Nodes of a pool: it has one kind of machine, or a few."""
_ITS_RULES = "match pod anti-affinity", "match pod topology spread"
_OTHERS = "existing pods anti-affinity", "free ports"
"""In the scheduler's words, why a pod is kept apart: by rules of its own, or by what the others on a node have."""


def room_of(pool: CapacityPool, nodes: Iterable[Node]) -> Amounts:
    """What a node of a pool has: as these say, else as the pool does; empty: nobody knows."""
    most = dict[str, float]()
    for has in {node.status.allocatable for node in islice(nodes, LOOKED_AT)}:  # most are alike
        for name, amount in has:
            most[name] = max(most.get(name, 0.0), amount)
    if most or not pool.spec.cores:
        return tuple(sorted(most.items()))
    gpus = pool.spec.accelerator.count if pool.spec.accelerator is not None else 0
    return ("cpu", pool.spec.cores), (GPU, float(gpus)), ("ephemeral-storage", math.inf), ("memory", math.inf)


def nodes_of(waiting: Iterable[Pod], has: Amounts, *, tries_one: bool = False) -> int:
    """How many nodes these pods need; one for each that is kept apart: its node takes none of the others.

    Args:
        waiting: the pods.
        has: a node; where nobody knows, they need one each.
        tries_one: then they need one at first, which shows how many it has room for.

    """
    pods = list(waiting)
    sharing = Counter(each.spec.requests for each in pods if (has or tries_one) and not kept_apart(each))
    return len(pods) - sharing.total() + (nodes_for(sharing, has) if sharing else 0)


def may_help(pool: CapacityPool, pod: Pod) -> bool:
    """Whether one more node may take a pod that waits for one, or is kept apart.

    None does where the pod's own rules keep it from others by what all nodes of the pool have alike, such as their
    zone, and it has no rules but those: the node would stay empty as long as the pod waits.
    """
    by, words = pod.spec.apart_by, pod.unschedulable_words
    alike = bool(by) and labels_of_all(pool).issuperset(by) and any(each in words for each in _ITS_RULES)
    return not alike or any(each in words for each in _OTHERS)


def labels_of_all(pool: CapacityPool) -> set[str]:
    """The labels that all nodes of a pool have alike, as far as its spec says."""
    return {*pool.spec.node_selector, *([ZONE] if pool.spec.zone else [])}


def asked_by(
    there: Iterable[Pod], count: int, template: Callable[[], Amounts | None]
) -> Iterator[tuple[Amounts | None, int]]:
    """What so many workers of a job ask for, and how many do: an edit touches none that has a node.

    Args:
        there: those that have one; of a worker and its successor, the later one counts.
        count: how many workers the job has or is to have.
        template: what each of the others asks for; None: nobody knows.

    """
    asked = {each.place.index: each.spec.requests for each in there if each.place is not None}
    made = Counter(islice(asked.values(), count))
    yield from made.items()
    if count > made.total():
        yield template(), count - made.total()


def planned_nodes(workers: Iterable[tuple[Amounts | None, int]], has: Amounts, least: int) -> int:
    """How many nodes the workers need that jobs have or, by a plan, are to have; one each where nobody knows.

    Args:
        workers: what those of a job ask for, and how many there are.
        has: a node.
        least: the nodes that some of them have, and that others wait for in vain.

    """
    asked = Counter[Amounts | None]()
    for each, count in workers:
        asked[each] += count
    known = {each: count for each, count in asked.items() if each is not None}
    if not has or not known:
        return asked.total()
    return min(asked.total(), max(nodes_for(known, has) + asked[None], least))
