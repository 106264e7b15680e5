"""Which nodes have room for which pods, by what these ask for and those have: pure.

Only Shoal's own pods are seen, so a node may have less; the scheduler has the last word on that, and on nothing else. A
pod that waits beside nodes with room for it, by its own template or since no scheduler looks at it, says nothing of
its pool: whoever may create pods would have all jobs leave the pool, or pay for another node of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from shoal.api.amounts import Amounts, covers, fits, left_of
from shoal.api.kube import Node, Pod, Taint


@dataclass(frozen=True)
class Rooms:
    """What the nodes of a pool have for pods."""

    empty: frozenset[Amounts] = frozenset()
    """Without any."""
    left: frozenset[tuple[Amounts, tuple[Taint, ...]]] = frozenset()
    """Beside those that are seen there; with their taints."""
    workers: frozenset[Amounts] = frozenset()
    """What workers ask for that have a node of it, beside whatever else runs on its nodes."""

    @classmethod
    def of(cls, nodes: Iterable[Node], on: Callable[[str], Iterable[Pod]]) -> Rooms:
        """Those of these nodes. `on`: the pods of a node."""
        kinds, workers = set[tuple[Amounts, tuple[Amounts, ...], tuple[Taint, ...]]](), set[Amounts]()
        for node in nodes:  # there may be thousands, most of which are alike
            pods = [each for each in on(node.metadata.name) if not each.ended]
            asked = tuple(each.spec.requests for each in pods)
            kinds.add((node.status.allocatable, asked, node.spec.taints))
            workers |= {each.spec.requests for each in pods if each.place and each.place.role == "worker"}
        left = frozenset((left_of(has, asked), taints) for has, asked, taints in kinds)
        return cls(frozenset(has for has, _, _ in kinds), left, frozenset(workers))

    def awaited_by(self, pod: Pod) -> bool:
        """Whether one more node like those that there are would have the pod run, and none of them would."""
        asked = pod.spec.requests
        if self.empty and not any(fits(asked, room) for room in self.empty):
            return False
        if not pod.waits_for_node(there_are=bool(self.empty)):
            return False
        if not any(has and fits(asked, has) and _tolerates(pod, taints) for has, taints in self.left):
            return True
        # Others than Shoal's may have them: as many of each as leave room for such a worker on other nodes.
        proven = not self.workers or any(covers(each, asked) for each in self.workers)
        return proven and pod.finds_nodes_full


def _tolerates(pod: Pod, taints: Iterable[Taint]) -> bool:
    """Whether the pod may begin on a node with these taints."""
    return all(
        taint.effect == "PreferNoSchedule" or any(each.tolerates(taint) for each in pod.spec.tolerations)
        for taint in taints
    )


def is_full(node: Node, pods: Iterable[Pod], workers: Set[Amounts]) -> bool:
    """Whether none of the workers, of which each asks for so much, has room beside these pods of the node."""
    left = left_of(node.status.allocatable, (each.spec.requests for each in pods if not each.ended))
    return bool(workers) and not any(fits(asked, left) for asked in workers)
