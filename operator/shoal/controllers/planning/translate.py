"""Custom resources and reports as the planner's values: pure, and nothing here raises for what a user wrote.

The planner (`shoal.sizing.fleet`) knows neither Kubernetes nor pydantic; the policies know no planner. What they share
goes through here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from shoal.api.base import ObjectMeta
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node, Pod
from shoal.api.speed_profile import SpeedProfile, SpeedProfileStatus
from shoal.api.training_job import TrainingJob
from shoal.errors import UsageError
from shoal.policy.model import Proposal
from shoal.sizing.beside import Beside
from shoal.sizing.fleet import FleetJob, FleetPool, JobPlan, Model, Pace, Profile, Watched, resources
from shoal.sizing.fleet.resources import decimal, fleet_pool, profile_of
from shoal.sizing.speed.measurements import MEASURED
from shoal_trainer.contract import StatusReport

URGENT_CONFIDENCE = 0.95
"""A deadline that is kept with less confidence is at risk."""
LONGEST_SECONDS = 100 * 365 * 86400.0
"""What takes longer is told to take so long: no calendar goes far beyond."""
END_SECONDS = 10.0
"""Kept free before a deadline: after the last step come the last snapshot and the export of the model."""


def pool_values(pool: CapacityPool, nodes: Sequence[Node], now: datetime | None = None) -> FleetPool:
    """A pool; `nodes` are those that it selects, of which the cores are read where the spec does not say them.

    Of one whose description is wrong, nothing is used.
    """
    values = fleet_pool(pool, now)
    conditions = pool.status.conditions
    invalid = any(c.type == "Ready" and c.status == "False" and c.reason != "NoPrice" for c in conditions)
    cores = values.cores or max((node.status.allocatable.cores for node in nodes), default=0.0)
    return replace(values, cores=cores, limit=0 if invalid else values.limit)


def profile_values(profile: SpeedProfile | None, status: SpeedProfileStatus, now: datetime) -> Profile | None:
    """What is known of one model, with what was learned since it was written. None where nothing usable is."""
    return profile_of(_with_status(profile, status), now, strict=False)


def _with_status(profile: SpeedProfile | None, status: SpeedProfileStatus) -> SpeedProfile:
    return (profile or SpeedProfile(metadata=ObjectMeta())).model_copy(update={"status": status})


def fleet_job(
    job: TrainingJob,
    model: Model | None,
    report: StatusReport | None,
    samples_per_epoch: int | None,
    pods: Iterable[Pod],
    now: datetime,
    watched: Watched,
    beside: Beside | None = None,
) -> FleetJob:
    """A job. One whose workers nobody plans (mode Off or Manual) is planned with the number that it has."""
    spec, status = job.spec, job.status
    chooses = spec.elasticity.mode in {"Advise", "Auto"}
    replicas = spec.workers.replicas
    objective = spec.elasticity.objective
    spent = decimal(status.cost.accumulated) if status.cost else 0.0
    left = _samples_left(job, report, samples_per_epoch)
    known = chooses and model is not None and left is not None  # else it runs with its replicas for now
    return FleetJob(
        name=job_name(job),
        priority=max((pod.spec.priority for pod in pods), default=0),
        model=model,
        samples_left=left,
        beside=beside,
        batch_size=spec.training.batch_size,
        batch_sizes={each.accelerator: each.batch_size for each in spec.training.batch_sizes},
        pools=tuple(spec.workers.pools),
        min_workers=spec.workers.min_replicas if known else replicas,
        max_workers=max(1, (spec.workers.max_replicas or replicas) if chooses else replicas),
        on_demand_base=spec.workers.on_demand_base,
        zone_policy=spec.workers.zone_policy,
        parameter_servers=spec.parameter_servers.replicas,
        running=running(job),
        planned=status.plan.pools if spec.elasticity.mode == "Auto" and status.plan is not None else {},
        asked=asked(job),
        deadline_seconds=_deadline(job, now),
        budget_left=None if objective.max_cost is None else float(objective.max_cost) - spent,
        prefer=objective.prefer,
        spent=spent,
        now=watched,
        pace_before=_pace_before(job),
    )


def proposal(job: TrainingJob, plan: JobPlan, now: datetime, since: datetime) -> Proposal:
    """What the policies are told of a plan."""
    objective = job.spec.elasticity.objective
    limited = objective.deadline_seconds is not None or objective.max_cost is not None
    at_risk = not plan.feasible or (plan.confidence is not None and plan.confidence < URGENT_CONFIDENCE)
    spent = decimal(job.status.cost.accumulated) if job.status.cost else 0.0
    finish, low, high = (
        None if each is None else min(each, LONGEST_SECONDS)
        for each in (plan.finish_seconds, plan.finish_low, plan.finish_high)
    )
    return Proposal(
        pools={name: count for name, count in plan.counts.items() if count},
        parameter_servers=plan.parameter_servers,
        reason=plan.reason,
        since=since,
        finish_time=None if finish is None else now + timedelta(seconds=finish),
        cost=None if plan.cost is None else plan.cost + spent,
        confidence=plan.confidence,
        feasible=plan.feasible,
        urgent=limited and at_risk and MEASURED in plan.basis,
        samples_per_second=plan.samples_per_second,
        remaining_seconds=finish,
        remaining_range=None if low is None or high is None else (low, high),
        relative_error=plan.pace.error if plan.pace else None,
        watched_seconds=plan.pace.seconds if plan.pace else None,
        measured=MEASURED in plan.basis,
        basis=plan.basis,
        speeds=dict(plan.speeds),
    )


def unreadable(job: TrainingJob, fault: str) -> FleetJob:
    """A job of which the operator fails to read more than this."""
    replicas = job.spec.workers.replicas
    pools = tuple(job.spec.workers.pools)
    return FleetJob(
        name=job_name(job),
        pools=pools,
        min_workers=replicas,
        running=running(job),
        asked=asked(job),
        fault=fault,
    )


def job_name(job: TrainingJob) -> str:
    """The name of a job among those of all namespaces."""
    return f"{job.metadata.namespace}/{job.metadata.name}"


def running(job: TrainingJob) -> dict[str, int]:
    """Workers by pool that have a node, without those that go: one that waits in vain does not run."""
    return dict(
        Counter(
            slot.pool
            for slot in job.status.slots
            if slot.role == "worker"
            and slot.pool
            and slot.node
            and slot.state in {"Starting", "Running", "Silent"}
        )
    )


def asked(job: TrainingJob) -> tuple[str, ...]:
    """Pools of which a worker of the job has no node yet."""
    waiting = {"Planned", "Starting"}
    slots = (slot for slot in job.status.slots if slot.role == "worker" and slot.pool and not slot.node)
    return tuple(sorted({slot.pool for slot in slots if slot.state in waiting and not slot.cause}))


def model_of(
    report: StatusReport | None, profile: SpeedProfile | None, status: SpeedProfileStatus
) -> Model | None:
    """The job's model: as it reports it, or as its profile says."""
    known = resources.model_of(_with_status(profile, status))
    if report is None or report.model is None:
        return known
    said = report.model
    flops = said.flops_per_sample or (known.flops if known is not None else None)
    try:
        return Model(said.fingerprint, flops or None, said.parameters, max(1, said.tensors))
    except UsageError:
        return known


def _pace_before(job: TrainingJob) -> Pace | None:
    """What the workers were last seen to do, also by an operator before this one."""
    said = job.status.prediction
    if said is None or said.relative_error is None or not said.watched_seconds:
        return None
    return Pace(decimal(said.relative_error), float(said.watched_seconds))


def _samples_left(
    job: TrainingJob, report: StatusReport | None, samples_per_epoch: int | None
) -> float | None:
    """Samples until `stopAfter`; None if that is a metric, or the size of the data is not known yet."""
    if report is not None and report.samples_left is not None:
        return max(report.samples_left, 0.0)
    stop = job.spec.training.stop_after
    began = report is not None and report.step > 0  # before, the coordinator may not know the data
    if began or stop.metric is not None:
        return None
    left = 1.0  # of an operator that has just started, and heard of no coordinator yet
    if report is None and job.status.training.progress_percent is not None:
        left -= job.status.training.progress_percent / 100
    if stop.steps is not None:
        return left * stop.steps * job.spec.training.batch_size
    return left * stop.epochs * samples_per_epoch if stop.epochs and samples_per_epoch else None


def _deadline(job: TrainingJob, now: datetime) -> float | None:
    limit = job.spec.elasticity.objective.deadline_seconds
    if limit is None:
        return None
    began = job.status.start_time or now
    return limit - END_SECONDS - (now - began).total_seconds()
