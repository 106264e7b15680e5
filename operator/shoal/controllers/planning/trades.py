"""Which nodes go from one job to another by a plan: both are to change at the same time. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple


class Trade(NamedTuple):
    """What of a job's plan others give or take."""

    pools: frozenset[str] = frozenset()
    """Pools of which this job gives nodes to others, or gets theirs."""
    higher: bool = False
    """A higher priority gets some of its nodes."""


def trades(
    planned: Mapping[str, Mapping[str, int]],
    held: Mapping[str, Mapping[str, int]],
    limits: Mapping[str, int],
    priorities: Mapping[str, int],
) -> dict[str, Trade]:
    """The trades of the planned jobs, by name.

    Nodes are traded where those that all jobs have or are to have are more than the pool's limit.

    Args:
        planned: nodes by pool that planned jobs are to have.
        held: nodes by pool that any job has.
        limits: of the pools that there are.
        priorities: of planned jobs.

    """
    meanwhile, highest = defaultdict[str, int](int), dict[str, int]()
    for job in planned.keys() | held.keys():
        has, wants = held.get(job, {}), planned.get(job, {})
        for pool in has.keys() | wants.keys():
            meanwhile[pool] += max(has.get(pool, 0), wants.get(pool, 0))
        for pool in (pool for pool, count in wants.items() if count):
            highest[pool] = max(highest.get(pool, priorities[job]), priorities[job])
    found = {}
    for job, wants in planned.items():
        has = held.get(job, {})
        changes = {p: wants.get(p, 0) - has.get(p, 0) for p in has.keys() | wants.keys() if p in limits}
        traded = {pool: by for pool, by in changes.items() if by and meanwhile[pool] > limits[pool]}
        higher = any(by < 0 and highest.get(p, priorities[job]) > priorities[job] for p, by in traded.items())
        found[job] = Trade(frozenset(traded), higher)
    return found
