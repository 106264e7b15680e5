"""What is wrong with a pool: its description, or that its nodes are not as it says. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from shoal.api.amounts import NVIDIA
from shoal.api.base import Reason
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_status import LACKS_ACCELERATOR
from shoal.api.kube import Node, Pod
from shoal.controllers.capacitypool import stock
from shoal.controllers.capacitypool.counted import sums_of
from shoal.controllers.capacitypool.needed import labels_of_all
from shoal.manifests.pods import GPU
from shoal.policy.facts.waits import Wait
from shoal.sizing.accelerators import catalogue

_LACKS, _LACKS_GPU = "Insufficient ", re.compile(rf"Insufficient {re.escape(GPU)}(?!\.?[\w/-])")
"""In the scheduler's words: of all resources, and of this one, whose name others may begin with."""
_OF_MACHINES = frozenset({"kubernetes.io/arch", "kubernetes.io/os"})
"""Labels that an image needs, and all nodes of a pool have alike."""


def problem_of(
    pool: CapacityPool,
    nodes: Iterable[Node],
    now: datetime,
    *,
    trains: bool,
    waits_since: datetime | None = None,
) -> Reason | None:
    """What is wrong, and what to change.

    `nodes`: of the pool; `trains`: one of them has a worker. `waits_since`: see `wants_gpus_since`.
    """
    spec = pool.spec
    if not spec.node_selector:
        return Reason(
            "NoNodeSelector", "no node is in this pool: set spec.nodeSelector to the labels of its nodes"
        )
    if spec.accelerator is not None and not catalogue().knows(spec.accelerator.name):
        names = ", ".join(catalogue().names)
        words = (
            f"no speed can be predicted: {spec.accelerator.name} is none of the known accelerators, {names}"
        )
        return Reason("UnknownAccelerator", words)
    count = spec.accelerator.count if spec.accelerator is not None else 0
    if count and not trains and _lack(pool, count, nodes, now, waits_since):
        words = (
            f"no node of this pool has {count} {GPU} to give, so no plan uses it: see that the driver "
            "and the device plugin run on them, or correct spec.accelerator.count"
        )
        return Reason(LACKS_ACCELERATOR, words)
    if spec.price is None:
        return Reason(
            "NoPrice", "no plan uses this pool, since its cost is not known: set spec.price.perHour"
        )
    return None


def wants_gpus_since(
    pool: CapacityPool, needs: Iterable[tuple[Pod, datetime, Wait | None]]
) -> datetime | None:
    """Since when pods wait that a node of the pool lacks nothing but its accelerators for.

    Another one, which is as the pool says, would have come for them, and taken them. What waits for anything else, or
    picks nodes by more than the pool does, says nothing of the nodes: whoever may create jobs would switch off a pool
    of which one node has failed. `needs`: its pods without a node, since when they wait, and for what.
    """
    picks = labels_of_all(pool) | _OF_MACHINES
    count = pool.spec.accelerator.count if pool.spec.accelerator is not None else 0
    lacks = (
        since
        for pod, since, wait in needs
        if wait is not Wait.SERVER
        and 0 < dict(pod.spec.requests).get(GPU, 0.0) <= count
        and 0 < pod.unschedulable_words.count(_LACKS) == len(_LACKS_GPU.findall(pod.unschedulable_words))
        and picks.issuperset(pod.spec.picks_by)
    )
    return min(lacks, default=None)


def _lack(
    pool: CapacityPool, count: int, nodes: Iterable[Node], now: datetime, waits_since: datetime | None
) -> bool:
    """Whether all nodes have been Ready for longer than the patience with them, and none has so many accelerators.

    One of them may have failed by itself, and the next be good: it shows nothing of the pool unless it is all that the
    pool may have, or none has come for a worker that has waited for as long.

    Once told, it holds for nodes that are new, too; and while there are none, for as long as a pool is out of nodes at
    most: its autoscaler takes idle ones away, and would make them again in turns.
    """
    status = pool.status
    same = status.observed_generation == pool.metadata.generation
    told = status.lacks_accelerator if same else None
    ready = [(node.ready_since, node.status.allocatable) for node in nodes if node.status.allocatable]
    since = [at for at, _ in ready if at is not None]
    if not since:
        return told is not None and now - told.last_transition_time < stock.LONGEST
    for at, has in ready:
        parts = any(name.startswith(NVIDIA) and name != GPU and amount > 0 for name, amount in has)
        if at is not None and (parts or dict(has).get(GPU, 0.0) >= count):
            return False  # as parts of GPUs, which a job's template asks for
    patience = stock.patience_after(float(pool.spec.startup_seconds), sums_of(status))
    if told is not None:
        return True
    waited = waits_since is not None and (now - waits_since).total_seconds() > patience
    enough = len(since) >= min(2, pool.spec.limits.nodes)
    return (enough or waited) and (now - max(since)).total_seconds() > patience
