"""Plan all jobs that share pools: by priority, then by least slack; each sees what the ones before it left.

Where that is dear, or leaves one without the nodes that it needs, they are planned together (`plan_together`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.fleet.pace import samples_per_second
from shoal.sizing.fleet.problems import JobProblem, job_problem, unusable
from shoal.sizing.fleet.values import FleetJob, FleetPlan, FleetPool, JobPlan
from shoal.sizing.plan.explain import explain, fleet, money
from shoal.sizing.plan.planner import Plan, plan
from shoal.sizing.plan.problem import Problem, StepWork
from shoal.sizing.plan.switch import SURE, gain, is_sure, switch
from shoal.sizing.plan.together import Request, plan_together
from shoal.sizing.plan.trial import worth_measuring
from shoal.sizing.speed.measurements import MEASURED, Profile
from shoal.sizing.speed.model import SpeedModel

__all__ = ["plan_fleet"]

SPARE = 0.1
"""What a running job with spot workers gains by ending early, as a part of its cost: see `Objective.spare`."""
AS_FAST = 1.05
"""A plan that takes up to this times as long as the fastest one is as fast: speeds are not known any better."""
WORTH_A_TRADE = 0.1
"""Jobs trade pools where all of them together then cost less by this part, since less is not known any better; or less
at all, if that moves fewer workers: what was traded stays so."""
MOST_TRADERS = 8
"""Of more jobs no cheaper trade is looked for: it takes a third of a second for each, once a minute."""
WORTH_A_SERVER = 0.1
"""One more parameter server is worth a word if it makes the job faster by this part."""


def plan_fleet(
    pools: Sequence[FleetPool],
    profiles: Sequence[Profile],
    jobs: Sequence[FleetJob],
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> FleetPlan:
    """The counts of every job, each with a reason. There is an answer for every job, whatever its input.

    Args:
        pools: all pools that any of the jobs names.
        profiles: everything measured, of all models.
        jobs: all jobs that share the pools.
        confidence: probability with which deadlines and budgets are to be kept.
        seed: of the simulated runs.

    """
    speeds = SpeedModel(profiles)
    left = {pool.name: pool.limit for pool in pools}
    alone: dict[str, _Solved] = {}
    order = sorted(jobs, key=lambda job: (-job.priority, *_urgency(job, pools, speeds), job.name))
    for job in order:
        alone[job.name] = solved = _one(job, pools, left, speeds, confidence, seed)
        for name, count in solved.answer.counts.items():
            left[name] = max(left[name] - count, 0)
    chosen = alone | _together([alone[job.name] for job in order], pools, speeds, confidence)
    return FleetPlan({job.name: chosen[job.name].answer for job in jobs})


@dataclass(frozen=True)
class _Solved:
    """A job's plan, and the problem that it solves; None: there was none to solve."""

    job: FleetJob
    answer: JobPlan
    one: JobProblem | None = None
    found: Plan | None = None


def _together(
    order: Sequence[_Solved], pools: Sequence[FleetPool], speeds: SpeedModel, confidence: float
) -> dict[str, _Solved]:
    """What is better than the jobs' own plans, one after another: a trade between them, or what is planned already."""
    able = [each for each in order if each.found is not None]
    if len(able) < 2:
        return {}
    limits = {pool.name: pool.limit for pool in pools}
    for each in order:
        if each.found is None:
            for name, count in each.answer.counts.items():
                limits[name] = max(limits[name] - count, 0)
    try:
        problems = [_problem(each.job, pools, limits, speeds, confidence) for each in able]
        best = _traded(able, problems, pools) or able
        best = _kept(best, problems, limits) or best
    except UsageError:
        return {}
    return {each.job.name: each for each in best}


def _traded(
    alone: Sequence[_Solved], problems: Sequence[JobProblem], pools: Sequence[FleetPool]
) -> list[_Solved] | None:
    """Better plans where a job misses its limits, or pays more, because of what others took that need it less."""
    kept = all(each.answer.feasible for each in alone)
    if kept and not (len(alone) <= MOST_TRADERS and _is_contended(alone, pools)):
        return None
    requests = [Request(one.problem, each.job.priority) for each, one in zip(alone, problems, strict=True)]
    found = plan_together(requests)
    if not all(any(plan.counts) for plan in found):
        return None
    traded = [
        _Solved(each.job, _answer(each.job, one, plan), one, plan)
        for each, one, plan in zip(alone, problems, found, strict=True)
    ]
    if _missed(traded) != _missed(alone):
        return traded if _missed(traded) < _missed(alone) else None
    cost, before = (sum(each.answer.cost or 0.0 for each in plans) for plans in (traded, alone))
    moves, otherwise = (sum(_moved(each.job, each.answer) for each in plans) for plans in (traded, alone))
    return traded if cost < (before if moves < otherwise else (1 - WORTH_A_TRADE) * before) else None


def _missed(plans: Sequence[_Solved]) -> list[int]:
    """How many jobs miss their limits, those of higher priority first."""
    levels = sorted({each.job.priority for each in plans}, reverse=True)
    return [
        sum(each.job.priority == level and not each.answer.feasible for each in plans) for level in levels
    ]


def _kept(
    best: Sequence[_Solved], problems: Sequence[JobProblem], limits: Mapping[str, int]
) -> list[_Solved] | None:
    """The plans that are being carried out, where they fit, keep all limits, and the best are not surely better.

    Together: what one job gains by nodes of another is no gain if that one loses as much.
    """
    plans, saved = list[_Solved](), np.zeros(1)
    for each, one in zip(best, problems, strict=True):
        counts = [_current(each.job).get(pool.name, 0) for pool in one.problem.pools]
        if each.found is None or not _fits(each.job, one.problem, counts):
            return None
        if tuple(counts) == each.found.counts:
            plans.append(each)
            continue
        change = switch(one.problem, counts, each.found.counts, each.found.servers)
        same = _exactly(one.problem, counts)
        if not (change.kept and same.feasible):
            return None
        saved = saved + change.saved
        plans.append(_Solved(each.job, _answer(each.job, one, same), one, same))
    used = Counter[str]()
    for each in plans:
        used.update(each.answer.counts)
    if is_sure(saved) or any(n > limits[name] for name, n in used.items()):
        return None
    return plans


def _moved(job: FleetJob, plan: JobPlan) -> int:
    """Workers that a plan starts or ends."""
    return sum(
        abs(plan.counts.get(pool, 0) - job.running.get(pool, 0)) for pool in {*plan.counts, *job.running}
    )


def _is_contended(plans: Sequence[_Solved], pools: Sequence[FleetPool]) -> bool:
    """Whether a job uses a dearer pool than one that it names and of which others have all nodes."""
    used = Counter[str]()
    for each in plans:
        used.update(each.answer.counts)
    full = {pool.name for pool in pools if used[pool.name] >= pool.limit > 0}
    prices = {pool.name: pool.price_per_hour or 0.0 for pool in pools}

    def dear(plan: JobPlan, name: str) -> float:
        return prices[name] / plan.speeds[name] if plan.speeds.get(name) else math.inf

    for each in plans:
        plan = each.answer
        most = max((dear(plan, name) for name, n in plan.counts.items() if n), default=0.0)
        for name in full.intersection(each.job.pools):
            if plan.counts.get(name, 0) < used[name] and dear(plan, name) < most:
                return True
    return False


def _urgency(job: FleetJob, pools: Sequence[FleetPool], speeds: SpeedModel) -> tuple[bool, float]:
    """Whether the job's speed was never measured; and the time to the deadline, over the least that the job takes.

    What is known to need a pool goes before what is only thought to.
    """
    if job.deadline_seconds is None or job.model is None or job.samples_left is None:
        return False, math.inf
    try:
        one = _problem(job, pools, {p.name: p.limit for p in pools}, speeds, 0.95)
    except UsageError:
        return False, math.inf
    rates = sorted(
        (pool.batch / pool.step_seconds for pool in one.problem.pools for _ in range(pool.limit)),
        reverse=True,
    )
    fastest = sum(rates[: job.max_workers])
    slack = job.deadline_seconds * fastest / max(job.samples_left, 1.0)
    return MEASURED not in one.basis.values(), slack


def _problem(
    job: FleetJob,
    pools: Sequence[FleetPool],
    limits: Mapping[str, int],
    speeds: SpeedModel,
    confidence: float,
) -> JobProblem:
    """The problem of a job whose model and work are known."""
    assert job.model is not None
    return job_problem(job, job.model, _work(job), pools, limits, speeds, confidence, spare=SPARE)


def _one(
    job: FleetJob,
    pools: Sequence[FleetPool],
    left: Mapping[str, int],
    speeds: SpeedModel,
    confidence: float,
    seed: int,
) -> _Solved:
    if job.model is None or job.samples_left is None:
        missing = (
            "The model is not known before a worker has reported it"
            if job.model is None
            else f"The work left is not known: {job.work_note or 'the job ends by a metric'}"
        )
        words = f"{missing}: what runs is kept, and at least the workers that it begins with."
        return _Solved(job, _unplanned(job, pools, left, words))
    for limit, value, words in (
        ("deadline", job.deadline_seconds, "The deadline has passed."),
        ("budget", job.budget_left, "The budget is spent."),
    ):
        if value is not None and value <= 0:
            faster = {"deadline_seconds": None, "prefer": "MinTime"}
            without = replace(job, **(faster if limit == "deadline" else {"budget_left": None}))
            return _Solved(
                job, _late(_one(without, pools, left, speeds, confidence, seed).answer, limit, words)
            )
    try:
        one = _problem(job, pools, left, speeds, confidence)
        found = _affordable(one.problem, _settled(job, one.problem, plan(one.problem, seed=seed)), seed)
        return _Solved(job, _with_trial(job, one, found, _answer(job, one, found)), one, found)
    except UsageError as error:
        return _Solved(job, _unplanned(job, pools, left, f"{str(error)[:1].upper()}{str(error)[1:]}."))


def _current(job: FleetJob) -> Mapping[str, int]:
    """What the job runs, or is on its way to."""
    return job.planned or job.running


def _fits(job: FleetJob, problem: Problem, counts: Sequence[int]) -> bool:
    """Whether a job may run these workers."""
    within = all(n <= pool.limit for n, pool in zip(counts, problem.pools, strict=True))
    return within and max(job.min_workers, 1) <= sum(counts) <= job.max_workers


def _exactly(problem: Problem, counts: Sequence[int], seed: int = 0) -> Plan:
    """The plan of these workers."""
    pools = tuple(replace(pool, limit=n) for pool, n in zip(problem.pools, counts, strict=True))
    return plan(replace(problem, pools=pools, min_workers=sum(counts)), seed=seed)


def _settled(job: FleetJob, problem: Problem, best: Plan) -> Plan:
    """The best plan, or what runs if that keeps the limits and the gain is not sure enough to switch."""
    current = tuple(_current(job).get(pool.name, 0) for pool in problem.pools)
    if current == best.counts or not best.feasible or not _fits(job, problem, current):
        return best
    change = switch(problem, current, best.counts, best.servers)
    if not change.kept or is_sure(change.saved):
        return best
    same = _exactly(problem, current)
    if not same.feasible:
        return best
    note = (
        f"What runs is kept: the best plan, {fleet(best.pools, best.counts)}, would be better in "
        f"{gain(change.saved):.0%} of the simulated runs, and a switch needs {SURE:.0%}."
    )
    return replace(same, notes=(*same.notes, note))


def _affordable(problem: Problem, found: Plan, seed: int) -> Plan:
    """Where nothing keeps the limits for sure, not the very fastest plan but the cheapest that is as fast."""
    if found.feasible or problem.objective.prefer != "MinCost":
        return found
    near = [point for point in found.pareto if point.seconds <= AS_FAST * found.fastest.seconds]
    cheapest = min(near, key=lambda point: point.cost, default=None)
    if cheapest is None or cheapest.counts == found.counts:
        return found
    instead = _exactly(problem, cheapest.counts, seed)
    note = f"The very fastest, {fleet(found.pools, found.counts)}, would cost {money(found.cost, '')}."
    return replace(instead, notes=(*instead.notes, note))


def _with_trial(job: FleetJob, one: JobProblem, found: Plan, answer: JobPlan) -> JobPlan:
    """The plan, with one worker more in a pool that was never measured where that is worth its price."""
    unmeasured = {name for name, basis in one.basis.items() if basis != MEASURED}
    if not found.feasible or job.min_workers == job.max_workers:
        return answer
    begun = {*job.asked, *(name for name, n in job.running.items() if n)}
    trial = worth_measuring(one.problem, found.counts, found.cost, found.seconds, unmeasured, begun)
    if trial is None:
        return answer
    price = next(pool.price for pool in one.problem.pools if pool.name == trial.pool)
    words = (
        f"One worker more measures {trial.pool}, where the model never ran: knowing its speed is expected to save "
        f"{money(trial.saving, '')}, and costs {money(max(trial.price, 0.0), '')}."
    )
    return replace(
        answer,
        counts={**answer.counts, trial.pool: 1},
        cost_per_hour=answer.cost_per_hour + price,
        reason=f"{answer.reason} {words}",
    )


def _work(job: FleetJob) -> StepWork:
    left = max(job.samples_left or 0.0, 1.0)
    return StepWork(samples=left, sigma=job.samples_sigma, efficiency=job.efficiency, beside=job.beside)


def _late(found: JobPlan, binding: str, words: str) -> JobPlan:
    return replace(found, feasible=False, binding=binding, confidence=0.0, reason=f"{words} {found.reason}")


def _answer(job: FleetJob, one: JobProblem, found: Plan) -> JobPlan:
    problem = one.problem
    low, high = found.finish or (found.seconds, found.seconds)
    used = [(pool.name, n) for pool, n in zip(problem.pools, found.counts, strict=True)]
    hourly = sum(pool.price * n for pool, n in zip(problem.pools, found.counts, strict=True))
    expected = samples_per_second(problem, found.counts)
    if job.beside is not None:
        expected *= job.beside.share_of_steps(max(sum(found.counts), 1))
    return JobPlan(
        counts=dict(used),
        parameter_servers=found.servers,
        finish_seconds=found.seconds,
        finish_low=min(low, found.seconds),
        finish_high=max(high, found.seconds),
        cost=found.cost,
        cost_per_hour=hourly,
        confidence=found.chance,
        feasible=found.feasible,
        binding=found.binding,
        reason=" ".join(
            [explain(found, ""), *one.notes, *_efficiency(job, sum(found.counts)), *_servers(problem, found)]
        ),
        samples_per_second=expected,
        pace=one.pace,
        basis="; ".join(f"{name}: {one.basis[name]}" for name, n in used if n),
        speeds={pool.name: pool.batch / pool.step_seconds for pool in problem.pools},
    )


def _servers(problem: Problem, found: Plan) -> list[str]:
    """A sentence where the parameter servers hold the workers of a plan back, and what one more would bring."""
    now, more = (samples_per_second(problem, found.counts, found.servers + extra) for extra in (0, 1))
    if more < (1 + WORTH_A_SERVER) * now:
        return []
    return [
        f"The parameter servers are the limit: {found.servers + 1} in place of {found.servers} would make "
        f"{more:,.0f} samples/s of {now:,.0f}; set parameterServers.replicas."
    ]


def _efficiency(job: FleetJob, workers: int) -> list[str]:
    """Sentences on a job that ends by a metric: what is left, and what its workers cost in samples."""
    if not job.work_note:
        return []
    said = [f"{job.work_note[:1].upper()}{job.work_note[1:]}."]
    if job.efficiency is not None and workers > 1:
        alone = replace(job.efficiency, reference=1.0)
        low, middle, high = (float(alone.factor(workers, z)) for z in (-1.6449, 0.0, 1.6449))
        said.append(
            f"To the same value {workers} workers need {middle:.1f} times the samples of one ({low:.1f} to {high:.1f})."
        )
    return said


def _unplanned(job: FleetJob, pools: Sequence[FleetPool], left: Mapping[str, int], reason: str) -> JobPlan:
    """What runs, and at least the workers that the job requires, in its order of preference."""
    by_name = {pool.name: pool for pool in pools}
    usable = [name for name in job.pools if name in by_name and unusable(by_name[name]) is None]
    named = usable or [name for name in job.pools if name in by_name]
    counts = {name: min(job.running.get(name, 0), left[name]) for name in named}
    for name in named:
        room = 0 if by_name[name].exhausted else left[name] - counts[name]
        counts[name] += max(0, min(job.min_workers - sum(counts.values()), room))
    hourly = sum((by_name[name].price_per_hour or 0.0) * n for name, n in counts.items())
    return JobPlan(
        counts=counts,
        parameter_servers=job.parameter_servers,
        finish_seconds=None,
        finish_low=None,
        finish_high=None,
        cost=None,
        cost_per_hour=hourly,
        confidence=None,
        feasible=False,
        binding=None,
        reason=f"{reason} {fleet_of(counts)}",
        samples_per_second=None,
        pace=job.pace_before,
        basis="nothing",
    )


def fleet_of(counts: dict[str, int]) -> str:
    """'Run 2 workers from a and 1 from b.'"""
    used = [f"{n} from {name}" for name, n in counts.items() if n]
    return f"Run {' and '.join(used)}." if used else "Run no worker."
