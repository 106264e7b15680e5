"""The planner's answer as the policies hear of it: pure. The planner knows no policies, and they know no planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from shoal.api.elasticity import Stabilization
from shoal.api.planning_status import CoursePoint
from shoal.api.training_job import TrainingJob
from shoal.controllers.planning.trades import Trade
from shoal.policy.model import Proposal, Wish
from shoal.sizing.fleet import JobPlan
from shoal.sizing.speed.measurements import Basis

LONGEST_SECONDS = 100 * 365 * 86400.0
"""What takes longer is told to take so long: no calendar goes far beyond."""


def proposal(
    job: TrainingJob,
    plan: JobPlan,
    trade: Trade,
    now: datetime,
    old: Proposal | None,
    course: Sequence[CoursePoint] = (),
) -> Proposal:
    """What the policies are told of a plan, and of the `course` of the metric that ends the job.

    `trade`: what others give and take by it. `old`: what was proposed before.
    """
    objective = job.spec.elasticity.objective
    limited = objective.deadline_seconds is not None or objective.max_cost is not None
    at_risk = not plan.feasible or (plan.confidence is not None and plan.confidence < objective.confidence)
    finish, low, high = (
        None if each is None else min(each, LONGEST_SECONDS)
        for each in (plan.finish_seconds, plan.finish_low, plan.finish_high)
    )
    counts = {name: count for name, count in plan.counts.items() if count}
    since, before = wished(counts, now, old, job.spec.elasticity.stabilization_seconds)
    return Proposal(
        pools=counts,
        parameter_servers=plan.parameter_servers,
        reason=plan.reason,
        since=since,
        before=before,
        finish_time=None if finish is None else now + timedelta(seconds=finish),
        cost=None if plan.cost is None else plan.cost + plan.spent,
        confidence=plan.confidence,
        feasible=plan.feasible,
        urgent=trade.higher or (limited and at_risk and Basis.MEASURED in plan.basis.values()),
        traded=trade.pools,
        samples_per_second=plan.samples_per_second,
        remaining_seconds=finish,
        remaining_range=None if low is None or high is None else (low, high),
        relative_error=plan.pace.error if plan.pace else None,
        watched_seconds=plan.pace.seconds if plan.pace else None,
        measured=plan.measured,
        basis="; ".join(f"{name}: {basis}" for name, basis in plan.basis.items()),
        course=tuple(course),
        speeds=dict(plan.speeds),
    )


def wished(
    counts: Mapping[str, int], now: datetime, old: Proposal | None, wait: Stabilization
) -> tuple[datetime, tuple[Wish, ...]]:
    """Since when these counts are proposed, and what was before, as far back as a change must last.

    What was first proposed in what is now the future was so by a clock that has been set since: it counts from now on.
    """
    if old is None:
        return now, ()
    wishes = [Wish(min(wish.since, now), wish.pools) for wish in (*old.before, Wish(old.since, old.pools))]
    if old.pools != counts:
        wishes.append(Wish(now, counts))
    *before, newest = wishes
    since = newest.since
    ends = (*(wish.since for wish in before[1:]), since)
    longest = timedelta(seconds=max(wait.up, wait.down))
    return since, tuple(wish for wish, end in zip(before, ends, strict=False) if now - end <= longest)
