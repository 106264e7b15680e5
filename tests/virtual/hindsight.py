"""What a hidden truth would have cost those who knew it, and a published policy: by the library's simulation.

Both know every speed from the beginning. The best in hindsight is the cheapest fixed number of workers of each pool
(spot nodes as far as there are any) that is in time: each job's, one after another in the best of their orders, from
the nodes that those before it leave; or, of a single job, what the best of the library's policies paid, if less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from shoal.sizing.availability import Floats
from shoal.sizing.availability import Supply as Drawn
from shoal.sizing.plan.engine import BEYOND, STEPS, Engine
from shoal.sizing.plan.problem import Objective, Pool, Problem
from shoal.sizing.plan.work import StepWork
from shoal.sizing.simulate.policies import Hindsight as Knowing
from shoal.sizing.simulate.policies import Policy, SpotOnly, UniformProgress
from shoal.sizing.simulate.replay import Replayed, Supply, replay, step_of
from shoal.sizing.simulate.scenario import Scenario as Replay
from tests.virtual.hidden import HiddenJob, HiddenPool, Scenario

MOST_ORDERS = 6
LATE = 10.0
"""Seconds that are needed after the last step."""


@dataclass(frozen=True)
class _Recorded:
    """Given windows of a trace, one a run: `nodes` and `lost` are (runs, steps), of a pool of `size` nodes."""

    nodes: Floats
    lost: Floats
    size: float

    @property
    def mean(self) -> float:
        """The mean part that was there."""
        return min(float(self.nodes.mean()) / self.size, 1.0)

    def supply(self, rng: np.random.Generator, runs: int, steps: int, step: float, limit: int) -> Drawn:
        """The windows themselves."""
        lost = self.lost / self.size
        return Drawn(np.minimum(self.nodes / self.size, 1.0), lost, np.zeros_like(lost))


def best_in_hindsight(scenario: Scenario) -> float:
    """The cost of the best."""
    orders = list(permutations(scenario.jobs))[:MOST_ORDERS]
    found = [cost for order in orders if (cost := _one_after_another(scenario, order)) is not None]
    if len(scenario.jobs) == 1:
        found += [cost for cost, kept in _policies(scenario, scenario.jobs[0]) if kept]
    assert found, f"seed {scenario.seed}: nothing is in time"
    return min(found)


def uniform_progress(scenario: Scenario) -> tuple[float, int]:
    """The cost of uniform progress on the user's first choice of pools, and how many of its jobs were late."""
    runs = [(job, _replayed(scenario, job, _pairs(scenario)[0], UniformProgress())) for job in scenario.jobs]
    late = sum(bool(run.finish[0] > job.deadline - LATE) for job, run in runs)
    return sum(float(run.cost[0]) for _, run in runs), late


@dataclass(frozen=True)
class _Use:
    """A job has so many nodes of a pool for a time."""

    pool: str
    nodes: int
    begin: float
    end: float


def _one_after_another(scenario: Scenario, order: Sequence[HiddenJob]) -> float | None:
    """Each job takes the cheapest choice that is in time, of what those before it left. None: one is late."""
    total, used = 0.0, list[_Use]()
    for job in order:
        pools = [_pool(job, pool, used) for pool in scenario.pools]
        deadline = job.deadline - LATE
        objective = Objective(deadline=deadline)
        engine = Engine(
            Problem(pools, StepWork(samples=job.samples), objective=objective), BEYOND * deadline, runs=1
        )
        choices = product(*(range(min(pool.limit, job.workers) + 1) for pool in pools))
        allowed = [counts for counts in choices if 0 < sum(counts) <= job.workers]
        runs = [(engine.run(counts, 1, ""), counts) for counts in allowed]
        in_time = [
            (float(run.cost[0]), float(run.finish[0]), counts)
            for run, counts in runs
            if run.finish[0] <= deadline
        ]
        if not in_time:
            return None
        cost, finish, chosen = min(in_time)
        total += cost
        end = job.begins_at + finish
        used += [_Use(pool.name, n, job.begins_at, end) for pool, n in zip(pools, chosen, strict=True) if n]
    return total


def _pool(job: HiddenJob, pool: HiddenPool, used: Sequence[_Use] = ()) -> Pool:
    step = BEYOND * (job.deadline - LATE) / STEPS
    nodes, lost = _supply(job, pool, step, STEPS, used)
    return Pool(
        pool.name,
        pool.limit,
        pool.price,
        job.seconds[pool.accelerator],
        job.batch,
        spot=pool.spot,
        startup_seconds=pool.boot + pool.pull,
        availability=_Recorded(nodes[None, :], lost[None, :], pool.limit),
    )


def _supply(
    job: HiddenJob, pool: HiddenPool, step: float, steps: int, used: Sequence[_Use] = ()
) -> tuple[Floats, Floats]:
    """Nodes at the end of each interval from the job's begin on, and those that were taken in it."""
    edges = job.begins_at + step * np.arange(steps + 1)
    others = [use for use in used if use.pool == pool.name]
    there = np.array(
        [
            float(max(pool.nodes_at(at) - sum(use.nodes for use in others if use.begin <= at < use.end), 0))
            for at in edges
        ]
    )
    lost = np.maximum(there[:-1] - there[1:], 0.0)
    single, _ = np.histogram([at for at, _ in pool.losses], edges)
    return there[1:], np.minimum(lost + single, there[:-1])


def _pairs(scenario: Scenario) -> list[tuple[HiddenPool, HiddenPool]]:
    return [(spot, own) for spot in scenario.pools if spot.spot for own in scenario.pools if not own.spot]


def _policies(scenario: Scenario, job: HiddenJob) -> list[tuple[float, bool]]:
    """Cost, and whether it was in time, of policies on each pair of pools; one of them knows the future."""
    found = []
    for pair in _pairs(scenario):
        spot = _replayed(scenario, job, pair, SpotOnly(), on=True)
        missing = np.maximum(_replay(scenario, job, pair).work - spot.by_deadline, 0.0)
        runs = spot, _replayed(scenario, job, pair, Knowing(missing))
        found += [(float(run.cost[0]), bool(run.finish[0] <= job.deadline - LATE)) for run in runs]
    return found


def _replay(scenario: Scenario, job: HiddenJob, pair: tuple[HiddenPool, HiddenPool]) -> Replay:
    """The job on two pools, of which it has its part."""
    share = len(scenario.jobs)
    spot, own = (
        replace(_pool(job, pool), limit=max(round(pool.limit / share), 1) if pool.spot else job.workers)
        for pool in pair
    )
    deadline = job.deadline - LATE
    problem = Problem((spot, own), StepWork(samples=job.samples), objective=Objective(deadline=deadline))
    return Replay(problem, spot, own, job.workers, 1, job.samples / job.batch, deadline)


def _replayed(
    scenario: Scenario,
    job: HiddenJob,
    pair: tuple[HiddenPool, HiddenPool],
    policy: Policy,
    *,
    on: bool = False,
) -> Replayed:
    what = _replay(scenario, job, pair)
    step = step_of(what)
    nodes, lost = _supply(job, pair[0], step, int(4 * what.deadline / step))
    part = what.spot.limit / pair[0].limit
    there, gone = (np.floor(each * part + 1e-9).astype(np.int64)[None, :] for each in (nodes, lost))
    first = np.zeros(1, dtype=np.int64)
    source = Supply(there, gone, np.array([there.shape[1]]), first, first)
    return replay(what, policy, source, on=on)
