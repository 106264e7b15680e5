"""Nodes that are left to jobs that come later in the order: of those that a job has, its least workers stay its own.

The policy carries out no plan with fewer (`FleetJob.accepts`), whoever is to have the nodes: who plans them for another
job has that one wait for ever. Which of its nodes a job keeps is open until others are planned. Jobs that share nodes
leave each other their shares, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.sizing.fleet.values import FleetJob, FleetPool

__all__ = ["Floors"]


class Floors:
    """The nodes of jobs that are yet to be planned."""

    def __init__(self, jobs: Sequence[FleetJob], pools: Sequence[FleetPool]) -> None:
        self._has: dict[str, Counter[str]] = {}
        self._kept: dict[str, Counter[str]] = {}
        self._total = Counter[str]()
        spot = {pool.name: pool.spot for pool in pools}
        for job in jobs:
            holds = job.holds(job.under_way)
            has = Counter({p: n for p, n in holds.items() if p in job.pools and p in spot})
            base = _first(job.on_demand_base, Counter({p: n for p, n in has.items() if not spot[p]}))
            base = _first(job.floor, base)
            self._has[job.name] = has
            self._kept[job.name] = base + _first(job.floor - base.total(), has - base)
            self._total.update(self._kept[job.name])
        self._shares: dict[str, Counter[str]] = {}
        self._shared = Counter[str]()

    def free(self, sharers: Sequence[FleetJob], left: Mapping[str, int]) -> dict[str, int]:
        """What jobs are to share: all others keep their floors, and the shares that they have."""
        taken = self._total + self._shared
        for job in sharers:
            taken.subtract(self._kept[job.name])
        return {pool: max(number - taken[pool], 0) for pool, number in left.items()}

    def kept(self, job: FleetJob) -> Mapping[str, int]:
        """The nodes that others leave to a job as its least ones."""
        return self._kept[job.name]

    def keep(self, jobs: Sequence[FleetJob], left: Mapping[str, int]) -> None:
        """Have each of these jobs leave the others what they have, as far as that is there."""
        for job in jobs:
            has, free = self._has[job.name], self.free([job], left)
            if all(n <= free.get(pool, 0) for pool, n in has.items()):
                self.share(job, has)

    def share(self, job: FleetJob, counts: Mapping[str, int]) -> None:
        """Have other jobs that share nodes leave these to a job, too."""
        self._shares[job.name] = Counter(counts) - self._kept[job.name]
        self._shared.update(self._shares[job.name])

    def room(self, job: FleetJob, left: Mapping[str, int]) -> dict[str, int]:
        """What is left to a job, whose turn it is: the later ones keep nodes that it cannot use, where they can."""
        self._total.subtract(self._kept.pop(job.name))
        for name, kept in self._kept.items():
            for pool in (pool for pool in job.pools if kept[pool]):
                for other in self._has[name].keys() - set(job.pools):
                    taken = self._total[other] + self._shared[other]
                    free = min(self._has[name][other] - kept[other], left[other] - taken)
                    change = Counter({other: max(min(kept[pool], free), 0)})
                    kept.update(change)
                    self._total.update(change)
                    kept[pool] -= change[other]
                    self._total[pool] -= change[other]
        total = Counter(self._total)
        if (own := self._shares.pop(job.name, None)) is not None:
            self._shared.subtract(own)
            total.update(self._shared)
        return {pool: max(number - total[pool], 0) for pool, number in left.items()}


def _first(number: int, counts: Mapping[str, int]) -> Counter[str]:
    """So many of these nodes."""
    some = Counter[str]()
    for pool, n in counts.items():
        some[pool] = min(n, number - some.total())
    return some
