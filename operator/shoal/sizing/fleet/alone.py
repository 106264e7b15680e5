"""The plan of one job, in the nodes that others leave: the cheapest one that keeps its limits, or what runs.

What runs is kept unless the gain is sure, and one worker measures a pool where knowing its speed is worth its price.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shoal.errors import UsageError
from shoal.sizing.fleet.answers import answer_of, unplanned
from shoal.sizing.fleet.kept import Asked, Choice, Kept, choice_of
from shoal.sizing.fleet.problems import JobProblem
from shoal.sizing.fleet.values import FleetJob, FleetPool, JobPlan
from shoal.sizing.plan.answer import Plan
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.explain import duration, fleet, money, sentence
from shoal.sizing.plan.planner import exactly, plan
from shoal.sizing.plan.problem import SPENT, Problem
from shoal.sizing.plan.risk import Engines
from shoal.sizing.plan.switch import SURE, gain, is_sure, switch
from shoal.sizing.plan.trial import Trial, worth_measuring
from shoal.sizing.speed.measurements import Basis

__all__ = ["Given", "Solved", "fits", "solve"]

logger = logging.getLogger(__name__)

WELL_KEPT = 0.5
"""A worker is given up if the limits are then missed in up to this part of the runs that may miss them."""


@dataclass(frozen=True)
class Given:
    """What the plans of all jobs rest on. `problem`: that of a job within nodes by pool, if there is one to solve."""

    pools: Sequence[FleetPool]
    problem: Callable[[FleetJob, Mapping[str, int]], JobProblem]
    kept: Kept = field(default_factory=dict)
    """Choices of the plan before."""
    reserves: dict[str, Counter[str]] = field(default_factory=dict)
    """By job: on-demand nodes that it does not use, and counts on where spot nodes run out."""

    @property
    def limits(self) -> dict[str, int]:
        """Nodes by pool."""
        return {pool.name: pool.nodes for pool in self.pools}


@dataclass(frozen=True)
class Solved:
    """A job's plan, and the problem that it solves; None: there was none to solve. No `found`: others leave no room."""

    job: FleetJob
    answer: JobPlan
    one: JobProblem | None = None
    found: Plan | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Workers in the pools of the problem, without one that measures."""
        assert self.one is not None
        if self.found is not None:
            return self.found.counts
        return tuple(self.answer.counts.get(pool.name, 0) for pool in self.one.problem.pools)


def solve(job: FleetJob, left: Mapping[str, int], given: Given, elsewhere: Collection[str] = ()) -> Solved:
    """The plan of a job within the nodes that are `left`; there is an answer whatever the input.

    `elsewhere`: pools in which another job of its model runs, or is to: that one measures them.
    """
    try:
        if not job.fault:
            return _solved(job, left, given, elsewhere)
        fault = job.fault
    except Exception as error:  # broad: a fault in the plan of one job must not stop those of the others
        logger.exception("the plan of %s failed", job.name)
        fault = f"{type(error).__name__}: {error}"
    words = (
        f"A fault of the planner ({fault}): what runs is kept, and at least the workers that it begins with."
    )
    return Solved(job, replace(unplanned(job, given.pools, left, words), fault=fault))


def _solved(job: FleetJob, left: Mapping[str, int], given: Given, elsewhere: Collection[str]) -> Solved:
    if job.model is None or not job.has_work:
        missing = (
            "The model is not known before a worker has reported it"
            if job.model is None
            else f"The work left is not known: {job.work_note or 'the job ends by a metric'}"
        )
        words = f"{missing}: what runs is kept, and at least the workers that it begins with."
        return Solved(job, unplanned(job, given.pools, left, words))
    try:
        one = given.problem(job, left)
    except UsageError as error:
        words = sentence(str(error))
        return _squeezed(job, left, given) or Solved(job, unplanned(job, given.pools, left, words))
    try:
        choice = choice_of(given.kept, job.name, _asked(job, one, elsewhere), _choice)
    except UsageError as error:
        return Solved(job, unplanned(job, given.pools, left, sentence(str(error))))
    answer = answer_of(job, one, choice.found)
    return Solved(job, _with_trial(answer, choice), one, choice.found)


def _squeezed(job: FleetJob, left: Mapping[str, int], given: Given) -> Solved | None:
    """A job to which the others leave too few nodes, and which may trade for some; None: that is not what it lacks."""
    try:
        one = given.problem(job, given.limits)
    except UsageError:
        return None
    nodes = sum(left[pool.name] for pool in one.problem.pools)
    words = f"The other jobs leave {nodes or 'no'} node{'s' if nodes > 1 else ''} for it"
    words += f", and it needs at least {job.min_workers}." if nodes else "."
    return Solved(job, replace(unplanned(job, given.pools, left, words), binding="pools"), one)


def fits(problem: Problem, counts: Sequence[int]) -> bool:
    """Whether a job may run these workers."""
    within = all(n <= pool.nodes for n, pool in zip(counts, problem.pools, strict=True))
    return within and ElasticModel(problem).allows(counts, problem.servers.counts[0])


def _asked(job: FleetJob, one: JobProblem, elsewhere: Collection[str]) -> Asked:
    return Asked(
        one.problem,
        under_way=tuple(job.under_way.get(pool.name, 0) for pool in one.problem.pools),
        measured=one.measured,
        unmeasured=frozenset(
            name for name, basis in one.basis.items() if basis is not Basis.MEASURED and name not in elsewhere
        ),
        begun=frozenset({*job.asked, *(name for name, n in job.running.items() if n)}),
    )


def _choice(asked: Asked) -> Choice:
    """What one job chooses."""
    problem, engines = asked.problem, Engines(asked.problem)
    current = asked.under_way if fits(problem, asked.under_way) else ()
    best = plan(problem, engines=engines, current=current)
    found = _settled(engines, current, best) if current else best
    trial = _trial(asked, found)
    limited = found.feasible and problem.objective.budget is not None and found.aim.prefer != "MinTime"
    if trial is None or not limited:
        return Choice(found, trial)
    paid = _paid(engines, found, trial)
    if not paid.feasible and trial.pool not in asked.begun:
        return Choice(found, None)
    return Choice(replace(found, kept=paid.kept, budget_chance=paid.budget_chance), trial)


def _settled(engines: Engines, current: tuple[int, ...], best: Plan) -> Plan:
    """The best plan, or what runs if it does as well by the limits and the gain is not sure enough to switch."""
    problem, aim = engines.problem, best.aim
    if current == best.counts or best.weighed:
        return best
    change = switch(replace(problem, objective=aim), current, best.counts, best.servers, engines)
    barely = best.feasible and _barely(problem, current, best)
    if not change.kept or (is_sure(change.saved) and not barely):
        return best
    same = exactly(problem, current, engines)
    if same.aim != aim:
        return best
    better = (
        f"would keep the limits in {best.kept:.1%} of the simulated runs, and to give a worker up needs "
        f"{100 * (1 - _may_miss(problem)):.4g}%"
        if barely
        else f"would be better in {gain(change.saved):.0%} of the simulated runs, and a switch needs {SURE:.0%}"
    )
    note = f"What runs is kept: the best plan, {fleet(best.pools, best.counts)}, {better}."
    return replace(same, notes=(*same.notes, note), proved=not best.feasible and best.proved)


def _barely(problem: Problem, current: Sequence[int], best: Plan) -> bool:
    """Whether it has one worker less than what runs, and the next watch of its speed may well find that too few."""
    less = [n - then for n, then in zip(current, best.counts, strict=True)]
    return min(less) >= 0 and sum(less) == 1 and best.kept is not None and 1 - best.kept > _may_miss(problem)


def _may_miss(problem: Problem) -> float:
    """In which part of the runs a plan with one worker less than runs may miss the limits."""
    return WELL_KEPT * (1 - problem.objective.confidence)


def _trial(asked: Asked, found: Plan) -> Trial | None:
    """One worker in a pool that was never measured, where that is worth its price."""
    problem = replace(asked.problem, objective=found.aim)
    if problem.min_workers == problem.max_workers:
        return None
    if found.aim.prefer == "MinTime" and not asked.measured:  # what it is slower than is a guess, too
        return None
    return worth_measuring(problem, found.counts, found.cost, found.seconds, asked.unmeasured, asked.begun)


def _paid(engines: Engines, found: Plan, trial: Trial) -> Plan:
    """The same plan where what a worker measures saves nothing: less of the budget is left for it."""
    problem, objective = engines.problem, engines.problem.objective
    assert objective.budget is not None
    less = replace(objective, budget=max(objective.budget - max(trial.price, 0.0), SPENT))
    return exactly(replace(problem, objective=less), found.counts, engines)


def _with_trial(answer: JobPlan, choice: Choice) -> JobPlan:
    """The plan with the worker that measures."""
    found, trial, pools = choice.found, choice.trial, choice.found.pools
    if trial is None:
        return answer
    left = [pool.name for pool, n, was in zip(pools, trial.counts, found.counts, strict=True) if n < was]
    told = duration if found.aim.prefer == "MinTime" else partial(money, currency="")
    who = f"One worker in place of one from {left[0]}" if left else "One worker more"
    words = (
        f"{who} measures {trial.pool}, where the model never ran: knowing its speed is expected to save "
        f"{told(trial.saving)}, and costs {told(max(trial.price, 0.0))}."
    )
    return replace(
        answer,
        counts={pool.name: n for pool, n in zip(pools, trial.counts, strict=True)},
        reason=f"{answer.reason} {words}",
    )
