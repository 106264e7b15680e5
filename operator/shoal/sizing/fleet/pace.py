"""How fast a job's workers are now, beside what its profile says: what was measured last week may not hold today.

A neighbour on the machine, a slower input or a changed function of the user make a job slower, or faster, than all its
measurements so far. Before they have moved the profile, hours later, the deadline is lost. So what the workers do now
corrects the speed of the whole job, of its workers in every pool and of its servers: what slows one mostly slows all,
and a cluster whose servers are the limit gets no faster by more workers.

Of the logarithm of the factor, what another day changes is the prior, and what the workers were seen to do the data,
which count for as long as they were watched. So nothing jumps when the watch begins, or begins again. The prior is
Student's t with three degrees of freedom: that another day makes a worker ten times slower is rare, but where it is
seen, it is so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shoal.sizing.fleet.values import Pace, Watched
from shoal.sizing.plan.problem import Problem
from shoal.sizing.speed import priors

__all__ = ["at_present_pace", "pace_of", "samples_per_second"]

NOISE = 0.07
"""Standard deviation of the log of a speed that was watched for 10 s; of a longer watch, it falls with the root."""
NOISE_SECONDS = 10.0
LARGE, MOST = math.log(3.0), math.log(100.0)
"""The log of a pace beyond `LARGE` may be a fault of the measurement: unsure, and never faster. At `MOST` it stands."""
DOUBT = 0.1
"""The part of what is beyond `LARGE` that is its standard deviation: a slow-down that was watched mostly lasts."""
TOLD = 0.1


def samples_per_second(problem: Problem, counts: Sequence[float], servers: int | None = None) -> float:
    """Samples a second of these workers, all of them at work."""
    pairs = list(zip(problem.pools, counts, strict=True))
    alone = sum(n / pool.step_seconds for pool, n in pairs)
    samples = sum(n * pool.samples_per_second for pool, n in pairs)
    ps = problem.servers
    speed = float(ps.model.limited(np.array([alone]), servers or ps.counts[0])[0])
    return samples * speed / alone if alone > 0 else 0.0


def pace_of(problem: Problem, now: Watched) -> Pace | None:
    """By how much the workers that are watched differ from their prediction; None: none is."""
    counts = [len(now.speeds.get(pool.name, ())) for pool in problem.pools]
    measured = sum(sum(now.speeds.get(pool.name, ())) for pool in problem.pools)
    if measured <= 0:
        return None
    pushing = [now.company.get(pool.name, n) for pool, n in zip(problem.pools, counts, strict=True)]
    everyone = sum(n * pool.samples_per_second for pool, n in zip(problem.pools, pushing, strict=True))
    theirs = sum(n * pool.samples_per_second for pool, n in zip(problem.pools, counts, strict=True))
    error = samples_per_second(problem, pushing) * theirs / everyone / measured - 1
    return Pace(error, now.seconds)


def at_present_pace(problem: Problem, pace: Pace | None) -> tuple[Problem, str]:
    """The problem with every speed corrected by the pace of its workers, and a sentence where it matters."""
    said = 0.0 if pace is None else min(max(math.log1p(pace.error), -MOST), MOST)
    doubt = max(abs(said) - LARGE, 0.0)
    prior = 1 / (priors.ANOTHER_DAY**2 + (said / 2) ** 2)
    seen = 0.0 if pace is None else pace.seconds / NOISE_SECONDS / NOISE**2
    factor = math.exp(max(said, -LARGE) * seen / (prior + seen))  # of the time of a step
    sigma = math.hypot((prior + seen) ** -0.5, DOUBT * doubt)
    # Before it is watched, another day's doubt adds to that of the profile; afterwards both say the same.
    both = math.hypot if pace is None else max
    pools = tuple(
        replace(pool, step_seconds=pool.step_seconds * factor, step_sigma=both(pool.step_sigma, sigma))
        for pool in problem.pools
    )
    model = problem.servers.model
    servers = replace(problem.servers, model=replace(model, update_seconds=model.update_seconds * factor))
    problem = replace(problem, pools=pools, servers=servers)
    if abs(factor - 1) < TOLD:
        return problem, ""
    words = f"{abs(1 - 1 / factor):.0%} {'slower' if factor > 1 else 'faster'}"
    unsure = (
        " So large a difference may be a fault of the measurement: how fast they are is unsure."
        if doubt
        else ""
    )
    return problem, (
        f"The workers are {words} now than the measurements so far say; the plan expects that to stay.{unsure}"
    )
