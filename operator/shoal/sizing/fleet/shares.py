"""Nodes of jobs that are to be fast, and others, where they are too many to trade: so that what each prefers is small.

From what runs, one node at a time goes to who gains most by it, of those that are free, or else from who loses least.
So each job costs about as much however many there are, and nothing moves where all have their shares. A job of which
nothing is known before it runs has the nodes with which it begins.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.availability import Floats as Numbers
from shoal.sizing.fleet.alone import Given
from shoal.sizing.fleet.floors import Floors
from shoal.sizing.fleet.problems import unusable
from shoal.sizing.fleet.traders import MOST_TRADERS
from shoal.sizing.fleet.values import FleetJob
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.problem import Pool, Problem

__all__ = ["Sharer", "Shares", "share"]

WORTH_A_MOVE = 0.1
"""A node leaves one job for another that gains more by this part than that one loses."""
BEHIND, SURE = 10.0, 1.1
"""What is later than its deadline counts so many times more: who can keep it has what it needs first. And so many times
the time that is sure by the means must be left: the simulated runs say more."""
FOR_NOTHING = -50.0
"""The logarithm of a cost that is none, for a second."""

Heap = list[tuple[float, int, int]]


class Shares:
    """Who shares nodes, where jobs are too many to trade, or one waits for its first node.

    Args:
        jobs: all of them, the most urgent first.
        given: what their plans rest on.
        late: the names of those that are late with all nodes, and so are to be as fast as they can.

    """

    def __init__(self, jobs: Sequence[FleetJob], given: Given, late: Container[str]) -> None:
        self._pools = given.pools
        able = [job for job in jobs if not (job.fault or job.is_held)]
        known = {job.name: job for job in able if job.model is not None and job.has_work}
        self._new = [job for job in able if job.name not in known and not sum(job.under_way.values())]
        self._sharers: dict[str, Sharer] = {}
        if len(known) > MOST_TRADERS or self._new:
            found = {name: _sharer(job, given, name in late) for name, job in known.items()}
            self._sharers = {name: each for name, each in found.items() if each is not None}

    def leave(self, priority: int, floors: Floors, left: Mapping[str, int]) -> None:
        """Have jobs of one priority, which come next, leave each other their shares of what is left.

        Where none is to be fast, they take no more than they need.
        """
        sharers = [each for each in self._sharers.values() if each.job.priority == priority]
        if not any(each.is_fast for each in sharers):
            return
        for job in (job for job in self._new if job.priority == priority):
            floors.share(job, self._begins(job, floors.free([], left)))
        shares = share(sharers, floors.free([each.job for each in sharers], left))
        for each in sharers:
            floors.share(each.job, shares[each.job.name])

    def _begins(self, job: FleetJob, free: Mapping[str, int]) -> dict[str, int]:
        """The nodes with which a job begins: in its order of preference."""
        counts, pools = dict[str, int](), {pool.name: pool for pool in self._pools}
        for pool in (pools[name] for name in job.pools if name in pools):
            if unusable(pool, job) is None and not (pool.exhausted or pool.ending):
                counts[pool.name] = min(job.least - sum(counts.values()), free[pool.name], pool.room(0))
        return counts


def _sharer(job: FleetJob, given: Given, late: bool) -> Sharer | None:
    """A job, and what counts for its share; None: there is nothing to plan. What it needs is not known by a guess."""
    try:
        one = given.problem(job, given.limits)
    except UsageError:
        return None
    objective = one.problem.objective
    if late and objective.deadline is not None:
        objective = objective.in_order[1]
    elif not one.measured:
        objective = replace(objective, deadline=None)
    return Sharer(job, replace(one.problem, objective=objective))


class Sharer:
    """A job, and the nodes that it has by the shares so far."""

    def __init__(self, job: FleetJob, problem: Problem) -> None:
        self.job, self.problem = job, problem
        self.pools = tuple(pool.name for pool in problem.pools)
        under_way = [job.under_way.get(pool, 0) for pool in self.pools]
        self.counts: Numbers = np.minimum(under_way, problem.limits).astype(np.float64)
        self.looks = 0
        """How many times what it gains or loses was looked at."""
        self._evaluators = ElasticModel(problem, problem.objective.margin).evaluators()

    @property
    def is_fast(self) -> bool:
        """Whether it is to be so, whatever it needs."""
        return self.problem.objective.prefer != "MinCost"

    @property
    def runs(self) -> bool:
        """Whether it may run what it has."""
        return math.isfinite(float(self._values(self.counts[:, None])[0]))

    def steps(self) -> tuple[Numbers, Numbers]:
        """(k,) what it gains by a node more of each pool, and loses by one less, as logarithms."""
        self.looks += 1
        one = np.eye(len(self.pools))
        now = self.counts[:, None]
        values = self._values(np.concatenate([now, now + one, now - one], axis=1))
        more, less = values[0] - values[1 : 1 + len(one)], values[1 + len(one) :] - values[0]
        limits = np.array(self.problem.limits)
        less[(self.counts < 1) | (self.counts.sum() <= self.job.floor)] = np.inf
        return np.where(self.counts < limits, more, -np.inf), less

    def _values(self, counts: Numbers) -> Numbers:
        """(m,) the logarithm of what is to be small; infinite where the job may not run them."""
        objective = self.problem.objective
        best = np.full(counts.shape[1], np.inf)
        for evaluator in self._evaluators:
            with np.errstate(divide="ignore", invalid="ignore"):
                out = evaluator(np.maximum(counts, 0.0))
                time, cost = np.log(out.seconds), np.log(objective.with_spare_time(out.cost, out.seconds))
                cost = np.where(out.cost > 0, cost, time + FOR_NOTHING)
                value = {"MinTime": time, "MinCost": cost, "BestValue": (time + cost) / 2}[objective.prefer]
                if objective.deadline is not None:
                    behind = SURE * out.sure_seconds / objective.deadline
                    value = value + BEHIND * np.log(np.maximum(behind, 1.0))
            if objective.budget is not None:
                value[out.cost > objective.budget] = np.inf
            best = np.fmin(best, value)
        return best


def share(sharers: Sequence[Sharer], free: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The nodes by pool of each job, by its name; none of those for which there are not enough to run.

    `sharers`: in the order in which they have nodes where there are too few for all. `free`: what all have together.
    """
    return _Sharing(sharers, free).shares()


class _Sharing:
    def __init__(self, sharers: Sequence[Sharer], free: Mapping[str, int]) -> None:
        self._sharers = sharers
        self._free = dict(free)
        self._takers: dict[str, Heap] = {pool: [] for pool in free}
        self._givers: dict[str, Heap] = {pool: [] for pool in free}

    def shares(self) -> dict[str, dict[str, int]]:
        """See `share`."""
        for number in range(len(self._sharers)):
            self._go_on(number)
        self._fit()
        new = [number for number, each in enumerate(self._sharers) if not each.counts.any()]
        for number in sorted(new, key=lambda number: len(self._sharers[number].pools)):
            self._begin(number)
        while self._improved():
            pass
        return {
            each.job.name: {pool: int(n) for pool, n in zip(each.pools, each.counts, strict=True)}
            for each in self._sharers
        }

    def _go_on(self, number: int) -> None:
        """With what it has, if a job can."""
        each = self._sharers[number]
        for pool, n in zip(each.pools, each.counts, strict=True):
            self._free[pool] -= int(n)
        if each.runs:
            self._look(number)
        else:
            self._stop(number)

    def _fit(self) -> None:
        """Those that go on give up what is not there any more: who loses least, or else the last ones all."""
        for pool in self._free:
            while self._free[pool] < 0:
                if (giver := self._giver(pool)) is not None:
                    self._move(giver, pool, -1)
                    continue
                self._stop(max(n for n, each in enumerate(self._sharers) if _has(each, pool)))

    def _begin(self, number: int) -> None:
        """The least that a job can run with, of one pool if that will do, the fastest or cheapest first."""
        each = self._sharers[number]
        order = sorted(each.problem.pools, key=_slow if each.is_fast else _dear)
        several = sorted(order, key=lambda pool: pool.spot) if each.problem.min_on_demand else order
        least = max(each.problem.min_workers, 1)
        any(
            self._got(number, [pool.name for pool in pools], least)
            for pools in (*([p] for p in order), several)
        )

    def _got(self, number: int, pools: Iterable[str], least: int) -> bool:
        """Whether a job gets so many nodes of these pools, with which it can run; else it has none."""
        each = self._sharers[number]
        for pool in pools:
            limit = each.problem.limits[each.pools.index(pool)]
            while each.counts.sum() < least and each.counts[each.pools.index(pool)] < limit:
                if self._free[pool] <= 0:
                    giver = self._giver(pool)
                    if giver is None:
                        break
                    self._move(giver, pool, -1)
                self._add(number, pool, 1)
        if each.counts.any() and each.runs:
            self._look(number)
            return True
        self._stop(number)
        return False

    def _improved(self) -> bool:
        """Whether a node goes to who gains most by it."""
        best, change = 0.0, None
        for pool, free in self._free.items():
            taker = self._top(self._takers[pool])
            if taker is None or -taker[0] <= 0:
                continue
            gain, giver = -taker[0], None
            if free <= 0:
                giver = self._top(self._givers[pool])
                if giver is None or gain <= (1 + WORTH_A_MOVE) * giver[0]:
                    continue
                gain -= giver[0]
            if gain > best:
                best, change = gain, (pool, taker[1], None if giver is None else giver[1])
        if change is None:
            return False
        pool, to, by = change
        if by is not None:
            self._move(by, pool, -1)
        self._move(to, pool, 1)
        return True

    def _giver(self, pool: str) -> int | None:
        """Who loses least by a node of a pool; None: nobody has one to spare."""
        top = self._top(self._givers[pool])
        return None if top is None else top[1]

    def _top(self, heap: Heap) -> tuple[float, int, int] | None:
        while heap and self._sharers[heap[0][1]].looks != heap[0][2]:
            heappop(heap)
        return heap[0] if heap else None

    def _stop(self, number: int) -> None:
        each = self._sharers[number]
        for pool, n in zip(each.pools, each.counts, strict=True):
            self._free[pool] += int(n)
        each.counts = np.zeros_like(each.counts)
        each.looks += 1

    def _move(self, number: int, pool: str, change: int) -> None:
        self._add(number, pool, change)
        self._look(number)

    def _add(self, number: int, pool: str, change: int) -> None:
        each = self._sharers[number]
        each.counts[each.pools.index(pool)] += change
        self._free[pool] -= change

    def _look(self, number: int) -> None:
        """What a job gains and loses by its next steps."""
        each = self._sharers[number]
        more, less = each.steps()
        for pool, gain, loss in zip(each.pools, more, less, strict=True):
            if math.isfinite(gain):
                heappush(self._takers[pool], (-float(gain), number, each.looks))
            if math.isfinite(loss):
                heappush(self._givers[pool], (float(loss), number, each.looks))


def _slow(pool: Pool) -> float:
    return pool.step_seconds / pool.batch


def _dear(pool: Pool) -> float:
    return pool.price / pool.samples_per_second


def _has(each: Sharer, pool: str) -> bool:
    return pool in each.pools and each.counts[each.pools.index(pool)] > 0
