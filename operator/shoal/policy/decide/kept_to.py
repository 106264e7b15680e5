"""Of how many workers a job has the nodes, while pods of others cannot be made.

A plan is an intent, and its nodes are the job's: they are bought for it, and no other job plans them. A pod is evidence
that the intent is carried out. While the API server refuses pods (for a quota, a policy, a mistake in the template), or
the job lacks what they need, the intent alone would keep nodes from all other jobs for as long as nobody looks, and one
job in each namespace without quota would keep a pool. So the job then has the nodes of the pods that there are. That is
recorded: it holds, also for the next leader and where the pool has no room to try, until one more pod is there.

Pods that are there, and get no node, show that pods are not refused. They are counted by themselves (`Facts.in_vain`),
and taken off the pods that there are. Workers that move are tried few at a time: where none of these may begin, as a
queue holds them back, the pods of the others are not made as long as that lasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.policy.facts.in_vain import PATIENCE
from shoal.policy.facts.read import Facts

if TYPE_CHECKING:
    from shoal.policy.decide.wanted import Wanted


def kept_to(facts: Facts, wanted: Wanted, denied: Iterable[tuple[str, int]]) -> dict[str, int] | None:
    """By pool, how many workers have pods, or may have; None: all that are wanted.

    `denied`: those, with the pools that they are for, whose pods cannot be made, or are likely to be refused.
    """
    if facts.suspended:
        return _before(facts) or None
    planned, lacks = _planned(wanted), Counter(pool for pool, _ in denied)
    have = pods_by_pool(facts)
    kept = {pool: max(planned[pool] - number, have[pool]) for pool, number in lacks.items() if pool}
    return still_kept_to(facts, wanted) | kept or None


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


def closed_pools(facts: Facts) -> set[str]:
    """The pools in which all workers that have pods wait in vain, and one for so long that the next would, too."""
    vain = facts.in_vain.items()
    late = {
        pool
        for (pool, _), slot in vain
        if not facts.timers.pending((slot.created_at or facts.now) + PATIENCE)
    }
    have = pods_by_pool(facts) if late else Counter[str]()
    return {pool for pool in late if have[pool] == sum(each == pool for (each, _), _ in vain)}


def pods_by_pool(facts: Facts) -> Counter[str]:
    """How many workers of each pool have a pod that has not ended."""
    have = Counter(each.home.pool for each in facts.sightings["worker"] if each.pod and not each.pod.ended)
    for home, number in facts.at_rest.living.items():
        have[home.pool] += number
    return have
