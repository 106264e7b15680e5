"""When to change a running plan: only for a gain that exceeds the cost of the change by a margin.

Prices and speeds change all the time, and a plan that follows every change spends its time starting nodes. So a change
also waits for a stabilization time after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.planner import Plan, plan
from shoal.sizing.plan.problem import Pool, Prefer, Problem
from shoal.sizing.plan.risk import chance, engine_for

__all__ = ["SURE", "Decision", "replan", "switch_gain"]

SAVING = 0.05
"""A plan must be cheaper by this part to replace one that still meets the limits."""
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
    return float(np.mean(then.cost + drained < now.cost)), kept >= objective.confidence


@dataclass(frozen=True)
class Decision:
    """Whether to change, to which counts, and why. `plan` is the best plan from now, even if it is not used."""

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

    `problem` holds the remaining work, deadline and budget, and today's prices and speeds. The `running` (k,) workers
    need no start-up, so every other plan includes the cost of switching.
    """
    current = tuple(running)
    pools = tuple(replace(p, running=n) for p, n in zip(problem.pools, current, strict=True))
    now = replace(problem, pools=pools, servers=replace(problem.servers, running=servers))
    best = plan(now)
    if best.counts == current and best.servers == servers:
        return Decision(False, current, best, "What runs is still the best plan.")
    seconds, cost, allowed = _current(now, current, servers)
    missed = _missed_limit(now, current, servers, seconds, cost) if allowed else "the limits of the pools"
    if missed is not None:
        if not best.feasible and allowed and best.seconds >= seconds * (1 - saving):
            reason = "No plan meets the limits, and what runs is about the fastest."
            return Decision(False, current, best, reason)
        return Decision(True, best.counts, best, f"What runs no longer meets {missed}: change at once.")
    wait = stabilization_seconds - since_change_seconds
    if wait > 0:
        return Decision(False, current, best, f"The last change was too recent: check again in {wait:.0f} s.")
    worth, reason = _worth_changing(problem.objective.prefer, best, seconds, cost, saving)
    return Decision(worth, best.counts if worth else current, best, reason)


def _missed_limit(
    problem: Problem, running: tuple[int, ...], servers: int, seconds: float, cost: float
) -> str | None:
    """The limit that what runs no longer meets; the deadline with the confidence asked for, by simulation."""
    objective = problem.objective
    kept = chance(problem, running, servers)
    if kept is None:
        in_time = objective.deadline is None or seconds <= objective.deadline
    else:
        in_time = kept >= objective.confidence
    if not in_time:
        return "the deadline"
    return "the budget" if objective.budget is not None and cost > objective.budget else None


def _worth_changing(
    prefer: Prefer, best: Plan, seconds: float, cost: float, saving: float
) -> tuple[bool, str]:
    """Whether the gain of the best plan exceeds `saving`, and why."""
    gain, word = _gain(prefer, best, seconds, cost)
    if gain < 0.0005:  # would be printed as 0.0 %
        return False, f"No plan is {word} than what runs."
    if gain < saving:
        return False, f"The best plan is {gain:.1%} {word} than what runs: not worth the change."
    return True, f"The best plan is {gain:.1%} {word} than what runs, switching included."


def _gain(prefer: Prefer, best: Plan, seconds: float, cost: float) -> tuple[float, str]:
    """How much better the best plan is by what the objective minimises, and the word for that."""
    if prefer == "MinTime":
        return 1 - best.seconds / seconds, "faster"
    if prefer == "BestValue":
        return 1 - best.seconds * best.cost / (seconds * cost), "better for the money"
    return 1 - best.cost / cost, "cheaper"


def _current(problem: Problem, running: tuple[int, ...], servers: int) -> tuple[float, float, bool]:
    """Time and cost from now without a change, and whether the pools still allow it."""
    pools: Sequence[Pool] = problem.pools
    if any(n > pool.limit for n, pool in zip(running, pools, strict=True)):
        return float("inf"), float("inf"), False
    wide = replace(problem, servers=replace(problem.servers, counts=(servers,)))
    out = [e(np.array([running], dtype=np.float64).T) for e in ElasticModel(wide).evaluators()]
    best = min(out, key=lambda each: float(each.cost[0]))
    seconds, cost = float(best.seconds[0]), float(best.cost[0])
    return seconds, cost, bool(np.isfinite(seconds))
