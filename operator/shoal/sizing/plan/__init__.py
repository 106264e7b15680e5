"""The planner: how many workers of each capacity pool, and how many parameter servers, and why.

`plan(Problem(...))` is the whole of it; `explain(plan)` says it in words. docs/planning-model.md has the formulas.
"""

from shoal.sizing.plan.answer import Plan, Point
from shoal.sizing.plan.explain import explain
from shoal.sizing.plan.planner import plan
from shoal.sizing.plan.problem import Objective, Pool, Problem, Servers
from shoal.sizing.plan.work import LossWork, StepWork

__all__ = [
    "LossWork",
    "Objective",
    "Plan",
    "Point",
    "Pool",
    "Problem",
    "Servers",
    "StepWork",
    "explain",
    "plan",
]
