"""Which nodes have room for which pods, by what these ask for and those have: pure.

Only Shoal's own pods are seen, so a node may have less; the scheduler has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from shoal.api.amounts import Amounts, fits, left_of
from shoal.api.kube import Node, Pod


def waits(pod: Pod, rooms: Set[Amounts]) -> bool:
    """Whether one more node like those that there are would have it run; `rooms`: what these have for pods."""
    could = not rooms or any(fits(pod.spec.requests, room) for room in rooms)
    return could and pod.waits_for_node(there_are=bool(rooms))


def is_full(node: Node, pods: Iterable[Pod], workers: Set[Amounts]) -> bool:
    """Whether none of the workers, of which each asks for so much, has room beside these pods of the node."""
    left = left_of(node.status.allocatable, (each.spec.requests for each in pods if not each.ended))
    return bool(workers) and not any(fits(asked, left) for asked in workers)
