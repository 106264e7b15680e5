"""How fast a job's workers are now, beside what its profile says: what was measured last week may not hold today.

A neighbour on the machine, a slower input or a changed function of the user make a job slower, or faster, than all its
measurements so far. Before they have moved the profile, hours later, the deadline is lost. So what the workers do now
corrects the speed of the whole job, of its workers in every pool and of its servers: what slows one mostly slows all,
and a cluster whose servers are the limit gets no faster by more workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shoal.sizing.plan.problem import Problem
from shoal.sizing.speed.servers import soft_min

__all__ = ["Speeds", "at_present_pace", "prediction_error", "samples_per_second"]

Speeds = Mapping[str, Sequence[float]]
"""Samples/s of single workers now, by pool."""

VARIES, NOISE = 0.2, 0.07
"""Standard deviations of the log of a speed: between jobs of one model, and of one reading of a job's workers."""
LEAST, MOST = 1 / 3, 3.0
"""A reading beyond these is taken for a fault of the measurement."""
TOLD = 0.1


def samples_per_second(problem: Problem, counts: Sequence[int], servers: int | None = None) -> float:
    """Samples a second of these workers, all of them at work."""
    pairs = list(zip(problem.pools, counts, strict=True))
    alone = sum(n / pool.step_seconds for pool, n in pairs)
    samples = sum(n * pool.batch / pool.step_seconds for pool, n in pairs)
    ps, number = problem.servers, servers or problem.servers.counts[0]
    if alone <= 0 or ps.model.update_seconds <= 0:
        return samples
    cap = number**ps.model.scaling / ps.model.update_seconds
    return samples * float(soft_min(np.array([alone]), cap, ps.model.sharpness)[0]) / alone


def prediction_error(problem: Problem, now: Speeds) -> float | None:
    """Predicted over measured speed of the workers that are measured, less 1; None: none is."""
    counts = [len(now.get(pool.name, ())) for pool in problem.pools]
    measured = sum(sum(now.get(pool.name, ())) for pool in problem.pools)
    if measured <= 0:
        return None
    running = [max(pool.running, n) for pool, n in zip(problem.pools, counts, strict=True)]
    everyone = sum(n * pool.batch / pool.step_seconds for pool, n in zip(problem.pools, running, strict=True))
    theirs = sum(n * pool.batch / pool.step_seconds for pool, n in zip(problem.pools, counts, strict=True))
    return samples_per_second(problem, running) * theirs / everyone / measured - 1


def at_present_pace(problem: Problem, now: Speeds) -> tuple[Problem, str]:
    """The problem with every speed corrected by what the workers do `now`, and a sentence where it matters."""
    error = prediction_error(problem, now)
    if error is None or not LEAST <= 1 / (1 + error) <= MOST:
        return problem, ""
    weight = VARIES**2 / (VARIES**2 + NOISE**2)
    factor = (1 + error) ** weight  # of the time of a step
    rest = math.sqrt(weight) * NOISE
    pools = tuple(
        replace(pool, step_seconds=pool.step_seconds * factor, step_sigma=max(pool.step_sigma, rest))
        for pool in problem.pools
    )
    model = problem.servers.model
    servers = replace(problem.servers, model=replace(model, update_seconds=model.update_seconds * factor))
    problem = replace(problem, pools=pools, servers=servers)
    if abs(factor - 1) < TOLD:
        return problem, ""
    words = f"{abs(1 - 1 / factor):.0%} {'slower' if factor > 1 else 'faster'}"
    return problem, (
        f"The workers are {words} now than the measurements so far say; the plan expects that to stay."
    )
