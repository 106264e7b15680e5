"""Whether one worker in a pool that was never measured teaches more than it costs: the value of information.

The plan without knowledge leaves a pool alone whose speed is too uncertain for a deadline, or seems a little too slow
for its price. One worker shows its speed within minutes. For each speed that is plausible, the work left is planned as
if it were known: the mean saving over these plans is what the measurement is worth. That is money; or time, of a job
that is to be fast, or is late wherever it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.grid import Grid
from shoal.sizing.plan.problem import Pool, Problem
from shoal.sizing.plan.search import search

__all__ = ["Trial", "worth_measuring"]

MEASURE_SECONDS = 120.0
"""How long a worker runs until its speed is known."""
KNOWN_SIGMA = 0.03
"""The uncertainty that is left then."""
DRAWS = tuple(NormalDist().inv_cdf((n + 0.5) / 7) for n in range(7))
LEAST_SHARE = 0.02
"""A saving of less than this part of the cost is within what the plan does not model."""
GIVEN_UP = 0.5
"""A measurement that has begun is given up where it is worth less than this part of what makes one begin."""
MOST_COMBINATIONS = 20_000
"""Beyond, the search takes too long to be repeated for every speed."""


@dataclass(frozen=True)
class Trial:
    """A pool to try with one worker: what knowing its speed saves in the mean, and what the worker costs until then.

    Both in money, or in seconds. `counts`: the plan with that worker, in place of another where there is no room.
    """

    pool: str
    saving: float
    price: float
    counts: tuple[int, ...]


def worth_measuring(
    problem: Problem,
    counts: Sequence[int],
    cost: float,
    seconds: float,
    unmeasured: Collection[str],
    begun: Collection[str] = (),
) -> Trial | None:
    """The pool whose measurement is worth most beyond its price; None: of none it is.

    Args:
        problem: the work left, with the speeds as far as they are known, and what the plan is the best by.
        counts: the plan.
        cost: its expected cost.
        seconds: its expected time.
        unmeasured: pools whose speed rests on other accelerators or models.
        begun: those of them in which a worker runs already, or was asked for.

    """
    in_time = problem.objective.prefer == "MinTime"
    if problem.objective.prefer == "BestValue" or Grid(problem.limits).size > MOST_COMBINATIONS:
        return None
    found = []
    for at, (pool, used) in enumerate(zip(problem.pools, counts, strict=True)):
        if pool.name not in unmeasured or used or not pool.nodes or pool.out_seconds:
            continue
        tried = _with_one(problem, counts, at, replaces=in_time)
        if tried is None:
            continue
        now = seconds if in_time else cost
        before = (_startup(pool) + MEASURE_SECONDS) / seconds
        saving = max(1 - before, 0.0) * _saving(problem, at, now, in_time=in_time)
        price = _delay(problem, counts, tried) if in_time else _price(pool, problem, cost)
        least = max(price, LEAST_SHARE * now)
        if saving > least * (GIVEN_UP if pool.name in begun else 1.0):
            found.append(Trial(pool.name, saving, price, tried))
    return max(found, key=lambda trial: trial.saving - trial.price, default=None)


def _with_one(problem: Problem, counts: Sequence[int], at: int, *, replaces: bool) -> tuple[int, ...] | None:
    """The plan with one worker of a pool; where there is no room, in place of the slowest. None: none is allowed."""
    model, servers = ElasticModel(problem), problem.servers.counts[0]

    def place(leaves: int | None) -> tuple[int, ...]:
        return tuple(n + (i == at) - (i == leaves) for i, n in enumerate(counts))

    leaving: list[int | None] = [None]
    if problem.max_workers is not None and sum(counts) >= problem.max_workers:
        used = [i for i, n in enumerate(counts) if n] if replaces else []
        leaving = [
            *sorted(used, key=lambda i: (problem.pools[i].samples_per_second, -problem.pools[i].price))
        ]
    options = (place(leaves) for leaves in leaving)
    return next((option for option in options if model.allows(option, servers)), None)


def _saving(problem: Problem, at: int, now: float, *, in_time: bool) -> float:
    """By how much the work left is cheaper, or done sooner, in the mean if the speed of a pool is known."""
    return sum(max(now - _best(problem, at, z, in_time=in_time), 0.0) for z in DRAWS) / len(DRAWS)


def _best(problem: Problem, at: int, z: float, *, in_time: bool) -> float:
    """The least cost that keeps the limits, or the least time, if a pool is z standard deviations slower."""
    pool = problem.pools[at]
    known = replace(
        pool, step_seconds=pool.step_seconds * math.exp(z * pool.step_sigma), step_sigma=KNOWN_SIGMA
    )
    pools = tuple(known if i == at else each for i, each in enumerate(problem.pools))
    best = search(ElasticModel(replace(problem, pools=pools), problem.objective.margin))[0].best
    if best is None:
        return math.inf
    return best.seconds if in_time else best.cost


def _price(pool: Pool, problem: Problem, cost: float) -> float:
    """What the worker costs until its speed is known, less what its work meanwhile would cost elsewhere."""
    paid = pool.price * (_startup(pool) + MEASURE_SECONDS) / 3600
    steps = float(problem.work.iterations(np.array([float(pool.batch)]), np.ones(1))[0])
    return paid - min(MEASURE_SECONDS / pool.step_seconds / steps, 1.0) * cost


def _delay(problem: Problem, counts: Sequence[int], tried: Sequence[int]) -> float:
    """Seconds that are lost until the speed is known: a worker leaves its place only when the other one runs."""
    before, then = (
        sum(n * pool.samples_per_second for pool, n in zip(problem.pools, each, strict=True))
        for each in (counts, tried)
    )
    return MEASURE_SECONDS * max(1 - then / before, 0.0)


def _startup(pool: Pool) -> float:
    return 0.0 if pool.running else pool.startup_seconds
