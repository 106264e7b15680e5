"""When to change a plan that is running: seldom, and only for a gain that outweighs what changing costs.

Prices and speeds move all the time. A plan that follows each of their moves pays for starting nodes and never for
training, so a change must be worth its cost and a margin, and waits until the last one has had time to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.planner import Plan, plan
from shoal.sizing.plan.problem import Pool, Prefer, Problem
from shoal.sizing.plan.risk import chance

__all__ = ["Decision", "replan"]

SAVING = 0.05
"""A plan must be cheaper by this part to replace one that still keeps the deadline."""


@dataclass(frozen=True)
class Decision:
    """Whether to change, to what, and why in words. `plan` is the best plan from now, also when it is not taken."""

    change: bool
    counts: tuple[int, ...]
    plan: Plan
    reason: str


def replan(
    problem: Problem,
    running: Sequence[int],
    *,
    servers: int = 1,
    since_change_seconds: float = float("inf"),
    stabilization_seconds: float = 300.0,
    saving: float = SAVING,
) -> Decision:
    """Decide what to run from now on.

    What runs keeps the deadline if it does so with the confidence asked for: by simulated runs, as a plan must.
    `problem` holds the work, deadline and budget that are left, and today's prices and speeds. `running` (k,) are the
    workers that there are: they need no start-up, and that is what makes other plans dearer by what switching costs.
    """
    pools = tuple(replace(p, running=n) for p, n in zip(problem.pools, running, strict=True))
    now = replace(problem, pools=pools, servers=replace(problem.servers, running=servers))
    best = plan(now)
    current = tuple(running)
    if best.counts == current and best.servers == servers:
        return Decision(False, current, best, "What runs is still the best plan.")
    seconds, cost, within = _current(now, current, servers)
    objective = problem.objective
    kept = chance(now, current, servers) if within else None
    if kept is None:
        in_time = objective.deadline is None or seconds <= objective.deadline
    else:
        in_time = kept >= objective.confidence
    in_budget = objective.budget is None or cost <= objective.budget
    if not within or not (in_time and in_budget):
        if not best.feasible and within and best.seconds >= seconds * (1 - saving):
            return Decision(
                False, current, best, "No plan keeps the limits, and what runs is about the fastest."
            )
        what = (
            "the deadline"
            if within and not in_time
            else "the budget"
            if within
            else "the limits of the pools"
        )
        return Decision(True, best.counts, best, f"What runs no longer keeps {what}: change at once.")
    if since_change_seconds < stabilization_seconds:
        wait = stabilization_seconds - since_change_seconds
        return Decision(
            False, current, best, f"The last change was too short ago: look again in {wait:.0f} s."
        )
    gain, word = _gain(objective.prefer, best, seconds, cost)
    if gain < 0.0005:  # less is 0.0 %
        return Decision(False, current, best, f"No plan is {word} than what runs.")
    if gain < saving:
        return Decision(
            False, current, best, f"The best plan is {gain:.1%} {word} than what runs: not worth the change."
        )
    return Decision(
        True, best.counts, best, f"The best plan is {gain:.1%} {word} than what runs, switching included."
    )


def _gain(prefer: Prefer, best: Plan, seconds: float, cost: float) -> tuple[float, str]:
    """How much better the best plan is by what the objective minimises, and the word for that."""
    if prefer == "MinTime":
        return 1 - best.seconds / seconds, "faster"
    if prefer == "BestValue":
        return 1 - best.seconds * best.cost / (seconds * cost), "better for the money"
    return 1 - best.cost / cost, "cheaper"


def _current(problem: Problem, running: tuple[int, ...], servers: int) -> tuple[float, float, bool]:
    """Time and cost from now if nothing is changed, and whether the pools still allow it."""
    pools: Sequence[Pool] = problem.pools
    if any(n > pool.limit for n, pool in zip(running, pools, strict=True)):
        return float("inf"), float("inf"), False
    wide = replace(problem, servers=replace(problem.servers, counts=(servers,)))
    out = [e(np.array([running], dtype=np.float64).T) for e in ElasticModel(wide).evaluators()]
    best = min(out, key=lambda each: float(each.cost[0]))
    seconds, cost = float(best.seconds[0]), float(best.cost[0])
    return seconds, cost, bool(np.isfinite(seconds))
