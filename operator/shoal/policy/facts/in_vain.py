"""Workers whose pods are there and get no node of their pool, however many more of these came: they wait in vain.

A pod that a queue holds back, that misses its volume, whose scheduler is not there, or that asks for other labels than
its pool's nodes have, or more: one more of these would stay empty, and whoever may create jobs would buy a shared pool
up to its limit. One that waits for a node to come does not wait in vain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from shoal.api.amounts import Amounts, fits
from shoal.api.kube import DEFAULT_SCHEDULER, Node, Pod
from shoal.api.training_job_status import Slot

if TYPE_CHECKING:
    from shoal.policy.facts.read import Facts

OF_THE_SYSTEM = 1.0
"""Cores of a node that its system may keep for itself."""
PATIENCE = timedelta(minutes=5)
"""A volume is made within a minute or two, and the scheduler tries each pod again within this time."""
_LACKS = "Insufficient "
_OF_NODES = re.compile(r"\b0/(\d+) nodes are available")
_OTHER_NODES = re.compile(r"(\d+) node\(s\) didn't match (?:Pod's node affinity|node selector)")
"""In the scheduler's words: a pod asks for more than is left; of how many nodes; and how many are not as it asks."""


def in_vain(facts: Facts) -> dict[tuple[str, int], Slot]:
    """The workers, with their pools, that have a pod there that no node of it would take, and none that has one."""
    has, vain, waits = set[tuple[str, int]](), dict[tuple[str, int], Slot](), _Waits(facts)
    for each in (*facts.sightings["worker"], *facts.at_rest.starting.values()):
        if each.home.pool and each.pod is not None and not each.pod.ended:
            worker = each.home.pool, each.place.index
            if waits.are_in_vain(each.slot, each.pod):
                vain[worker] = each.slot
            else:
                has.add(worker)
    return {worker: slot for worker, slot in vain.items() if worker not in has}


class _Waits:
    """What is asked of the nodes of a pool is asked once for all pods that are alike."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._known: dict[tuple[str, Amounts | None], bool] = {}
        self._avoided = {each.node for each in facts.job.status.excluded_nodes}
        """They say nothing of the pool: its next node would take the pod."""

    def are_in_vain(self, slot: Slot, pod: Pod) -> bool:
        """Whether the pod has no node and, as far as is seen, never will. Most that wait are told by their words."""
        if pod.spec.node_name:
            return False
        if pod.queued:
            return True
        facts, volume, large = self._facts, pod.misses_volume, _LACKS in pod.unschedulable_words
        unseen = pod.condition("PodScheduled") is None and pod.spec.scheduler_name not in self._schedulers
        if not (volume or large or unseen or asks_for_others(pod)):
            return False
        # A server that is lost meanwhile is no reason to wait anew: the scheduler looks at labels and room first.
        if facts.timers.pending((slot.created_at or facts.now) + PATIENCE):
            return False
        if volume:
            return True
        alike = slot.pool, pod.spec.requests if large else None
        if alike not in self._known:
            self._known[alike] = self._shows_a_node(slot.pool) and (
                not large or self._has_none_for(slot.pool, pod.spec.requests)
            )
        return self._known[alike]

    @cached_property
    def _schedulers(self) -> set[str]:
        """Those that are there, as far as is seen: where they are behind, they will look at the pod."""
        looked_at = (
            pod
            for pod in self._facts.seen.pods
            if pod.spec.node_name or (pod.unschedulable_words and not pod.queued)
        )
        return {DEFAULT_SCHEDULER, *(pod.spec.scheduler_name for pod in looked_at)}

    def _shows_a_node(self, pool: str) -> bool:
        """Whether it has had one for so long that the scheduler's words, of the whole cluster, are of it, too."""
        ready = (node.ready_since for node in self._nodes(pool))
        return any(at is not None and not self._facts.timers.pending(at + PATIENCE) for at in ready)

    def _has_none_for(self, pool: str, asked: Amounts) -> bool:
        """Whether none would take such a pod if it were empty, nor one with the cores that the pool says.

        What a node has nothing of, its driver may bring.
        """
        kinds = {node.status.allocatable for node in self._nodes(pool)}
        cores = self._facts.seen.pools[pool].spec.cores or 0.0
        if cores > max(dict(has).get("cpu", 0.0) for has in kinds) + OF_THE_SYSTEM:  # larger ones are to come
            kinds.add((("cpu", cores),))
        return not any(_may_fit(asked, has) for has in kinds)

    def _nodes(self, pool: str) -> Iterator[Node]:
        known = self._facts.seen.pools.get(pool)
        if known is None or not known.status.nodes:
            return iter(())
        labels, avoided = known.spec.node_selector.items(), self._avoided
        return (
            node
            for node in self._facts.seen.nodes.values()
            if labels <= node.metadata.labels.items() and node.metadata.name not in avoided
        )


def _may_fit(asked: Amounts, has: Amounts) -> bool:
    named = {name for name, amount in has if amount or "/" not in name}  # no driver brings huge pages
    return fits(tuple(each for each in asked if each[0] in named), has)


def asks_for_others(pod: Pod) -> bool:
    """Whether the scheduler says of each node that there is that it is not as the pod asks, by its labels.

    Said of some, it is of others' nodes, and those of the pool may be full.
    """
    words = pod.unschedulable_words
    of = _OF_NODES.search(words)
    return of is not None and sum(map(int, _OTHER_NODES.findall(words))) == int(of[1]) > 0
