"""When to leave what runs for another plan: only for a gain that is sure enough to be worth the switch.

Prices and speeds change all the time, and a plan that follows every change spends its time starting nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.problem import Problem
from shoal.sizing.plan.risk import engine_for

__all__ = ["SURE", "switch_gain"]

SURE = 0.8
"""A plan must be better than what runs in this part of the simulated runs to replace it."""


def switch_gain(
    problem: Problem, current: Sequence[int], new: Sequence[int], servers: int
) -> tuple[float, bool]:
    """In which part of simulated runs `new` is better than `current`, and whether `current` still keeps the limits.

    Better is less cost, or time by the objective. Both see the same nodes and speeds in every run (common random
    numbers); what runs needs no start-up, so the start-ups of what is new are part of the cost of
    the switch; the other is that nodes are paid for a while after their workers have left (`idle_seconds`).
    """
    objective = problem.objective
    engine = engine_for(problem, ElasticModel(problem).seconds(current, servers))
    now, then = engine.run(current, servers), engine.run(new, servers)
    kept = 1.0
    if objective.deadline is not None:
        kept = min(kept, float(np.mean(now.finish <= objective.deadline)))
    if objective.budget is not None:
        kept = min(kept, float(np.mean(now.cost <= objective.budget)))
    if objective.prefer == "MinTime":
        return float(np.mean(then.finish < now.finish)), kept >= objective.confidence
    left = zip(problem.pools, current, new, strict=True)
    drained = sum(max(old - n, 0) * pool.price * pool.idle_seconds for pool, old, n in left) / 3600
    better = objective.with_spare_time(then.cost + drained, then.finish) < objective.with_spare_time(
        now.cost, now.finish
    )
    return float(np.mean(better)), kept >= objective.confidence
