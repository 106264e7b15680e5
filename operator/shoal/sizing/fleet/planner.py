"""Plan all jobs that share pools: by priority, then least slack, then age; each sees what the ones before it left.

Who is in time with what it runs goes first: those that wait have less slack, would take its nodes, and soon it theirs.
Who is late with all nodes comes after those that may be in time, or one late job would make the next one late. Where
that is dear, or leaves one without the nodes that it needs, they are planned together (`joint.py`).
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

import numpy as np

from shoal.errors import Interrupted, UsageError
from shoal.sizing.fleet.alone import Given, Solved, solve
from shoal.sizing.fleet.answers import answer_of
from shoal.sizing.fleet.floors import Floors
from shoal.sizing.fleet.joint import better_together
from shoal.sizing.fleet.kept import Kept
from shoal.sizing.fleet.moves import Move, reached
from shoal.sizing.fleet.pace import samples_per_second
from shoal.sizing.fleet.problems import JobProblem, job_problem
from shoal.sizing.fleet.shares import Shares
from shoal.sizing.fleet.values import FleetJob, FleetPlan, FleetPool, JobPlan
from shoal.sizing.plan.answer import Plan
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.planner import exactly, nothing
from shoal.sizing.plan.problem import Pool, Problem
from shoal.sizing.speed.measurements import Profile
from shoal.sizing.speed.model import fitted

__all__ = ["plan_fleet", "plan_problems"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

NOT_URGENT = True, True, math.inf
LATE = sys.float_info.max
"""The slack of a job that is late with all nodes: it leaves those that may be in time what they need, and goes before
those without a deadline."""
SPARE = 0.1
"""What a running job with spot workers gains by ending early, as a part of its cost: see `Objective.spare`."""


def plan_fleet(
    pools: Sequence[FleetPool],
    profiles: Sequence[Profile],
    jobs: Sequence[FleetJob],
    *,
    kept: Kept | None = None,
    told: Callable[[str, JobPlan], None] = lambda _name, _plan: None,
    between: Callable[[], None] = lambda: None,
) -> FleetPlan:
    """The counts of every job, each with a reason. There is an answer for every job, whatever its input.

    A profile that makes the predictor fail is left out, and named in the answer.

    Args:
        pools: all pools that any of the jobs names.
        profiles: everything measured, of all models.
        jobs: all jobs that share the pools.
        kept: choices of the plan before, and afterwards of this one; with the same input, the answer is the same.
        told: hears of each job's plan as it is made, before jobs trade; all together are within the limits.
        between: called again and again while jobs trade, and may raise `Interrupted`, as `told` may.

    """
    kept = {} if kept is None else kept
    for gone in kept.keys() - {job.name for job in jobs}:
        del kept[gone]
    speeds, left_out = fitted(profiles, {_model(job) for job in jobs})

    reserves = dict[str, Counter[str]]()

    def problem(job: FleetJob, limits: Mapping[str, int]) -> JobProblem:
        promised = Counter[str]()
        for each in (reserve for name, reserve in reserves.items() if name != job.name):
            promised.update(each)
        return job_problem(job, pools, limits, speeds, spare=SPARE, promised=promised)

    planned = _planned(jobs, Given(pools, problem, kept, reserves), told, between)
    return FleetPlan({each.job.name: each.answer for each in planned}, tuple(left_out), speeds.left_out)


def plan_problems(pools: Sequence[FleetPool], jobs: Sequence[tuple[FleetJob, JobProblem]]) -> list[Plan]:
    """The plans of jobs whose problems were made for them as if each were alone; in the same order.

    One for which the others leave no node gets that of all nodes, without a worker and not feasible.
    """
    named = {f"{n:04}": (replace(job, name=f"{n:04}"), one) for n, (job, one) in enumerate(jobs)}

    def problem(job: FleetJob, limits: Mapping[str, int]) -> JobProblem:
        _, one = named[job.name]
        return replace(one, problem=one.problem.within(limits))

    planned = _planned([job for job, _ in named.values()], Given(pools, problem))
    return [each.found or nothing(one.problem) for each, (_, one) in zip(planned, jobs, strict=True)]


def _planned(
    jobs: Sequence[FleetJob],
    given: Given,
    told: Callable[[str, JobPlan], None] = lambda _name, _plan: None,
    between: Callable[[], None] = lambda: None,
) -> list[Solved]:
    """The plans of all jobs, in the same order."""
    left = given.limits
    alone: dict[str, Solved] = {}
    urgency = {job.name: _otherwise(NOT_URGENT, _urgency, job, given) for job in jobs}
    order = sorted(jobs, key=lambda job: (-job.priority, *urgency[job.name], *_age(job)))
    late = {name for name, (*_, slack) in urgency.items() if slack == LATE}
    last = {name for name, each in urgency.items() if each >= (True, False, LATE)}
    shares = _otherwise(None, Shares, order, given, last, late)
    first = dict[tuple[str, str], str]()  # by model and pool: the job that measures it for the others
    for job in order:
        for name in _used(job.holds(job.under_way)):
            first.setdefault((_model(job), name), job.name)
    floors = Floors(order, given.pools)
    in_time = {name for name, (behind, *_) in urgency.items() if not behind}
    for job in order:
        if job.name in in_time:  # none of them takes what another needs, only to end sooner
            level = [each for each in order if each.priority == job.priority and each.name in in_time]
            in_time -= {each.name for each in level}
            floors.keep(level, left)
        if shares is not None:
            _otherwise(None, shares.leave, job, floors, left)
        elsewhere = {name for (model, name), by in first.items() if model == _model(job) and by != job.name}
        alone[job.name] = solved = solve(job, floors.room(job, left), given, elsewhere)
        holds = job.holds(solved.answer.counts)
        for name in _used(holds):
            if name in left:
                left[name] = max(left[name] - holds[name], 0)
            first.setdefault((_model(job), name), job.name)
        if reserve := _reserve_of(solved):
            given.reserves[job.name] = reserve
        told(job.name, solved.answer)
    best = [alone[job.name] for job in order]
    chosen = alone | _otherwise({}, better_together, best, given, between, late)
    plans = [chosen[job.name] for job in jobs]
    return _otherwise(plans, _within_reach, plans, given.limits)


def _reserve_of(solved: Solved) -> Counter[str]:
    """On-demand nodes that a job with spot workers counts on, beyond those that it uses."""
    if solved.one is None or solved.job.is_held:
        return Counter()
    problem = solved.one.problem
    spot = {pool: n for pool, n in zip(problem.pools, solved.counts, strict=True) if n and pool.spot}
    if not spot:
        return Counter()
    if bought := sum(n for pool, n in spot.items() if problem.instead_of(pool) is not None):
        return Counter({problem.fallback: bought})
    return Counter(solved.one.reserve) - Counter(solved.answer.counts)


def _used(counts: Mapping[str, int]) -> list[str]:
    return [name for name, n in counts.items() if n]


def _model(job: FleetJob) -> str:
    return job.model.key if job.model is not None else ""


def _otherwise(fallback: T, improve: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What improves the plans, or the plans as they are where that fails."""
    try:
        return improve(*args, **kwargs)
    except Interrupted:
        raise
    except Exception:  # broad: each job has a plan without it
        logger.exception("plans of several jobs together failed")
        return fallback


def _within_reach(plans: Sequence[Solved], limits: Mapping[str, int]) -> list[Solved]:
    """The plans; of jobs that would wait for each other for ever, what they get on the way."""
    moves = [
        Move(each.job.holds(each.job.under_way), each.job.holds(each.answer.counts), each.job.floor)
        for each in plans
    ]
    ends = reached(moves, limits)
    return [
        each
        if each.job.is_held or +has == +Counter(move.then)
        else _stopped(each, has + Counter(each.job.in_vain))
        for each, move, has in zip(plans, moves, ends, strict=True)
    ]


def _stopped(planned: Solved, has: Mapping[str, int]) -> Solved:
    """A job's plan with what it has where it gets no farther."""
    if planned.one is None:
        return planned
    problem = planned.one.problem
    counts = [has.get(pool.name, 0) for pool in problem.pools]
    try:
        found = exactly(replace(problem, min_workers=min(problem.min_workers, sum(counts))), counts)
    except UsageError:
        return planned
    note = "It would change places with another job, and neither can spare a worker meanwhile: it stays."
    found = replace(found, notes=(*found.notes, note))
    return replace(planned, found=found, answer=answer_of(planned.job, planned.one, found))


def _age(job: FleetJob) -> tuple[bool, str, str]:
    """Of equal jobs, the one that was made first goes first, or who waits would wait for each that comes."""
    return not job.created, job.created, job.name


def _urgency(job: FleetJob, given: Given) -> tuple[bool, bool, float]:
    """Whether a job is late with what it runs; whether its speed was never measured; and its slack.

    That is the time to the deadline, over the least that the job takes. What is known to need a pool goes before what
    is only thought to.
    """
    if job.model is None or not job.has_work:
        return NOT_URGENT
    try:
        one = given.problem(job, given.limits)
    except UsageError:
        return NOT_URGENT
    behind = job.deadline_seconds is None or not _in_time(job, one.problem, job.deadline_seconds)
    samples = job.samples_left
    if samples is None and job.steps_left is not None:
        samples = job.steps_left * job.batch_size
    if job.deadline_seconds is None or samples is None:
        return behind, not one.measured, math.inf
    slack = job.deadline_seconds * _fastest(one.problem, job.max_workers) / max(samples, 1.0)
    return behind, not one.measured, slack if slack >= 1 else LATE


def _fastest(problem: Problem, most: int) -> float:
    """Samples a second of the fastest workers, as far as the servers let them, or of those with the largest batches.

    Servers limit steps, not samples: behind full ones, these do more.
    """
    return max(
        samples_per_second(problem, _first_of(problem, most, order), servers)
        for order in (_by_speed, _by_batch)
        for servers in problem.servers.counts
    )


def _first_of(problem: Problem, most: int, order: Callable[[Pool], tuple[float, ...]]) -> list[int]:
    """So many workers, of the pools that are first in an order."""
    counts = [0] * len(problem.pools)
    for at in sorted(range(len(counts)), key=lambda at: order(problem.pools[at]), reverse=True):
        counts[at] = min(problem.pools[at].nodes, most - sum(counts))
    return counts


def _by_speed(pool: Pool) -> tuple[float, ...]:
    return (pool.samples_per_second,)


def _by_batch(pool: Pool) -> tuple[float, ...]:
    return pool.batch, pool.samples_per_second


def _in_time(job: FleetJob, problem: Problem, deadline: float) -> bool:
    """Whether a job is surely in time with the workers that it has, or is on its way to."""
    counts = [min(job.under_way.get(pool.name, 0), pool.nodes) for pool in problem.pools]
    if not any(counts):
        return False
    column = np.array([counts], dtype=np.float64).T
    evaluators = ElasticModel(problem, problem.objective.margin).evaluators()
    return any(float(each(column).sure_seconds[0]) <= deadline for each in evaluators)
