"""From a problem to a plan: search, then simulate in the order of the objective. There is always an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.plan.answer import Plan, Point
from shoal.sizing.plan.as_good import about_as_good
from shoal.sizing.plan.engine import TABLE_RUNS
from shoal.sizing.plan.evaluation import Evaluator
from shoal.sizing.plan.found import Candidate, Found
from shoal.sizing.plan.in_order import Look, in_order
from shoal.sizing.plan.problem import SCALING_SIGMA, Objective, Problem, Servers
from shoal.sizing.plan.risk import Engines, Walk, is_risky
from shoal.sizing.plan.search import EXACT_LIMIT, look_at, search
from shoal.sizing.plan.work import LossWork, Work

__all__ = ["exactly", "nothing", "plan"]


def plan(
    problem: Problem,
    *,
    exact_limit: int = EXACT_LIMIT,
    engines: Engines | None = None,
    current: Sequence[int] = (),
) -> Plan:
    """Plan with Shoal's model. Raises UsageError if no combination is allowed.

    Args:
        problem: what is to be planned.
        exact_limit: the most combinations that are compared one by one.
        engines: of the problem.
        current: what runs, if anything does. A job that must be late stays there while that is about as good.

    """
    return _planned(problem, partial(search, exact_limit=exact_limit), engines, current)


def exactly(problem: Problem, counts: Sequence[int], engines: Engines | None = None) -> Plan:
    """The plan of these workers: no others are compared. Raises UsageError if the job may not have them."""
    column = np.array([counts], dtype=np.float64).T
    made = _planned(problem, lambda model, after: (look_at(model, column, after), True), engines)
    return replace(made, given=True, proved=False)


def nothing(problem: Problem) -> Plan:
    """The plan of a job to which others leave no node: what it would need with all of them, and not feasible."""
    none = (0,) * len(problem.pools)
    return replace(plan(problem), feasible=False, counts=none, binding="pools")


def _planned(problem: Problem, look: Look, engines: Engines | None, current: Sequence[int] = ()) -> Plan:
    objective, engines = problem.objective, engines or Engines(problem)
    strict, tried = in_order(problem, look, engines)
    found, fastest, cheapest = strict.found, strict.found.fastest, strict.found.cheapest
    if fastest is None or cheapest is None:
        raise UsageError(_no_plan_at_all(problem.work))
    best, aim, evaluators = tried.best, tried.model.problem.objective, strict.model.evaluators()
    assert best is not None, "an objective without limits has a plan"
    weighed = (
        tried is not strict and objective.deadline is not None and "MinCost" in (objective.prefer, aim.prefer)
    )
    if weighed:
        engine = engines.until(best.seconds, runs=TABLE_RUNS)
        best = about_as_good(tried, best, objective, engine, current)
    servers, zone = evaluators[best.variant].servers, evaluators[best.variant].zone
    feasible = tried is strict
    binding, unlimited = _binding(found, fastest, cheapest, objective, best if feasible else None)
    runs = tried.checked if feasible else None
    if runs is None and is_risky(problem, best.counts, servers):
        runs = Walk(strict.model, tried.walk.seconds, engines).check(best.counts, best.variant)

    def point(one: Candidate) -> Point:
        return Point(one.counts, evaluators[one.variant].servers, one.seconds, one.cost)

    return Plan(
        pools=tuple(problem.pools),
        objective=objective,
        aim=aim,
        work=problem.work,
        feasible=feasible,
        counts=best.counts,
        servers=servers,
        zone=zone,
        seconds=best.seconds,
        sure_seconds=best.sure_seconds,
        cost=best.cost,
        iterations=best.iterations,
        searched=found.searched,
        exact=strict.exact,
        binding=binding,
        chance=runs.in_time if runs else None,
        pareto=_points(found, evaluators),
        unlimited=point(unlimited) if unlimited else None,
        cheapest=point(cheapest),
        fastest=point(fastest),
        notes=(*problem.notes, *_extrapolated(problem.servers, servers)),
        budget_chance=runs.in_budget if runs else None,
        finish=runs.between if runs else None,
        full=sum(best.counts) == problem.max_workers,
        proved=strict.proved and tried.proved,
        kept=runs.kept if runs and objective.limited else None,
        shared=problem.shared,
        weighed=weighed,
    )


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
    found: Found, fastest: Candidate, cheapest: Candidate, objective: Objective, best: Candidate | None
) -> tuple[str | None, Candidate | None]:
    """The constraint that binds, and the plan that would be best without it."""
    if best is None:
        if objective.deadline is not None and fastest.seconds > objective.deadline:
            return "deadline", None
        if objective.budget is not None and cheapest.cost > objective.budget:
            return "budget", found.cheapest_in_time
        if objective.deadline and objective.budget and not found.possible:
            return "deadline and budget", found.cheapest_in_time
        return "confidence", None
    if objective.prefer == "MinTime":
        better = fastest.seconds < best.seconds * (1 - 1e-9) and objective.budget is not None
        return ("budget", fastest) if better else (None, None)
    if objective.prefer == "MinCost" and objective.deadline is not None:
        better = cheapest.cost < best.cost * (1 - 1e-9)
        return ("deadline", cheapest) if better else (None, None)
    return None, None


def _points(found: Found, evaluators: Sequence[Evaluator]) -> tuple[Point, ...]:
    front = found.front
    rows = zip(front.counts.T, front.variant, front.seconds, front.cost, strict=True)
    return tuple(
        Point(tuple(map(int, counts)), evaluators[int(variant)].servers, float(seconds), float(cost))
        for counts, variant, seconds, cost in rows
    )


def _no_plan_at_all(work: Work) -> str:
    if isinstance(work, LossWork):
        within = ""
        if work.batch_range is not None:
            least, most = work.batch_range
            within = f" with a weighted batch size between {least:g} and {most:g}"
        return (
            f"the loss curve gives no number of iterations (at least 1) to a loss of {work.target:g} for any "
            f"combination of these pools{within}: ask for a lower loss, or for pools whose batch sizes the curve "
            "was fitted with"
        )
    return (
        "no combination of these pools is allowed: raise maxReplicas, lower minReplicas, change zonePolicy, or name "
        "a pool in the workers' zone in parameterServers.pools"
    )
