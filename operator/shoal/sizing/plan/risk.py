"""The probability of meeting a deadline: simulated runs of one plan, with revocations, shocks and uncertain speeds.

The search uses mean and standard deviation. The plan that it finds is checked here against the whole distribution,
which is skewed: a shock that takes half of a pool is rare and expensive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.sizing.plan.elastic import REPLACEMENT_SPREAD
from shoal.sizing.plan.problem import Floats, Pool, Problem
from shoal.sizing.speed.servers import soft_min

__all__ = ["chance", "finish_times", "is_risky"]

RUNS = 4000


def is_risky(problem: Problem, counts: Sequence[int], servers: int) -> bool:
    """Whether the time of this plan is random."""
    return problem.servers.capacity_sigma(servers) > 0 or any(
        n and (pool.interruptions_per_hour > 0 or pool.step_sigma > 0 or pool.lifetimes is not None)
        for pool, n in zip(problem.pools, counts, strict=True)
    )


def chance(problem: Problem, counts: Sequence[int], servers: int) -> float | None:
    """The part of simulated runs of a plan that meet the deadline; None if nothing is random."""
    deadline = problem.objective.deadline
    if deadline is None or not is_risky(problem, counts, servers):
        return None
    return float(np.mean(finish_times(problem, counts, servers) <= deadline))


def finish_times(
    problem: Problem, counts: Sequence[int], servers: int, runs: int = RUNS, seed: int = 0
) -> Floats:
    """(runs,) seconds until the work is done with a fixed plan that replaces lost workers."""
    rng = np.random.default_rng(seed)
    used = [(pool, n) for pool, n in zip(problem.pools, counts, strict=True) if n]
    rates = np.array([n / pool.step_seconds for pool, n in used])
    alone = float(rates.sum())
    ps = problem.servers
    batch = sum(rate * pool.batch for rate, (pool, _) in zip(rates, used, strict=True)) / alone
    steps = problem.work.iterations(np.array([batch]), np.array([float(sum(counts))]))[0]
    ready = ps.wait(servers)
    waits = [
        (max(n - pool.running, 0) * max(pool.startup_seconds, ready) + min(n, pool.running) * ready) / n
        for pool, n in used
    ]
    startup = float(rates @ np.array(waits)) / alone
    sigma = sum(rate * pool.step_sigma for rate, (pool, _) in zip(rates, used, strict=True)) / alone
    speed = alone * np.exp(-sigma * rng.standard_normal(runs))
    if ps.model.update_seconds > 0:
        # Both errors are drawn before the minimum: a busy server hides a slow worker.
        cap = servers**ps.model.scaling / ps.model.update_seconds
        cap = cap * np.exp(-ps.capacity_sigma(servers) * rng.standard_normal(runs))
        speed = soft_min(speed, cap, ps.model.sharpness)
    training = steps / speed * (1 + ps.snapshot_seconds / ps.snapshot_every)
    lost = np.zeros(runs)
    # Lost time prolongs the run, in which more is lost: two rounds are enough for small shares.
    for _ in range(2):
        whole = startup + training + lost
        lost = np.zeros(runs)
        for pool, n in used:
            away = _away(pool, n, whole, rng)
            lost += away / pool.step_seconds / alone
        failures = rng.poisson(servers * ps.interruptions_per_hour * whole / 3600)
        lost += failures * (rng.random(runs) * ps.snapshot_every + ps.recovery_seconds)
    return np.asarray(startup + training + lost)


def _away(pool: Pool, n: int, seconds: Floats, rng: np.random.Generator) -> Floats:
    """(runs,) worker-seconds that a pool's n workers are missing in `seconds` (runs,)."""
    hours = seconds / 3600
    rate = pool.interruptions_per_hour
    if pool.lifetimes is not None:
        lives = pool.lifetimes.sample(n, len(seconds), int(rng.integers(2**31)))
        ended = lives < seconds[:, None]
        count = ended.sum(axis=1)
        # Replacements are lost at the pool's mean rate.
        left = np.where(ended, np.maximum(seconds[:, None] - lives - pool.startup_seconds, 0.0), 0.0).sum(
            axis=1
        )
        count = count + rng.poisson(rate * left / 3600)
    else:
        count = rng.poisson(n * rate * (1 - pool.shock_share) * hours)
        if pool.shock_share > 0 and pool.shock_size > 0:
            shocks = rng.poisson(rate * pool.shock_share / pool.shock_size * hours)
            count = count + rng.binomial(n * shocks, pool.shock_size)
    if pool.startup_seconds <= 0:
        return np.zeros(len(seconds))
    spread = REPLACEMENT_SPREAD**2
    # The sum of equal gamma variables is a gamma variable.
    return np.where(count > 0, rng.gamma(np.maximum(count, 1) / spread, pool.startup_seconds * spread), 0.0)
