"""Which plans of a job that must be late are about as good as the best one: the cheapest of them, or what runs.

No limit says any more what is enough: the fastest plan is faster than others by less than speeds are known, may cost
much more than they do, and is another one with each report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shoal.sizing.plan.engine import Engine
from shoal.sizing.plan.found import Candidate
from shoal.sizing.plan.in_order import Tried
from shoal.sizing.plan.problem import Objective

__all__ = ["about_as_good"]

AS_GOOD = 1.05
"""A plan that takes up to this times as long as the fastest one is as fast: speeds are not known any better. Likewise
what costs so much more than the cheapest is as cheap."""
AS_LIKELY = 0.02
"""And it is as likely in time if it is so in up to this part of the simulated runs less often than the likeliest."""
AS_CHEAP = 1.1
"""What runs is left for one that is as fast and as likely only if it costs this many times as much."""


def about_as_good(
    tried: Tried, best: Candidate, objective: Objective, engine: Engine, current: Sequence[int]
) -> Candidate:
    """Where a limit is missed: the cheapest plan that is about as good and as likely in time; what runs, if it is such.

    As good is about as fast, or as cheap where nothing keeps the budget.
    """
    front, evaluators, problem = tried.found.front, tried.model.evaluators(), tried.model.problem
    cheap = problem.objective.prefer == "MinCost"
    slowest, dearest = (math.inf, AS_GOOD * best.cost) if cheap else (AS_GOOD * best.seconds, math.inf)
    near = np.flatnonzero((front.seconds <= slowest) & (front.cost <= dearest))
    columns = [(front.counts[:, at : at + 1], int(front.variant[at])) for at in near]
    if current:
        columns += [(np.array([current], dtype=np.float64).T, variant) for variant in range(len(evaluators))]
    points = {Candidate.at(evaluators, *column) for column in columns} - {best}
    within = (one for one in points if one.seconds <= slowest and one.cost <= dearest)
    good = [best, *filter(tried.keeps_budget, within)]
    if cheap or any(n and of.spot for n, of in zip(min(good, key=_dear).counts, problem.pools, strict=True)):
        # Nodes that are lost are as fast in the mean only.
        in_time = replace(objective, budget=None)
        chances = [_chance(engine, one, evaluators[one.variant].servers, in_time) for one in good]
        good = [
            each for each, chance in zip(good, chances, strict=True) if chance >= max(chances) - AS_LIKELY
        ]
    cheapest = min(good, key=_dear)
    stays = min((one for one in good if one.counts == tuple(current)), key=_dear, default=cheapest)
    return stays if stays.cost <= AS_CHEAP * cheapest.cost else cheapest


def _chance(engine: Engine, one: Candidate, servers: int, objective: Objective) -> float:
    """How likely a plan keeps the limits, by the tables of what its pools do."""
    counts, hourly = np.array([one.counts]).T, np.array([3600 * one.cost / one.seconds])
    return float(engine.chances(counts, servers, hourly, objective)[0])


def _dear(one: Candidate) -> tuple[float, float, tuple[int, ...]]:
    return one.cost, one.seconds, one.counts
