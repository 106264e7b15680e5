"""Plan all jobs that share pools: by priority, then by least slack; each sees what the ones before it left.

Where that is dear, or leaves one without the nodes that it needs, they are planned together (`plan_together`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.errors import UsageError
from shoal.sizing.fleet.pace import samples_per_second
from shoal.sizing.fleet.problems import JobProblem, job_problem, unusable
from shoal.sizing.fleet.values import FleetJob, FleetPlan, FleetPool, JobPlan
from shoal.sizing.plan.explain import explain, fleet, money
from shoal.sizing.plan.planner import Plan, plan
from shoal.sizing.plan.problem import Problem, StepWork
from shoal.sizing.plan.switch import SURE, switch_gain
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
    plans: dict[str, JobPlan] = {}
    order = sorted(jobs, key=lambda job: (-job.priority, *_urgency(job, pools, speeds), job.name))
    for job in order:
        planned = _one(job, pools, left, speeds, confidence, seed)
        plans[job.name] = planned
        for name, count in planned.counts.items():
            left[name] = max(left[name] - count, 0)
    plans |= _traded(order, plans, pools, speeds, confidence)
    return FleetPlan({job.name: plans[job.name] for job in jobs})


def _traded(
    order: Sequence[FleetJob],
    plans: dict[str, JobPlan],
    pools: Sequence[FleetPool],
    speeds: SpeedModel,
    confidence: float,
) -> dict[str, JobPlan]:
    """Better plans where a job misses its limits, or pays more, because of what others took that need it less."""
    able = [job for job in order if plans[job.name].finish_seconds is not None]
    kept = all(plans[job.name].feasible for job in able)
    if len(able) < 2 or (kept and not (len(able) <= MOST_TRADERS and _is_contended(able, plans, pools))):
        return {}
    limits = {pool.name: pool.limit for pool in pools}
    for job in order:
        if job not in able:
            for name, count in plans[job.name].counts.items():
                limits[name] -= count
    try:
        problems = [
            job_problem(job, job.model, _work(job), pools, limits, speeds, confidence, spare=SPARE)
            for job in able
            if job.model is not None and job.samples_left is not None
        ]
        found = plan_together(
            [Request(one.problem, job.priority) for job, one in zip(able, problems, strict=True)]
        )
    except UsageError:
        return {}

    def missed(feasible: Sequence[bool]) -> list[tuple[int, int]]:
        levels = sorted({job.priority for job in able}, reverse=True)
        pairs = list(zip(able, feasible, strict=True))
        return [(-level, sum(not ok for job, ok in pairs if job.priority == level)) for level in levels]

    if not all(any(plan.counts) for plan in found):
        return {}
    traded = {
        job.name: _answer(job, one, answer) for job, one, answer in zip(able, problems, found, strict=True)
    }
    then, now = ([each[job.name].feasible for job in able] for each in (traded, plans))
    cost, alone = (sum(each[job.name].cost or 0.0 for job in able) for each in (traded, plans))
    moves, otherwise = (sum(_moved(job, each[job.name]) for job in able) for each in (traded, plans))
    cheaper = cost < (alone if moves < otherwise else (1 - WORTH_A_TRADE) * alone)
    if missed(then) > missed(now) or (missed(then) == missed(now) and not cheaper):
        return {}
    return traded


def _moved(job: FleetJob, plan: JobPlan) -> int:
    """Workers that a plan starts or ends."""
    return sum(
        abs(plan.counts.get(pool, 0) - job.running.get(pool, 0)) for pool in {*plan.counts, *job.running}
    )


def _is_contended(jobs: Sequence[FleetJob], plans: Mapping[str, JobPlan], pools: Sequence[FleetPool]) -> bool:
    """Whether a job uses a dearer pool than one that it names and of which others have all nodes."""
    used = Counter[str]()
    for job in jobs:
        used.update({name: n for name, n in plans[job.name].counts.items() if n})
    full = {pool.name for pool in pools if used[pool.name] >= pool.limit > 0}
    prices = {pool.name: pool.price_per_hour or 0.0 for pool in pools}

    def dear(plan: JobPlan, name: str) -> float:
        return prices[name] / plan.speeds[name] if plan.speeds.get(name) else math.inf

    for job in jobs:
        plan = plans[job.name]
        most = max((dear(plan, name) for name, n in plan.counts.items() if n), default=0.0)
        for name in full.intersection(job.pools):
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
        one = job_problem(job, job.model, _work(job), pools, {p.name: p.limit for p in pools}, speeds, 0.95)
    except UsageError:
        return False, math.inf
    rates = sorted(
        (pool.batch / pool.step_seconds for pool in one.problem.pools for _ in range(pool.limit)),
        reverse=True,
    )
    fastest = sum(rates[: job.max_workers])
    slack = job.deadline_seconds * fastest / max(job.samples_left, 1.0)
    return MEASURED not in one.basis.values(), slack


def _one(
    job: FleetJob,
    pools: Sequence[FleetPool],
    left: dict[str, int],
    speeds: SpeedModel,
    confidence: float,
    seed: int,
) -> JobPlan:
    if job.model is None or job.samples_left is None:
        missing = (
            "The model is not known before a worker has reported it"
            if job.model is None
            else f"The work left is not known: {job.work_note or 'the job ends by a metric'}"
        )
        return _unplanned(
            job, pools, left, f"{missing}: what runs is kept, and at least the workers that it begins with."
        )
    try:
        if job.deadline_seconds is not None and job.deadline_seconds <= 0:
            late = replace(job, deadline_seconds=None, prefer="MinTime")
            return _late(
                _one(late, pools, left, speeds, confidence, seed), "deadline", "The deadline has passed."
            )
        if job.budget_left is not None and job.budget_left <= 0:
            spent = replace(job, budget_left=None)
            return _late(_one(spent, pools, left, speeds, confidence, seed), "budget", "The budget is spent.")
        one = job_problem(job, job.model, _work(job), pools, left, speeds, confidence, spare=SPARE)
        found = _affordable(one.problem, _settled(job, one.problem, plan(one.problem, seed=seed)), seed)
        return _with_trial(job, one, found, _answer(job, one, found))
    except UsageError as error:
        return _unplanned(job, pools, left, f"{str(error)[:1].upper()}{str(error)[1:]}.")


def _settled(job: FleetJob, problem: Problem, best: Plan) -> Plan:
    """The best plan, or what runs if that keeps the limits and the gain is not sure enough to switch."""
    current = tuple(job.running.get(pool.name, 0) for pool in problem.pools)
    within = all(n <= pool.limit for n, pool in zip(current, problem.pools, strict=True))
    if current == best.counts or not any(current) or not within or not best.feasible:
        return best
    if sum(current) < job.min_workers or sum(current) > job.max_workers:
        return best
    gain, kept = switch_gain(problem, current, best.counts, best.servers)
    if not kept or gain >= SURE:
        return best
    pools = tuple(replace(pool, limit=n) for pool, n in zip(problem.pools, current, strict=True))
    same = plan(replace(problem, pools=pools, min_workers=sum(current)))
    if not same.feasible:
        return best
    note = (
        f"What runs is kept: the best plan, {fleet(best.pools, best.counts)}, would be better in {gain:.0%} of the "
        f"simulated runs, and a switch needs {SURE:.0%}."
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
    pools = tuple(replace(pool, limit=n) for pool, n in zip(problem.pools, cheapest.counts, strict=True))
    instead = plan(replace(problem, pools=pools, min_workers=sum(cheapest.counts)), seed=seed)
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
        relative_error=one.error,
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


def _unplanned(job: FleetJob, pools: Sequence[FleetPool], left: dict[str, int], reason: str) -> JobPlan:
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
        relative_error=None,
        basis="nothing",
    )


def fleet_of(counts: dict[str, int]) -> str:
    """'Run 2 workers from a and 1 from b.'"""
    used = [f"{n} from {name}" for name, n in counts.items() if n]
    return f"Run {' and '.join(used)}." if used else "Run no worker."
