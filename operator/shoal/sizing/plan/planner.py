"""From a problem to a plan: search, then simulate in the order of the objective. There is always an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.evaluation import Evaluator
from shoal.sizing.plan.found import Candidate, Found, Shortlist
from shoal.sizing.plan.problem import SCALING_SIGMA, Objective, Pool, Problem, Servers
from shoal.sizing.plan.risk import Checked, Engines, Walk, is_risky
from shoal.sizing.plan.search import EXACT_LIMIT, search
from shoal.sizing.plan.work import LossWork, Work

__all__ = ["Plan", "Point", "finite", "nothing", "plan"]

PASSES = 8
"""Times that the search is continued where the shortlist ends without a plan that is sure enough."""


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

    `binding`: the constraint that keeps the plan from being cheaper (or faster), or that cannot be met. `chance` and
    `budget_chance`: the share of simulated runs that met the deadline, and the budget; None if there is none or
    nothing is random. `finish`: the 5 and 95 % quantiles of the simulated time; infinite: it ended
    before the work did. `unlimited`: the best plan without
    the constraint `binding`. `full`: it has as many workers as the job may have. `proved`: every combination that is
    better by the objective was ruled out. `kept`: the share of simulated runs that met deadline and budget, both in one
    run. `given`: its workers were given, and no others compared; it is then `proved` that none keeps the limits.
    `shared`: other jobs have nodes that it could use.
    """

    pools: tuple[Pool, ...]
    objective: Objective
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

    @property
    def misses_only_budget(self) -> bool:
        """Whether it is the budget alone that is not kept, or not with the confidence asked for."""
        objective = self.objective
        if self.feasible or objective.budget is None:
            return False
        if objective.deadline is None:
            return True
        return (
            self.seconds <= objective.deadline if self.chance is None else self.chance >= objective.confidence
        )

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


def plan(
    problem: Problem, *, exact_limit: int = EXACT_LIMIT, seed: int = 0, engines: Engines | None = None
) -> Plan:
    """Plan with Shoal's model. Raises UsageError if no combination is allowed. `engines`: of the problem."""
    objective = problem.objective
    limited = objective.deadline is not None or objective.budget is not None
    model = ElasticModel(problem, NormalDist().inv_cdf(objective.confidence) if limited else 0.0)
    found, exact = search(model, exact_limit=exact_limit)
    fastest, cheapest = found.fastest, found.cheapest
    if fastest is None or cheapest is None:
        raise UsageError(_no_plan_at_all(problem.work))
    evaluators = model.evaluators()
    anything = is_risky(problem, [1] * len(problem.pools), max(problem.servers.counts))
    walk = Walk(model, (found.best or cheapest).seconds, seed, engines)
    best, checked, proved = found.best, None, exact
    if limited and anything:
        best, checked, walked = _first_sure(walk, model, found, exact_limit)
        proved = exact and walked
    instead = None if best is not None else _cheapest_in_time(problem, exact_limit, seed)
    shown = best or instead or fastest
    servers, zone = evaluators[shown.variant].servers, evaluators[shown.variant].zone
    binding, unlimited = _binding(found, fastest, cheapest, objective, best, shown)
    runs = None
    if is_risky(problem, shown.counts, servers):
        runs = walk.check(shown.counts, shown.variant) if checked is None or instead else checked

    def point(one: Candidate) -> Point:
        return Point(one.counts, evaluators[one.variant].servers, one.seconds, one.cost)

    return Plan(
        pools=tuple(problem.pools),
        objective=objective,
        work=problem.work,
        feasible=best is not None,
        counts=shown.counts,
        servers=servers,
        zone=zone,
        seconds=shown.seconds,
        sure_seconds=shown.sure_seconds,
        cost=shown.cost,
        iterations=shown.iterations,
        searched=found.searched,
        exact=exact,
        binding=binding,
        chance=runs.in_time if runs else None,
        pareto=_points(found, evaluators),
        unlimited=point(unlimited) if unlimited else None,
        cheapest=point(cheapest),
        fastest=point(fastest),
        notes=(*problem.notes, *_extrapolated(problem.servers, servers)),
        budget_chance=runs.in_budget if runs else None,
        finish=runs.between if runs else None,
        full=sum(shown.counts) == problem.max_workers,
        proved=proved,
        kept=runs.kept if runs and limited else None,
        shared=problem.shared,
    )


def nothing(problem: Problem) -> Plan:
    """The plan of a job to which others leave no node: what it would need with all of them, and not feasible."""
    none = (0,) * len(problem.pools)
    return replace(plan(problem), feasible=False, counts=none, binding="pools")


def _cheapest_in_time(problem: Problem, exact_limit: int, seed: int) -> Candidate | None:
    """Where the budget cannot be kept, the plan that costs least beyond it; None: it is the deadline that cannot."""
    objective = problem.objective
    if objective.budget is None:
        return None
    without = replace(problem, objective=replace(objective, budget=None, prefer="MinCost"))
    margin = NormalDist().inv_cdf(objective.confidence) if objective.deadline is not None else 0.0
    model = ElasticModel(without, margin)
    found, _ = search(model, exact_limit=exact_limit)
    if objective.deadline is None or found.best is None:
        return found.best
    return _first_sure(Walk(model, found.best.seconds, seed), model, found, exact_limit)[0]


def _first_sure(
    walk: Walk, model: ElasticModel, found: Found, exact_limit: int
) -> tuple[Candidate | None, Checked | None, bool]:
    """The best plan that is sure enough, its runs, and whether everything better was ruled out."""
    shortlist, confidence = found.shortlist, model.problem.objective.confidence
    if found.best is not None and shortlist.begins_with(found.best):
        # Nothing is better, and the formula holds it to be sure: mostly it is, and no other needs a look.
        first = walk.check(found.best.counts, found.best.variant)
        if first.sure(confidence):
            return found.best, first, True
    for number in range(PASSES):
        checked = walk.first_sure(shortlist)
        if checked is not None:
            return _candidate(model, shortlist, checked.at), checked, not walk.cut_short
        if shortlist.complete or number == PASSES - 1:
            break
        more, _ = search(model, exact_limit=exact_limit, after=float(shortlist.first[-1]))
        shortlist = more.shortlist
    # What the formula holds to be sure, or else the fastest: the simulation decides.
    for candidate in (found.best, found.fastest_in_budget, found.fastest):
        if candidate is not None:
            checked = walk.check(candidate.counts, candidate.variant)
            if checked.sure(confidence):
                return candidate, checked, False
    return None, None, shortlist.complete and not walk.cut_short


def _candidate(model: ElasticModel, shortlist: Shortlist, at: int) -> Candidate:
    counts, variant = shortlist.counts[:, at : at + 1], int(shortlist.variant[at])
    return Candidate.of(counts, variant, model.evaluators()[variant](counts), 0)


def _extrapolated(servers: Servers, number: int) -> tuple[str, ...]:
    """A note if the plan has more parameter servers than were measured."""
    if servers.measured is None or number <= servers.measured or servers.model.update_seconds == 0:
        return ()
    times = number**servers.model.scaling
    return (
        f"More than {servers.measured} parameter server{'s were' if servers.measured > 1 else ' was'} not measured: "
        f"{number} are taken to do {times:.2g} times as much as one, give or take "
        f"{np.expm1(SCALING_SIGMA * np.log(number / servers.measured)):.0%}; measure with {number} to be surer.",
    )


def _binding(
    found: Found,
    fastest: Candidate,
    cheapest: Candidate,
    objective: Objective,
    best: Candidate | None,
    shown: Candidate,
) -> tuple[str | None, Candidate | None]:
    """The constraint that binds, and the plan that would be best without it."""
    if best is None:
        if objective.deadline is not None and fastest.seconds > objective.deadline:
            return "deadline", None
        if objective.budget is not None and cheapest.cost > objective.budget:
            return "budget", cheapest
        if objective.deadline and objective.budget and not found.possible:
            return "deadline and budget", found.fastest_in_budget
        return "confidence", None
    if objective.prefer == "MinTime":
        better = fastest.seconds < shown.seconds * (1 - 1e-9) and objective.budget is not None
        return ("budget", fastest) if better else (None, None)
    if objective.prefer == "MinCost" and objective.deadline is not None:
        better = cheapest.cost < shown.cost * (1 - 1e-9)
        return ("deadline", cheapest) if better else (None, None)
    return None, None


def _points(found: Found, evaluators: Sequence[Evaluator]) -> tuple[Point, ...]:
    front = found.front
    return tuple(
        Point(
            tuple(int(n) for n in front.counts[:, i]),
            evaluators[front.variant[i]].servers,
            float(s),
            float(c),
        )
        for i, (s, c) in enumerate(zip(front.seconds, front.cost, strict=True))
    )


def _no_plan_at_all(work: Work) -> str:
    if isinstance(work, LossWork):
        within = (
            ""
            if work.batch_range is None
            else f" with a weighted batch size between {work.batch_range[0]:g} and {work.batch_range[1]:g}"
        )
        return (
            f"the loss curve gives no number of iterations (at least 1) to a loss of {work.target:g} for any "
            f"combination of these pools{within}: ask for a lower loss, or for pools whose batch sizes the curve "
            "was fitted with"
        )
    return (
        "no combination of these pools is allowed: raise maxReplicas, lower minReplicas, change zonePolicy, or name "
        "a pool in the workers' zone in parameterServers.pools"
    )
