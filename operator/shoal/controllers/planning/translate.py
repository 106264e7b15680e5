"""Custom resources and reports as the planner's values: pure, and nothing here raises for what a user wrote.

The planner (`shoal.sizing.fleet`) knows neither Kubernetes nor pydantic; the policies know no planner. What they share
goes through here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node, Pod
from shoal.api.speed_profile import LogMoments, MeasuredRow, SpeedProfile, SpeedProfileStatus
from shoal.api.training_job import TrainingJob
from shoal.errors import UsageError
from shoal.policy.model import Proposal
from shoal.sizing.fleet import FleetJob, FleetPool, JobPlan, LogMean, Model, Profile, Row, ServerLoad
from shoal_trainer.contract import StatusReport

URGENT_CONFIDENCE = 0.95
"""A deadline that is kept with less confidence is at risk."""
MEASURED = "measured"
"""In the basis of a plan whose speeds were measured. Before, a risk is ignorance: it can wait for a measurement."""
END_SECONDS = 10.0
"""Kept free before a deadline: after the last step come the last snapshot and the export of the model."""


def fleet_pool(pool: CapacityPool, nodes: Sequence[Node]) -> FleetPool:
    """A pool; `nodes` are those that it selects, of which the cores are read where the spec does not say them."""
    spec, status = pool.spec, pool.status
    exhausted = any(c.type == "Exhausted" and c.status == "True" for c in status.conditions)
    invalid = any(
        c.type == "Ready" and c.status == "False" and c.reason != "NoPrice" for c in status.conditions
    )
    return FleetPool(
        name=pool.metadata.name,
        accelerator=spec.accelerator.name if spec.accelerator else None,
        devices=spec.accelerator.count if spec.accelerator else 1,
        cores=spec.core_count or max((n.status.allocatable.cores for n in nodes), default=0.0),
        spot=spec.capacity_type == "Spot",
        zone=spec.zone,
        limit=0 if invalid else spec.limits.nodes,
        price_per_hour=float(spec.price.per_hour) if spec.price else None,
        startup_seconds=float(spec.startup_seconds),
        measured_startup_seconds=float(status.startup.seconds) if status.startup.seen else None,
        startup_seen=status.startup.seen,
        interruptions_per_hour=float(spec.interruptions_per_hour),
        interruptions_seen=status.interruptions.seen,
        node_hours=_number(status.interruptions.node_hours),
        unfulfilled_waits=status.unfulfilled.waits,
        exhausted=exhausted,
        together=_number(status.interruptions.together) if status.interruptions.together else None,
        transfer_per_gib=_number(spec.transfer_per_gib),
    )


def profile_values(profile: SpeedProfile | None, status: SpeedProfileStatus, now: datetime) -> Profile | None:
    """What is known of one model: the user's priors and what was measured. None where nothing usable is."""
    model = _model(profile, status)
    if model is None:
        return None
    rows = [row for each in status.rows if (row := _row(each, now)) is not None]
    for prior in profile.spec.rows if profile is not None else ():
        with contextlib.suppress(UsageError):  # a time that is none: the API's schema allows any decimal
            rows.append(
                Row(
                    device=prior.accelerator,
                    devices=prior.accelerator_count,
                    batch_size=prior.batch_size,
                    workers=prior.workers,
                    parameter_servers=prior.parameter_servers,
                    step=LogMean.of(float(prior.step_seconds), float(prior.spread), prior.count),
                    age_seconds=_age(prior.last_seen or "", now),
                )
            )
    loads = {
        load.parameter_servers: ServerLoad(
            _number(load.busy_seconds), _number(load.updates), _number(load.bytes)
        )
        for load in status.server_load
        if _number(load.updates) > 0
    }
    return Profile(model, tuple(rows), loads)


def fleet_job(
    job: TrainingJob,
    model: Model | None,
    report: StatusReport | None,
    samples_per_epoch: int | None,
    pods: Iterable[Pod],
    now: datetime,
) -> FleetJob:
    """A job. One whose workers nobody plans (mode Off or Manual) is planned with the number that it has."""
    spec, status = job.spec, job.status
    chooses = spec.elasticity.mode in {"Advise", "Auto"}
    replicas = spec.workers.replicas
    objective = spec.elasticity.objective
    spent = _number(status.cost.accumulated) if status.cost else 0.0
    left = _samples_left(job, report, samples_per_epoch)
    known = chooses and model is not None and left is not None  # else it runs with its replicas for now
    return FleetJob(
        name=job_name(job),
        priority=max((pod.spec.priority for pod in pods), default=0),
        model=model,
        samples_left=left,
        batch_size=spec.training.batch_size,
        batch_sizes={each.accelerator: each.batch_size for each in spec.training.batch_sizes},
        pools=tuple(spec.workers.pools),
        min_workers=spec.workers.min_replicas if known else replicas,
        max_workers=max(1, (spec.workers.max_replicas or replicas) if chooses else replicas),
        on_demand_base=spec.workers.on_demand_base,
        zone_policy=spec.workers.zone_policy,
        parameter_servers=spec.parameter_servers.replicas,
        running=running(job),
        deadline_seconds=_deadline(job, now),
        budget_left=None if objective.max_cost is None else float(objective.max_cost) - spent,
        prefer=objective.prefer,
        spent=spent,
        measured_samples_per_second=report.samples_per_second if report is not None else None,
    )


def proposal(job: TrainingJob, plan: JobPlan, now: datetime, since: datetime) -> Proposal:
    """What the policies are told of a plan."""
    objective = job.spec.elasticity.objective
    limited = objective.deadline_seconds is not None or objective.max_cost is not None
    at_risk = not plan.feasible or (plan.confidence is not None and plan.confidence < URGENT_CONFIDENCE)
    spent = _number(job.status.cost.accumulated) if job.status.cost else 0.0
    finish = plan.finish_seconds
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
        remaining_range=None
        if plan.finish_low is None or plan.finish_high is None
        else (plan.finish_low, plan.finish_high),
        relative_error=plan.relative_error,
        basis=plan.basis,
        speeds=dict(plan.speeds),
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


def model_of(
    report: StatusReport | None, profile: SpeedProfile | None, status: SpeedProfileStatus
) -> Model | None:
    """The job's model: as it reports it, or as its profile says."""
    if report is not None and report.model is not None:
        said = report.model
        known = status.model
        flops = said.flops_per_sample or (
            _number(known.flops_per_sample) if known and known.flops_per_sample else None
        )
        return _checked(said.fingerprint, flops, said.parameters, said.tensors)
    return _model(profile, status)


def _model(profile: SpeedProfile | None, status: SpeedProfileStatus) -> Model | None:
    measured, prior = status.model, profile.spec.model if profile is not None else None
    if measured is not None and measured.parameters:
        flops = measured.flops_per_sample or (prior.flops_per_sample if prior else None)
        return _checked(
            measured.fingerprint, _number(flops) if flops else None, measured.parameters, measured.tensors
        )
    if prior is None:
        return None
    return _checked(prior.fingerprint, _number(prior.flops_per_sample), prior.parameters, prior.tensors)


def _checked(fingerprint: str, flops: float | None, parameters: int, tensors: int) -> Model | None:
    try:
        return Model(fingerprint, flops if flops and flops > 0 else None, parameters, max(1, tensors))
    except UsageError:
        return None


def _row(row: MeasuredRow, now: datetime) -> Row | None:
    try:
        return Row(
            device=row.device,
            devices=row.devices,
            cores=_number(row.cores),
            batch_size=row.batch_size,
            workers=row.workers,
            parameter_servers=row.parameter_servers,
            compute=_mean(row.compute),
            pull=_mean(row.pull),
            push=_mean(row.push),
            age_seconds=_age(row.last_seen, now),
        )
    except UsageError:
        return None  # someone edited the status by hand


def _mean(moments: LogMoments) -> LogMean | None:
    count = _number(moments.count)
    return LogMean(_number(moments.mean_log), _number(moments.variance_log), count) if count > 0 else None


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
    if stop.steps is not None:
        return float(stop.steps * job.spec.training.batch_size)
    return float(stop.epochs * samples_per_epoch) if stop.epochs and samples_per_epoch else None


def _deadline(job: TrainingJob, now: datetime) -> float | None:
    limit = job.spec.elasticity.objective.deadline_seconds
    if limit is None:
        return None
    began = job.status.start_time or now
    return limit - END_SECONDS - (now - began).total_seconds()


def _age(stamp: str, now: datetime) -> float:
    try:
        return max(0.0, (now - datetime.fromisoformat(stamp.replace("Z", "+00:00"))).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _number(text: str | None) -> float:
    """A decimal; 0 for what is none, since a status may have been edited by hand."""
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
