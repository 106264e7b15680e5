"""What the planner answers to a problem: a plan, and all that is told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shoal.sizing.plan.problem import Objective, Pool
from shoal.sizing.plan.work import Work

__all__ = ["Plan", "Point", "finite"]


@dataclass(frozen=True)
class Point:
    """A plan on the Pareto front."""

    counts: tuple[int, ...]
    servers: int
    seconds: float
    cost: float


@dataclass(frozen=True)
class Plan:
    """The workers of each pool and the parameter servers, with time and cost.

    `aim`: what it is the best by: `objective` where it is feasible, else what counts instead (`Objective.in_order`).
    `binding`: the constraint that keeps the plan from being cheaper (or faster), or that cannot be met. `chance` and
    `budget_chance`: the share of simulated runs that met the deadline, and the budget; None if there is none or
    nothing is random. `finish`: the 5 and 95 % quantiles of the simulated time; infinite: it ended before the work did.
    `unlimited`: the best plan without the constraint `binding`; where a budget cannot be kept, the cheapest in time.
    `full`: it has as many workers as the job may have. `proved`: every combination that is better by the objective was
    ruled out. `kept`: the share of simulated runs that met deadline and budget, both in one run. `given`: its workers
    were given, and no others compared; it is then `proved` that none keeps the limits. `shared`: other jobs have nodes
    that it could use. `weighed`: it misses a limit, and is the cheapest of those that do about as well, or what runs.
    """

    pools: tuple[Pool, ...]
    objective: Objective
    aim: Objective
    work: Work
    feasible: bool
    counts: tuple[int, ...]
    servers: int
    zone: str
    seconds: float
    sure_seconds: float
    cost: float
    iterations: float
    searched: int
    exact: bool
    binding: str | None
    chance: float | None
    pareto: tuple[Point, ...]
    unlimited: Point | None
    cheapest: Point
    fastest: Point
    notes: tuple[str, ...] = ()
    budget_chance: float | None = None
    finish: tuple[float, float] | None = None
    full: bool = False
    proved: bool = True
    kept: float | None = None
    given: bool = False
    shared: bool = False
    weighed: bool = False

    def as_json(self, reason: str) -> dict[str, Any]:
        """The answer of `shoal plan --json`."""
        return {
            "feasible": self.feasible,
            "counts": list(self.counts),
            "pools": {pool.name: n for pool, n in zip(self.pools, self.counts, strict=True)},
            "parameterServers": self.servers,
            "timeSeconds": self.seconds,
            "sureSeconds": self.sure_seconds,
            "cost": self.cost,
            "iterations": self.iterations,
            "searched": self.searched,
            "exact": self.exact,
            "binding": self.binding,
            "deadlineKept": self.chance,
            "budgetKept": self.budget_chance,
            "limitsKept": self.kept,
            "finishSeconds": None
            if self.finish is None
            else {name: finite(value) for name, value in zip(("p5", "p95"), self.finish, strict=True)},
            "proved": self.proved,
            "pareto": [
                {
                    "counts": list(p.counts),
                    "parameterServers": p.servers,
                    "timeSeconds": p.seconds,
                    "cost": p.cost,
                }
                for p in self.pareto
            ],
            "reason": reason,
        }


def finite(value: float) -> float | None:
    """The value, or None if there is no such number."""
    return value if math.isfinite(value) else None
