"""The scenario of a simulation: one job, one spot and one on-demand pool, a number of workers, a deadline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.plan.cost import money_per_step
from shoal.sizing.plan.problem import Pool, Problem
from shoal.sizing.plan.work import StepWork

__all__ = ["Scenario", "pair_of", "scenario_of"]

ENOUGH = 0.95  # parameter servers are added until this part of the workers' speed is reached


@dataclass(frozen=True)
class Scenario:
    """A job to replay. Work is counted in steps of a spot worker; prices are per hour."""

    problem: Problem
    spot: Pool
    on_demand: Pool
    workers: int
    servers: int
    work: float
    deadline: float

    @property
    def most_spot(self) -> int:
        """The most spot workers, in addition to the permanent on-demand workers."""
        return min(self.workers - self.base, self.spot.nodes)

    @property
    def most_on_demand(self) -> int:
        """The most on-demand workers."""
        return min(self.workers, self.on_demand.nodes)

    @property
    def base(self) -> int:
        """The permanent on-demand workers."""
        return min(self.problem.min_on_demand, self.workers)

    @cached_property
    def speeds(self) -> Floats:
        """(spot + 1, on-demand + 1) steps/s for every number of running workers."""
        spot, own, work = self.spot, self.on_demand, self.problem.work
        x, y = np.meshgrid(np.arange(self.workers + 1.0), np.arange(self.most_on_demand + 1.0), indexing="ij")
        rate_x, rate_y = 1 / spot.step_seconds, 1 / own.step_seconds
        steps = x * rate_x + y * rate_y
        # If the work is in samples, a step with more samples is worth more.
        by_samples = isinstance(work, StepWork) and work.counts_samples(spot.batch)
        worth = x * rate_x + y * rate_y * (own.batch / spot.batch if by_samples else 1.0)
        shared = self.problem.servers.model.limited(steps, self.servers)
        return np.asarray(worth * np.divide(shared, steps, out=np.ones_like(steps), where=steps > 0))

    @cached_property
    def sure_rate(self) -> float:
        """Steps/s of one on-demand worker if all of them run."""
        return float(self.speeds[0, -1]) / self.most_on_demand

    @cached_property
    def prices(self) -> tuple[float, float, float]:
        """Price per second of a spot worker, an on-demand worker, and the parameter servers."""
        servers = self.problem.servers
        return self.spot.price / 3600, self.on_demand.price / 3600, self.servers * servers.price / 3600

    @cached_property
    def crossing(self) -> tuple[float, float]:
        """Price per second of the bytes that a working spot or on-demand worker moves between zones."""
        servers = self.problem.servers
        zone = servers.zone or self.spot.zone
        costs = [
            money_per_step(pool, zone, servers.bytes_per_step) / pool.step_seconds
            for pool in (self.spot, self.on_demand)
        ]
        return costs[0], costs[1]


def scenario_of(problem: Problem, *, workers: int | None = None, slack: float | None = None) -> Scenario:
    """Choose the pools with the most speed for their price; the deadline is that of the problem, or from `slack`.

    `slack` is the deadline as a multiple of the time on on-demand workers only.
    """
    spot, on_demand = pair_of(problem)
    number = min(workers or problem.max_workers or spot.nodes, spot.nodes + on_demand.nodes)
    every = [Scenario(problem, spot, on_demand, number, n, 0.0, 0.0) for n in sorted(problem.servers.counts)]
    enough = ENOUGH * number / spot.step_seconds
    found = next((each for each in every if each.speeds[-1, 0] >= enough), every[-1])
    steps = float(problem.work.iterations(np.array([float(spot.batch)]), np.array([float(number)]))[0])
    if not np.isfinite(steps):
        raise UsageError(
            f"the loss curve has no answer for {number} workers with {spot.batch} samples in a step: choose others"
        )
    ps = problem.servers
    steps *= 1 + ps.snapshot_seconds / ps.snapshot_every
    least = max(on_demand.startup_seconds, ps.startup_seconds) + steps / float(found.speeds[0, -1])
    if slack is not None:
        if not slack >= 1:
            raise UsageError(
                f"--slack must be 1 or more, not {slack:g}: with less, even on-demand nodes are late"
            )
        deadline = slack * least
    elif problem.objective.deadline is not None:
        deadline = problem.objective.deadline
    else:
        raise UsageError(
            "the simulation needs a deadline: set elasticity.objective.deadlineSeconds, --deadline or --slack"
        )
    return replace(found, work=steps, deadline=deadline)


def pair_of(problem: Problem) -> tuple[Pool, Pool]:
    """The spot and the on-demand pool with the lowest price for their speed, in one zone if required."""
    least = max(problem.min_on_demand, 1)
    every = {
        True: [pool for pool in problem.pools if pool.spot and pool.nodes],
        False: [pool for pool in problem.pools if not pool.spot and pool.nodes >= least],
    }
    for spot, pools in every.items():
        if not pools:
            kind = "spot" if spot else "on-demand" if least == 1 else f"on-demand (of {least} nodes or more)"
            raise UsageError(
                f"the simulation needs a spot and an on-demand pool, and no {kind} pool is given: add one"
            )
    home = problem.servers.zone
    pairs = [
        (spot, own)
        for spot in every[True]
        for own in every[False]
        if problem.zone_policy != "Same" or len({spot.zone, own.zone, home or ""} - {""}) <= 1
    ]
    if not pairs:
        raise UsageError(
            "with zonePolicy Same the simulation needs a spot and an on-demand pool in one zone"
            f"{f', that of the parameter servers ({home})' if home else ''}: add one, or choose another zonePolicy"
        )
    return min(pairs, key=lambda pair: [_price(pool) for pool in pair])


def _price(pool: Pool) -> float:
    """Price per speed."""
    return pool.price * pool.step_seconds / pool.batch
