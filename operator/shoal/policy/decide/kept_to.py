"""Of how many workers a job has the nodes, while pods of others cannot be made, or are there and get no node.

A plan is an intent, and its nodes are the job's: they are bought for it, and no other job plans them. A pod is evidence
that the intent is carried out. While the API server refuses pods (for a quota, a policy, a mistake in the template), or
the job lacks what they need, the intent alone would keep nodes from all other jobs for as long as nobody looks, and one
job in each namespace without quota would keep a pool. So the job then has the nodes of the pods that there are. That is
recorded: it holds, also for the next leader and where the pool has no room to try, until one more pod is there.

Nor is a pod that a queue holds back, that misses its volume or that asks for other labels than its pool's nodes have:
one more of these would stay empty, and whoever may create jobs would buy a shared pool up to its limit. What the job is
kept to is without these, for as long as the scheduler says so; one that waits for a node to come has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from shoal.api.kube import Pod
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import Sighting
from shoal.policy.facts.waits import UNREAD_NODES, Wait, wait_of

if TYPE_CHECKING:
    from shoal.policy.decide.wanted import Wanted

PATIENCE = timedelta(minutes=5)
"""A volume is made within a minute or two, and the scheduler tries each pod again within this time."""
_OTHER_NODES = "match Pod's node affinity", "match node selector"
_OF_A_ZONE = "match pod affinity", "volume node affinity"
"""In the scheduler's words: a pod asks for other nodes than there are; for one in a zone, which may come."""


def kept_to(
    facts: Facts, wanted: Wanted, denied: Iterable[tuple[str, int]], vain: Iterable[tuple[str, int]]
) -> dict[str, int] | None:
    """By pool, of how many workers the job has the nodes; None: of all that are wanted.

    Args:
        facts: of the job.
        wanted: the workers.
        denied: those, with the pools that they are for, whose pods cannot be made, or are likely to be refused.
        vain: those, with the pools where they are, whose pods get no node: see `in_vain`.

    """
    if facts.suspended:
        return _before(facts) or None
    planned, lacks = _planned(wanted), Counter(pool for pool, _ in denied)
    have = pods_by_pool(facts)
    kept = {pool: max(planned[pool] - number, have[pool]) for pool, number in lacks.items() if pool}
    kept = still_kept_to(facts, wanted) | kept
    for pool, index in vain:
        if (home := wanted.homes.get(index)) is not None and home.pool == pool:
            kept[pool] = max(0, kept.get(pool, planned[pool]) - 1)
    return kept or None


def in_vain(facts: Facts) -> set[tuple[str, int]]:
    """The workers, with their pools, that have a pod there that no node of it would take, and none that has one."""
    has, vain = set[tuple[str, int]](), set[tuple[str, int]]()
    for each in (*facts.sightings["worker"], *facts.at_rest.starting.values()):
        if each.home.pool and each.pod is not None and not each.pod.ended:
            (vain if _waits_in_vain(facts, each) else has).add((each.home.pool, each.place.index))
    return vain - has


def _waits_in_vain(facts: Facts, each: Sighting) -> bool:
    pod, slot = each.pod, each.slot
    if pod is None or pod.spec.node_name:
        return False
    wait = facts.wait_of(slot, pod)
    if wait is Wait.QUEUE:
        return True
    other = wait is Wait.NO_FIT and asks_for_others(pod)
    if wait is not Wait.VOLUME and not other:
        return False
    since = facts.asked_since(slot, slot.created_at or facts.now)
    return not facts.timers.pending(since + PATIENCE) and (not other or _shows_its_nodes(facts, slot.pool))


def asks_for_others(pod: Pod) -> bool:
    """Whether the scheduler says that all nodes that there are lack what the pod asks for, such as labels."""
    words = pod.unschedulable_words
    others = any(each in words for each in _OTHER_NODES) and not any(each in words for each in _OF_A_ZONE)
    return others and wait_of(pod, UNREAD_NODES) is Wait.NO_FIT


def _shows_its_nodes(facts: Facts, pool: str) -> bool:
    """Whether the pool has had a node for so long that the scheduler's words, of the whole cluster, are of it, too."""
    labels = facts.seen.pools[pool].spec.node_selector.items()
    return any(
        (since := node.ready_since) is not None and not facts.timers.pending(since + PATIENCE)
        for node in facts.seen.nodes.values()
        if labels <= node.metadata.labels.items()
    )


def still_kept_to(facts: Facts, wanted: Wanted) -> dict[str, int]:
    """What is recorded, where no pod has been made since, and one is wanted."""
    have, planned = pods_by_pool(facts), _planned(wanted)
    before = _before(facts).items()
    return {pool: number for pool, number in before if have[pool] <= number and have[pool] < planned[pool]}


def _before(facts: Facts) -> dict[str, int]:
    known = facts.job.status.plan
    return known.kept_to or {} if known is not None else {}


def _planned(wanted: Wanted) -> Counter[str]:
    return Counter(home.pool for home in wanted.homes.values())


def pods_by_pool(facts: Facts) -> Counter[str]:
    """How many workers of each pool have a pod that has not ended."""
    have = Counter(each.home.pool for each in facts.sightings["worker"] if each.pod and not each.pod.ended)
    for home, number in facts.at_rest.living.items():
        have[home.pool] += number
    return have
