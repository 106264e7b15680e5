"""From a problem to a plan: search, then simulate in the order of the objective. There is always an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.engine import TABLE_RUNS, Engine
from shoal.sizing.plan.evaluation import Evaluator, Model
from shoal.sizing.plan.found import Candidate, Found, Shortlist
from shoal.sizing.plan.problem import SCALING_SIGMA, Objective, Pool, Problem, Servers
from shoal.sizing.plan.risk import Checked, Engines, Walk, is_risky
from shoal.sizing.plan.search import EXACT_LIMIT, search
from shoal.sizing.plan.work import LossWork, Work

__all__ = ["Plan", "Point", "exactly", "finite", "nothing", "plan"]

AS_GOOD = 1.05
"""A plan that takes up to this times as long as the fastest one is as fast: speeds are not known any better. Likewise
what costs so much more than the cheapest is as cheap."""
AS_LIKELY = 0.02
"""And it is as likely in time if it is so in up to this part of the simulated runs less often than the likeliest."""
AS_CHEAP = 1.1
"""What runs is left for one that is as fast and as likely only if it costs this many times as much."""
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


def plan(
    problem: Problem,
    *,
    exact_limit: int = EXACT_LIMIT,
    seed: int = 0,
    engines: Engines | None = None,
    current: Sequence[int] = (),
) -> Plan:
    """Plan with Shoal's model. Raises UsageError if no combination is allowed.

    Args:
        problem: what is to be planned.
        exact_limit: the most combinations that are compared one by one.
        seed: of the simulated runs.
        engines: of the problem.
        current: what runs, if anything does. A job that must be late stays there while that is about as good.

    """
    return _planned(problem, partial(search, exact_limit=exact_limit), seed, engines, current)


def exactly(problem: Problem, counts: Sequence[int], seed: int = 0, engines: Engines | None = None) -> Plan:
    """The plan of these workers: no others are compared. Raises UsageError if the job may not have them."""

    def look(model: Model, *, after: float = -math.inf) -> tuple[Found, bool]:
        found = Found(model.problem.objective, len(counts), after=after)
        column = np.array([counts], dtype=np.float64).T
        for variant, evaluator in enumerate(model.evaluators()):
            found.add(column, evaluator(column), variant)
        return found, True

    return replace(_planned(problem, look, seed, engines), given=True, proved=False)


def nothing(problem: Problem) -> Plan:
    """The plan of a job to which others leave no node: what it would need with all of them, and not feasible."""
    none = (0,) * len(problem.pools)
    return replace(plan(problem), feasible=False, counts=none, binding="pools")


class _Look(Protocol):
    """A search, or less than that: what it finds, and whether it has seen all that there is."""

    def __call__(self, model: Model, *, after: float = -math.inf) -> tuple[Found, bool]:
        """See `search`."""
        ...


@dataclass(frozen=True)
class _Tried:
    """What was found for one objective: the best plan that is sure to keep its limits, if any is, and its runs.

    `proved`: everything better was ruled out.
    """

    model: ElasticModel
    found: Found
    walk: Walk
    best: Candidate | None
    checked: Checked | None
    proved: bool
    exact: bool

    def keeps_budget(self, one: Candidate) -> bool:
        """Whether a plan is as sure to keep the budget as the best one."""
        objective = self.model.problem.objective
        if objective.budget is None:
            return True
        if self.checked is None or one.cost > objective.budget:
            return one.cost <= objective.budget
        return self.walk.check(one.counts, one.variant).sure(objective.confidence)


def _planned(
    problem: Problem, look: _Look, seed: int, engines: Engines | None, current: Sequence[int] = ()
) -> Plan:
    objective, engines = problem.objective, engines or Engines(problem)
    first, *others = objective.in_order
    tried = strict = _tried(problem, first, look, seed, engines)
    found, model = strict.found, strict.model
    fastest, cheapest = found.fastest, found.cheapest
    if fastest is None or cheapest is None:
        raise UsageError(_no_plan_at_all(problem.work))
    for aim in others:
        if tried.best is not None:
            break
        tried = _tried(problem, aim, look, seed, engines, strict)
    best, aim = tried.best, tried.model.problem.objective
    assert best is not None, "an objective without limits has a plan"
    weighed = (
        tried is not strict and objective.deadline is not None and "MinCost" in (objective.prefer, aim.prefer)
    )
    if weighed:
        engine = engines.until(best.seconds, runs=TABLE_RUNS, seed=seed)
        best = _about_as_good(tried, best, objective, engine, current)
    evaluators = model.evaluators()
    servers, zone = evaluators[best.variant].servers, evaluators[best.variant].zone
    feasible = tried is strict
    binding, unlimited = _binding(found, fastest, cheapest, objective, best if feasible else None)
    runs = tried.checked if feasible else None
    if runs is None and is_risky(problem, best.counts, servers):
        runs = Walk(model, tried.walk.seconds, seed, engines).check(best.counts, best.variant)

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


def _tried(
    problem: Problem,
    aim: Objective,
    look: _Look,
    seed: int,
    engines: Engines,
    before: _Tried | None = None,
) -> _Tried:
    """The best plan by an objective. `before`: what was found for another one, which has all if there are no limits."""
    margin = NormalDist().inv_cdf(aim.confidence) if aim.limited else 0.0
    model = ElasticModel(replace(problem, objective=aim), margin)
    if before is None or (aim.limited and not aim.is_lost):
        found, exact = look(model)
        best = found.best
    else:
        found, exact = before.found, before.exact
        best = found.fastest if aim.prefer == "MinTime" else found.cheapest
    typical = best or (found.cheapest if aim.deadline is None else found.fastest)
    walk = Walk(model, typical.seconds if typical else 1.0, seed, engines)
    checked, proved = None, exact
    if aim.is_lost:
        best = None
    elif aim.limited and is_risky(problem, [1] * len(problem.pools), max(problem.servers.counts)):
        best, checked, walked = _first_sure(walk, model, found, look)
        proved = exact and walked
    return _Tried(model, found, walk, best, checked, proved, exact)


def _about_as_good(
    tried: _Tried, best: Candidate, objective: Objective, engine: Engine, current: Sequence[int]
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
    points = {Candidate.of(counts, at, evaluators[at](counts), 0) for counts, at in columns} - {best}
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


def _first_sure(
    walk: Walk, model: ElasticModel, found: Found, look: _Look
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
        more, _ = look(model, after=float(shortlist.first[-1]))
        shortlist = more.shortlist
    # What the formula holds to be sure, or else the fastest: the simulation decides.
    for candidate in dict.fromkeys((found.best, found.fastest_in_budget, found.fastest)):
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
