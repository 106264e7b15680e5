"""From a problem to a plan: search, then check the risk by simulation. There is always an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.evaluation import Evaluator, Model
from shoal.sizing.plan.found import Candidate, Found
from shoal.sizing.plan.problem import SCALING_SIGMA, LossWork, Objective, Pool, Problem, Servers, Work
from shoal.sizing.plan.risk import chance
from shoal.sizing.plan.search import EXACT_LIMIT, search

__all__ = ["Plan", "Point", "plan", "plan_with"]

MARGINS = 5  # times that the margin is raised when simulated runs miss the deadline too often
RAISE = 1.3
BISECTIONS = 3  # between the margin that was too small and the one that was large enough


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

    `binding`: the constraint that keeps the plan from being cheaper (or faster), or that cannot be met. `chance`: the
    share of simulated runs that met the deadline; None if nothing was simulated. `unlimited`: the best plan without
    the constraint `binding`. `by_simulation`: the formula found no plan, but the fastest one was good enough in
    simulated runs; cheaper ones were not simulated.
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
    by_simulation: bool = False

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


def plan(problem: Problem, *, exact_limit: int = EXACT_LIMIT) -> Plan:
    """Plan with Shoal's model. Raises UsageError if no combination is allowed."""
    objective = problem.objective
    margin = NormalDist().inv_cdf(objective.confidence) if objective.deadline is not None else 0.0
    by_simulation, too_small = False, None
    for _ in range(MARGINS):
        attempt = _attempt(problem, margin, exact_limit)
        if attempt.found.best is None or attempt.good:
            break
        too_small, margin = margin, margin * RAISE + 0.1
    else:
        # The simulation misses the deadline with every margin.
        attempt.found.reject_best()
    if attempt.found.best is not None and too_small is not None:
        attempt = _cheaper(problem, attempt, too_small, margin, exact_limit)
    model, found, exact, kept = attempt.model, attempt.found, attempt.exact, attempt.kept
    if found.best is None and found.fastest is not None:
        # The formula can be too careful: simulated runs decide.
        surest = found.fastest_in_budget if objective.budget is not None else found.fastest
        kept = _chance(problem, model, surest or found.fastest)
        if surest is not None and kept is not None and kept >= objective.confidence:
            found.accept(surest)
            by_simulation = True
        elif surest is not found.fastest:
            kept = _chance(problem, model, found.fastest)
    shown = found.best or found.fastest
    notes = tuple(problem.notes)
    if shown is not None:
        notes += _extrapolated(problem.servers, model.evaluators()[shown.variant].servers)
    return replace(_answer(model, found, exact, problem.work, kept, notes), by_simulation=by_simulation)


@dataclass(frozen=True)
class _Attempt:
    """The search with one margin. `kept`: the chance of its best plan; None if nothing of it is random."""

    model: ElasticModel
    found: Found
    exact: bool
    kept: float | None

    @property
    def good(self) -> bool:
        """Whether there is a plan that is sure enough in simulated runs."""
        sure = self.kept is None or self.kept >= self.model.objective.confidence
        return self.found.best is not None and sure


def _attempt(problem: Problem, margin: float, exact_limit: int) -> _Attempt:
    model = ElasticModel(problem, margin)
    found, exact = search(model, exact_limit=exact_limit)
    kept = None if found.best is None else _chance(problem, model, found.best)
    return _Attempt(model, found, exact, kept)


def _cheaper(problem: Problem, good: _Attempt, low: float, high: float, exact_limit: int) -> _Attempt:
    """The good attempt with the smallest margin in (low, high] that a bisection finds; `good` is that of `high`."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        attempt = _attempt(problem, middle, exact_limit)
        low, high, good = (low, middle, attempt) if attempt.good else (middle, high, good)
    return good


def _chance(problem: Problem, model: Model, candidate: Candidate) -> float | None:
    return chance(problem, candidate.counts, model.evaluators()[candidate.variant].servers)


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


def plan_with(model: Model, work: Work, *, exact_limit: int = EXACT_LIMIT, notes: Sequence[str] = ()) -> Plan:
    """Plan with any model of time and cost, such as spotDNN's, without simulation."""
    found, exact = search(model, exact_limit=exact_limit)
    return _answer(model, found, exact, work, None, tuple(notes))


def _answer(
    model: Model, found: Found, exact: bool, work: Work, chance: float | None, notes: tuple[str, ...]
) -> Plan:
    evaluators = model.evaluators()
    fastest, cheapest = found.fastest, found.cheapest
    if fastest is None or cheapest is None:
        raise UsageError(_no_plan_at_all(work))
    shown = found.best or fastest
    sure = chance is not None and chance >= model.objective.confidence
    binding, unlimited = _binding(found, model.objective, shown, sure)
    return Plan(
        pools=tuple(model.pools),
        objective=model.objective,
        work=work,
        feasible=found.best is not None,
        counts=shown.counts,
        servers=evaluators[shown.variant].servers,
        zone=evaluators[shown.variant].zone,
        seconds=shown.seconds,
        sure_seconds=shown.sure_seconds,
        cost=shown.cost,
        iterations=shown.iterations,
        searched=found.searched,
        exact=exact,
        binding=binding,
        chance=chance,
        pareto=_points(found, evaluators),
        unlimited=_point(unlimited, evaluators) if unlimited else None,
        cheapest=_point(cheapest, evaluators),
        fastest=_point(fastest, evaluators),
        notes=notes,
    )


def _binding(
    found: Found, objective: Objective, shown: Candidate, sure: bool
) -> tuple[str | None, Candidate | None]:
    """The constraint that binds, and the plan that would be best without it.

    `sure`: the plan meets the deadline by simulation.
    """
    fastest, cheapest = found.fastest, found.cheapest
    assert fastest is not None
    assert cheapest is not None
    if found.best is None:
        in_time = found.in_time or sure
        if in_time and found.in_budget and objective.deadline and objective.budget:
            if found.feasible == 0:
                return "deadline and budget", found.fastest_in_budget
            return "confidence", None
        if not in_time:
            return "deadline", None
        return ("budget", cheapest) if found.in_budget == 0 else ("confidence", None)
    if objective.prefer == "MinTime":
        better = fastest.seconds < shown.seconds * (1 - 1e-9) and objective.budget is not None
        return ("budget", fastest) if better else (None, None)
    if objective.prefer == "MinCost" and objective.deadline is not None:
        better = cheapest.cost < shown.cost * (1 - 1e-9)
        return ("deadline", cheapest) if better else (None, None)
    return None, None


def _point(candidate: Candidate, evaluators: Sequence[Evaluator]) -> Point:
    return Point(candidate.counts, evaluators[candidate.variant].servers, candidate.seconds, candidate.cost)


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
