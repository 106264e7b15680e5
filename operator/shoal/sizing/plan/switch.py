"""When to leave what runs for another plan: only for a gain that is sure enough to be worth the switch.

Prices and speeds change all the time, and a plan that follows every change spends its time starting nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.sizing.availability import Floats
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.problem import Problem
from shoal.sizing.plan.risk import Engines, kept

__all__ = ["SURE", "Switch", "gain", "is_sure", "switch"]

SURE = 0.8
"""A plan must be better than what runs in this part of the simulated runs to replace it."""


@dataclass(frozen=True)
class Switch:
    """What leaving what runs for another plan saves in every simulated run (runs,), in money.

    `timed`: where time is preferred, or neither costs anything, the logarithm of how many times as fast it is.
    """

    saved: Floats
    kept: bool
    """What runs keeps the limits with the confidence asked for."""
    timed: bool = False


def is_sure(saved: Floats) -> bool:
    """Whether a switch, or several at once, saves something often enough to be made."""
    return gain(saved) >= SURE


def gain(saved: Floats) -> float:
    """In which part of the runs it saves something."""
    return float(np.mean(saved > 0))


def switch(
    problem: Problem,
    current: Sequence[int],
    new: Sequence[int],
    servers: int,
    engines: Engines | None = None,
) -> Switch:
    """Compare `new` with `current`, what runs or is on its way.

    Better is less cost, or time by the objective, and where neither costs anything. Both see the same nodes and speeds
    in every run (common random numbers); what runs needs no start-up, so the start-ups of what is new are part of the
    cost of the switch; the other is that nodes are paid for a while after their workers have left (`idle_seconds`).
    """
    objective = problem.objective
    model = ElasticModel(problem)
    engine = (engines or Engines(problem)).until(model.seconds(current, servers))
    now, then = (engine.run(counts, servers, model.zone(counts, servers)) for counts in (current, new))
    pairs = [*zip(problem.pools, current, new, strict=True)]
    with np.errstate(divide="ignore", invalid="ignore"):  # one never ends, or neither
        faster = np.log(now.finish / then.finish)
        drained = sum(max(old - n, 0) * pool.price * pool.idle_seconds for pool, old, n in pairs) / 3600
        saved = objective.with_spare_time(now.cost, now.finish)
        saved = saved - objective.with_spare_time(then.cost + drained, then.finish)
    timed = objective.prefer == "MinTime" or not (np.any(now.cost) or np.any(then.cost))
    return Switch(faster if timed else saved, kept(objective, now) >= objective.confidence, timed)
