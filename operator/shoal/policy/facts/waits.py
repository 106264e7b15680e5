"""For what a pod without a node waits: the one answer for all who count waits, end them or pay for them. Pure.

What a pod asks for is compared with what nodes have beside Shoal's own pods, the only ones that are seen. A node may
have less; the scheduler has the last word on that, and on nothing else. A pod that waits beside nodes with room for
it, by its own template or since no scheduler looks at it, says nothing of its pool: whoever may create pods would have
all jobs leave the pool, or pay for another node of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from shoal.api.amounts import Amounts, covers, fits, left_of, part_of
from shoal.api.kube import Node, Pod, Taint
from shoal.api.training_job import TrainingJob


class Wait(StrEnum):
    """For what a pod without a node waits; the first that holds."""

    QUEUE = "Queue"  # to be let go: by a queue, or by a gate of its template
    VOLUME = "Volume"  # for a volume that it misses
    SERVER = "Server"  # for a parameter server that it has to be near, and that has no node either
    APART = "Apart"  # for a node without those that its template has it not be beside
    NO_FIT = "NoFit"  # for nothing that one more node like those of its pool would have
    NODE = "Node"  # for one more node


NEEDS_A_NODE = frozenset({Wait.SERVER, Wait.APART, Wait.NO_FIT, Wait.NODE})
"""It may begin on other nodes than those of its pool, if there are none of these to be had."""
ALWAYS = datetime.min.replace(tzinfo=UTC)

_FULL = "Insufficient", "Too many pods"
_BESIDE = "free ports", "anti-affinity", "topology spread"
_NO_ROOM = (*_FULL, *_BESIDE, "taint", "unschedulable")
"""In the scheduler's words, why a node of the right kind does not take a pod: it is full, or new, or about to go, or
has others that the pod, by its own template, is not to be beside."""

LEFT_BY_DAEMONS = 0.5
"""The part of each node that DaemonSets leave to others, at least; of devices, they leave all."""
_LACKS_DEVICE = re.compile(r"Insufficient [^\s,]+/")
"""Of extended resources, whose names have a domain."""


@dataclass(frozen=True)
class Rooms:
    """What the nodes of a pool have for pods."""

    empty: frozenset[Amounts] = frozenset()
    """Without any."""
    left: frozenset[tuple[Amounts, tuple[Taint, ...]]] = frozenset()
    """Beside those that are seen there; with their taints."""
    taken: frozenset[Amounts] = frozenset()
    """What pods ask for that have a node of it, beside whatever else runs on its nodes."""

    @classmethod
    def of(cls, nodes: Iterable[Node], on: Callable[[str], Iterable[Pod]]) -> Rooms:
        """Those of these nodes. `on`: the pods of a node."""
        kinds, taken = set[tuple[Amounts, tuple[Amounts, ...], tuple[Taint, ...]]](), set[Amounts]()
        for node in nodes:  # there may be thousands, most of which are alike
            pods = [each for each in on(node.metadata.name) if not each.ended]
            asked = tuple(each.spec.requests for each in pods)
            kinds.add((node.status.allocatable, asked, node.spec.taints))
            taken.update(asked)
        left = frozenset((left_of(has, asked), taints) for has, asked, taints in kinds)
        return cls(frozenset(has for has, _, _ in kinds), left, frozenset(taken))

    def would_take(self, pod: Pod) -> bool:
        """Whether one of the nodes, if it were empty, would have the pod, as far as is known."""
        return not self.empty or any(fits(pod.spec.requests, room) for room in self.empty)

    def has_none_for(self, pod: Pod) -> bool:
        """Whether one more node like those that there are would have the pod run, and none of them would."""
        asked, words = pod.spec.requests, pod.unschedulable_words
        if not self.would_take(pod):
            return False
        if words and self.empty and not any(each in words for each in _NO_ROOM):
            return False  # it asks for something else that they do not have, nor would one more
        if not any(has and fits(asked, has) and _tolerates(pod, taints) for has, taints in self.left):
            return True
        if not any(each in words for each in _FULL) or kept_apart(pod):
            return False
        # Others than Shoal's have it: daemons of each node, unless it is more than these have.
        small = any(part_of(asked, room) <= LEFT_BY_DAEMONS for room in self.empty)
        proven = small or any(covers(each, asked) for each in self.taken)
        return proven or _LACKS_DEVICE.search(words) is not None


NO_NODES = Rooms()
UNREAD_NODES = Rooms(empty=frozenset({()}))
"""There are some, and what they have is not read."""


def wait_of(pod: Pod, rooms: Rooms = NO_NODES, *, near: bool = True) -> Wait | None:
    """For what a pod waits that has no node; None: it has one, or has ended.

    `rooms`: of its pool. `near`: whether there is a parameter server where the pod may run, as far as it has to.
    """
    if pod.spec.node_name or pod.ended:
        return None
    if pod.queued:
        return Wait.QUEUE
    if pod.misses_volume:
        return Wait.VOLUME
    if not near:
        return Wait.SERVER
    if rooms.has_none_for(pod):
        return Wait.NODE
    return Wait.APART if kept_apart(pod) and rooms.would_take(pod) else Wait.NO_FIT


def kept_apart(pod: Pod) -> bool:
    """Whether the scheduler says that the pod is not to be beside others: it takes a node that they are not on."""
    return any(each in pod.unschedulable_words for each in _BESIDE)


def near_since(job: TrainingJob, pods: Iterable[Pod]) -> datetime | None:
    """Since when the job's workers may have nodes; None: there is no parameter server yet that they have to be near.

    Until then no scheduler binds them, and no autoscaler makes a node for them. `pods`: the job's.
    """
    if job.spec.workers.zone_policy != "Same":
        return ALWAYS
    servers = (
        pod.bound_at
        for pod in pods
        if pod.place and pod.place.role == "ps" and pod.spec.node_name and not pod.ended
    )
    return min((at for at in servers if at is not None), default=None)


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
