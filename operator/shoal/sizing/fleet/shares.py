"""Nodes of jobs that have no deadline to keep, where they are too many to trade: so that what each prefers is small.

They share what those with a deadline leave, which come before them. From what runs, one node at a time goes to who
gains most by it, of those that are free, or else from who loses least. So each job costs about as much however many
there are, and nothing moves where all have their shares. A job of which nothing is known before it runs has the nodes
with which it begins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
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
from shoal.sizing.plan.problem import Objective, Pool, Problem

__all__ = ["Sharer", "Shares", "share"]

WORTH_A_MOVE = 0.1
"""A node leaves one job for another that gains more by this part than that one loses."""
FOR_NOTHING = -50.0
"""The logarithm of a cost that is none, for a second."""

Heap = list[tuple[float, int, int]]


class Shares:
    """Who shares nodes, where jobs are too many to trade, or one waits for its first node.

    Args:
        jobs: all of them, the most urgent first.
        given: what their plans rest on.
        last: the names of those that have no deadline to keep, and so come after all others of their priority.
        late: those of them that are late with all nodes, and so are to be as fast as they can.

    """

    def __init__(
        self, jobs: Sequence[FleetJob], given: Given, last: Container[str], late: Container[str]
    ) -> None:
        self._given, self._late = given, late
        able = [job for job in jobs if not (job.fault or job.is_held)]
        known = [job for job in able if job.model is not None and job.has_work]
        names = {job.name for job in known}
        self._new = [job for job in able if job.name not in names and not sum(job.under_way.values())]
        many = len(known) > MOST_TRADERS or self._new
        self._next = [job for job in known if job.name in last] if many else []

    def leave(self, job: FleetJob, floors: Floors, left: Mapping[str, int]) -> None:
        """Have a job, which comes next, and those like it of its priority leave each other shares of what is left.

        Where none is to be fast, they take no more than they need.
        """
        if not any(each.name == job.name for each in self._next):
            return
        now = [each for each in self._next if each.priority == job.priority]
        self._next = [each for each in self._next if each.priority != job.priority]
        found = [_sharer(each, self._given, each.name in self._late, floors) for each in now]
        sharers = [each for each in found if each is not None]
        if not any(each.is_fast for each in sharers):
            return
        for new in (each for each in self._new if each.priority == job.priority):
            floors.share(new, self._begins(new, floors.free([], left)))
        shares = share(sharers, floors.free([each.job for each in sharers], left))
        for each in sharers:
            floors.share(each.job, shares[each.job.name])

    def _begins(self, job: FleetJob, free: Mapping[str, int]) -> dict[str, int]:
        """The nodes with which a job begins: in its order of preference."""
        counts, pools = dict[str, int](), {pool.name: pool for pool in self._given.pools}
        for pool in (pools[name] for name in job.pools if name in pools):
            if unusable(pool, job) is None and not (pool.exhausted or pool.ending):
                counts[pool.name] = min(job.least - sum(counts.values()), free[pool.name], pool.room(0))
        return counts


def _sharer(job: FleetJob, given: Given, late: bool, floors: Floors) -> Sharer | None:
    """A job, and what counts for its share; None: there is nothing to plan. What it needs is not known by a guess."""
    try:
        one = given.problem(job, given.limits)
    except UsageError:
        return None
    objective = one.problem.objective
    if objective.deadline is not None:
        objective = objective.in_order[1] if late else replace(objective, deadline=None)
    return Sharer(job, replace(one.problem, objective=objective), floors.kept(job))


class Sharer:
    """A job, and the nodes that it has by the shares so far."""

    def __init__(self, job: FleetJob, problem: Problem, kept: Mapping[str, int]) -> None:
        self.job, self.problem = job, problem
        self.aim = problem.objective
        """What is to be small, and what may be spent: as its plan has it where nothing keeps the budget."""
        self.pools = tuple(pool.name for pool in problem.pools)
        under_way = [job.under_way.get(pool, 0) for pool in self.pools]
        self.counts: Numbers = np.minimum(under_way, problem.limits).astype(np.float64)
        self.own: Numbers = np.minimum([kept.get(pool, 0) for pool in self.pools], self.counts)
        """What it keeps of them, whoever wants it: its least workers."""
        self.looks = 0
        """How many times what it gains or loses was looked at."""
        self._evaluators = ElasticModel(problem, problem.objective.margin).evaluators()

    @property
    def is_fast(self) -> bool:
        """Whether it is to be so, whatever it needs."""
        return self.problem.objective.prefer != "MinCost"

    @property
    def zones(self) -> Sequence[str]:
        """Those in one of which all of it is to be, and where it may begin; none: it may be anywhere."""
        if self.problem.zone_policy != "Same" or self.problem.servers.zone is not None:
            return ()
        return list(dict.fromkeys(pool.zone for pool in self.problem.pools if pool.zone))

    def runs(self, *aims: Objective) -> bool:
        """Whether it may run what it has, by the first of these aims by which it may."""
        for aim in aims or self.problem.objective.in_order:
            self.aim = aim
            if math.isfinite(float(self._values(self.counts[:, None])[0])):
                return True
        return False

    def steps(self) -> tuple[Numbers, Numbers]:
        """(k,) what it gains by a node more of each pool, and loses by one less, as logarithms."""
        self.looks += 1
        one = np.eye(len(self.pools))
        now = self.counts[:, None]
        values = self._values(np.concatenate([now, now + one, now - one], axis=1))
        more, less = values[0] - values[1 : 1 + len(one)], values[1 + len(one) :] - values[0]
        limits = np.array(self.problem.limits)
        less[self.counts <= self.own] = np.inf
        return np.where(self.counts < limits, more, -np.inf), less

    def _values(self, counts: Numbers) -> Numbers:
        """(m,) the logarithm of what is to be small; infinite where the job may not run them."""
        objective = self.aim
        best = np.full(counts.shape[1], np.inf)
        for evaluator in self._evaluators:
            with np.errstate(divide="ignore", invalid="ignore"):
                out = evaluator(np.maximum(counts, 0.0))
                time, cost = np.log(out.seconds), np.log(objective.with_spare_time(out.cost, out.seconds))
                cost = np.where(out.cost > 0, cost, time + FOR_NOTHING)
                value = {"MinTime": time, "MinCost": cost, "BestValue": (time + cost) / 2}[objective.prefer]
            if objective.budget is not None:
                value[out.cost > objective.budget] = np.inf
            best = np.fmin(best, value)
        return best


def share(sharers: Sequence[Sharer], free: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The nodes by pool of each job, by its name; none of those for which there are not enough to run.

    Whoever has nodes keeps its least ones. `sharers`: in the order in which they have nodes where there are too few for
    all. `free`: what all have together.
    """
    return _Sharing(sharers, free).shares()


class _Sharing:
    def __init__(self, sharers: Sequence[Sharer], free: Mapping[str, int]) -> None:
        self._sharers = sharers
        self._free = dict(free)
        self._there = dict(free)
        self._new: list[int] = []
        self._begun = Counter[str]()  # those that can't leave their zone any more, by zone
        self._takers: dict[str, Heap] = {pool: [] for pool in free}
        self._givers: dict[str, Heap] = {pool: [] for pool in free}

    def shares(self) -> dict[str, dict[str, int]]:
        """See `share`."""
        for number in range(len(self._sharers)):
            self._go_on(number)
        self._fit()
        for number in sorted(self._new, key=lambda number: len(self._sharers[number].pools)):
            self._begin(number)
        while self._improved():
            pass
        return {
            each.job.name: {pool: int(n) for pool, n in zip(each.pools, each.counts, strict=True)}
            for each in self._sharers
        }

    def _go_on(self, number: int) -> None:
        """With what it has, if a job can; or else it keeps its least ones, and begins with them and others."""
        each = self._sharers[number]
        runs = each.runs()
        if not runs:
            each.counts = each.own.copy()
            self._new.append(number)
        self._give(each, -each.counts)
        if runs:
            self._is_there(number)

    def _fit(self) -> None:
        """Those that go on give up what is not there any more: who loses least. All keep their least ones."""
        for pool in self._free:
            while self._free[pool] < 0 and (giver := self._giver(pool)) is not None:
                self._move(giver, pool, -1)
            self._free[pool] = max(self._free[pool], 0)

    def _begin(self, number: int) -> None:
        """The least that a job can run with, of one pool if that will do, the fastest or cheapest first."""
        each = self._sharers[number]
        order = sorted(each.problem.pools, key=self._slow_in_zone(each) if each.is_fast else _dear)
        several = sorted(order, key=lambda pool: pool.spot) if each.problem.min_on_demand else order
        any(
            self._got(number, pools, aim)
            for aim in each.problem.objective.in_order
            for pools in (*([pool] for pool in order), several)
        )

    def _slow_in_zone(self, each: Sharer) -> Callable[[Pool], float]:
        """How slow a job is in a pool: where it can't leave the zone, with its part of all nodes there."""
        parts = {
            zone: sum(self._there[pool.name] for pool in each.problem.pools if pool.zone in {"", zone})
            / (1 + self._begun[zone])
            for zone in each.zones
        }
        most = each.job.max_workers
        return lambda pool: _slow(pool) / max(min(parts.get(pool.zone, most), most), 1e-9)

    def _got(self, number: int, pools: Sequence[Pool], aim: Objective) -> bool:
        """Whether a job gets so many nodes of these pools, with which it can run; else it has its own."""
        each = self._sharers[number]
        least = max(each.problem.min_workers, 1)
        for at, pool in ((each.pools.index(pool.name), pool.name) for pool in pools):
            while each.counts.sum() < least and each.counts[at] < each.problem.limits[at]:
                if self._free[pool] <= 0:
                    giver = self._giver(pool)
                    if giver is None:
                        break
                    self._move(giver, pool, -1)
                self._add(number, pool, 1)
        if each.counts.any() and each.runs(aim):
            self._is_there(number)
            return True
        self._give(each, each.counts - each.own)
        each.counts = each.own.copy()
        return False

    def _is_there(self, number: int) -> None:
        each = self._sharers[number]
        at = {pool.zone for pool, n in zip(each.problem.pools, each.counts, strict=True) if n}
        self._begun.update(at.intersection(each.zones))
        self._look(number)

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

    def _give(self, each: Sharer, counts: Numbers) -> None:
        """So many nodes of a job's pools are free; or not, below 0."""
        for pool, n in zip(each.pools, counts, strict=True):
            self._free[pool] += int(n)

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
