"""A TrainingJob as the planner sees it, for the operator and for `shoal plan` alike.

Nothing here raises for what a user wrote, but a time without a zone: what cannot be planned says why in `work_note`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.errors import UsageError
from shoal.sizing.fleet.resources import beside_of, decimal, model_of
from shoal.sizing.fleet.values import FleetJob, Pace, Watched
from shoal.sizing.speed.measurements import Evaluation, Model
from shoal_trainer.contract import StatusReport, StopAfter

if TYPE_CHECKING:  # numpy: at rest, the operator does without
    from shoal.sizing.plan.problem import LossWork

__all__ = [
    "END_SECONDS", "asked", "course_of", "ending_by_metric", "fleet_job", "job_name", "running", "samples_per_epoch",
    "unreadable",
]  # fmt: skip

END_SECONDS = 10.0
"""Kept free before a deadline: after the last step come the last snapshot and the export of the model."""
_NOT_WATCHED = Watched()


def fleet_job(
    job: TrainingJob,
    profile: SpeedProfile | None,
    now: datetime,
    report: StatusReport | None = None,
    *,
    priority: int = 0,
    watched: Watched = _NOT_WATCHED,
) -> FleetJob:
    """A job. One whose workers nobody plans (mode Off or Manual) is planned with the number that it has.

    Args:
        job: with its status.
        profile: that of its model, with what was learned since it was written; None: nothing is known.
        now: the present.
        report: the newest one of its coordinator.
        priority: that of its pods.
        watched: what its workers do.

    """
    spec, status = job.spec, job.status
    mode, objective, prior = (
        spec.elasticity.mode,
        spec.elasticity.objective,
        profile.spec.model if profile else None,
    )
    per_epoch = samples_per_epoch(profile)
    behind = sum(not epoch.complete for epoch in report.epochs) if report is not None else 0
    spent = decimal(status.cost.accumulated) if status.cost else 0.0
    chooses, replicas = mode in {"Advise", "Auto"}, spec.workers.replicas
    planned = FleetJob(
        name=job_name(job),
        priority=priority,
        model=_model(job, report, profile),
        beside=beside_of(profile.status, per_epoch, behind) if profile else None,
        bytes_per_sample=prior.bytes_per_sample if prior else None,
        batch_size=spec.training.batch_size,
        batch_sizes={each.accelerator: each.batch_size for each in spec.training.batch_sizes},
        pools=tuple(spec.workers.pools),
        min_workers=replicas,
        max_workers=max(1, (spec.workers.max_replicas or replicas) if chooses else replicas),
        on_demand_base=spec.workers.on_demand_base,
        zone_policy=spec.workers.zone_policy,
        parameter_servers=spec.parameter_servers.replicas,
        running=running(job),
        planned=status.plan.pools if mode == "Auto" and status.plan is not None else {},
        asked=asked(job),
        deadline_seconds=_deadline(job, now),
        budget_left=None if objective.max_cost is None else float(objective.max_cost) - spent,
        prefer=objective.prefer,
        spent=spent,
        now=watched,
        pace_before=_pace_before(job),
    )
    return _chosen(job, _with_work(job, planned, profile, report, per_epoch))


def unreadable(job: TrainingJob, fault: str) -> FleetJob:
    """A job of which no more than this can be read, for a fault of the operator."""
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


def ending_by_metric(
    job: TrainingJob,
    planned: FleetJob,
    course: Sequence[Evaluation],
    others: Sequence[Sequence[Evaluation]] = (),
) -> FleetJob:
    """The job with the samples left to its metric, where nothing else ends it; takes tens of milliseconds.

    Args:
        job: the job.
        planned: what `fleet_job` made of it.
        course: how the metric came along.
        others: how it did in other jobs of the same model.

    """
    from shoal.sizing.speed.efficiency import samples_to_target

    stop = job.spec.training.stop_after
    if stop.metric is None or stop.value is None or _ends_otherwise(planned):
        return planned
    said = StopAfter(metric=stop.metric, value=float(stop.value), mode=stop.mode)
    found = samples_to_target(
        course,
        float(stop.value),
        rises=said.direction == "Max",
        workers=float(max(sum(planned.running.values()), 1)),
        others=others,
    )
    ends = f"the job ends when {stop.metric} is {stop.value}"
    if found.samples is None:
        return planned if planned.loss is not None else replace(planned, work_note=f"{ends}, and {found.why}")
    assumed = "" if found.learned else (
        "; how many more samples more workers need is an assumption until the job has run with different numbers"
    )  # fmt: skip
    known = replace(
        planned,
        samples_left=found.samples,
        samples_sigma=found.sigma,
        efficiency=found.efficiency,
        loss=None,
        work_note=f"{ends}: {found.why}{assumed}",
    )
    return _chosen(job, known)


def course_of(job: TrainingJob) -> dict[int, Evaluation]:
    """How the metric that ends the job came along, by epoch, as its status remembers it."""
    said = (job.status.prediction.course if job.status.prediction else None) or ()
    return {
        point.epoch: Evaluation(float(point.samples), decimal(point.value), max(decimal(point.workers), 1.0))
        for point in said
    }


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


def samples_per_epoch(profile: SpeedProfile | None) -> int | None:
    """Samples in one pass over the data: as measured, or else as the user says."""
    if profile is None:
        return None
    measured, prior = profile.status.model, profile.spec.model
    return (measured.samples_per_epoch if measured else None) or (prior.samples_per_epoch if prior else None)


def _chosen(job: TrainingJob, planned: FleetJob) -> FleetJob:
    """With as few workers as is allowed, once there is something to plan; until then it runs with its replicas."""
    chooses = job.spec.elasticity.mode in {"Advise", "Auto"}
    known = chooses and planned.model is not None and planned.has_work
    return replace(planned, min_workers=job.spec.workers.min_replicas) if known else planned


def _model(job: TrainingJob, report: StatusReport | None, profile: SpeedProfile | None) -> Model | None:
    """The job's model: as it reports it, or as its profile says."""
    known = model_of(profile) if profile is not None else None
    if report is None or report.model is None:
        return known
    said = report.model
    flops = said.flops_per_sample or (known.flops if known is not None else None)
    try:
        return Model(
            said.fingerprint, flops or None, said.parameters, max(1, said.tensors), job.metadata.namespace
        )
    except UsageError:
        return known


def _pace_before(job: TrainingJob) -> Pace | None:
    """What the workers were last seen to do, also by an operator before this one."""
    said = job.status.prediction
    if said is None or said.relative_error is None or not said.watched_seconds:
        return None
    return Pace(decimal(said.relative_error), float(said.watched_seconds))


def _deadline(job: TrainingJob, now: datetime) -> float | None:
    limit = job.spec.elasticity.objective.deadline_seconds
    if limit is None:
        return None
    began = job.status.start_time or now
    if began.tzinfo is None:
        raise UsageError(f"status.startTime has no time zone: write it as {began.isoformat()}Z")
    return limit - END_SECONDS - max((now - began).total_seconds(), 0.0)


# -- the work that is left --------------------------------------------------------------------------------------------


def _ends_otherwise(planned: FleetJob) -> bool:
    return planned.samples_left is not None or planned.steps_left is not None


def _with_work(
    job: TrainingJob,
    planned: FleetJob,
    profile: SpeedProfile | None,
    report: StatusReport | None,
    per_epoch: int | None,
) -> FleetJob:
    """The job with the work until `stopAfter`, or why that is not known."""
    stop = job.spec.training.stop_after
    if report is not None and report.samples_left is not None:
        return replace(planned, samples_left=max(report.samples_left, 0.0))
    if report is not None and report.step > 0:  # before, the coordinator may not know the data
        return _to_loss(job, planned, profile)
    done = job.status.training
    steps = None if stop.steps is None else float(max(stop.steps - done.step, 0))
    epochs = None if stop.epochs is None or per_epoch is None else stop.epochs - _epochs_done(job, per_epoch)
    samples = None if epochs is None or per_epoch is None else max(epochs * per_epoch, 0.0)
    planned = replace(planned, steps_left=steps, samples_left=samples)
    if not _ends_otherwise(planned) and stop.epochs is None:
        return _to_loss(job, planned, profile)
    notes = []
    if stop.epochs is not None and per_epoch is None:
        unknown = "set spec.model.samplesPerEpoch in its SpeedProfile"
        notes.append(
            f"the job may end earlier, after its epochs: {unknown}"
            if steps is not None
            else f"the job stops after epochs, and how long one is is not known: {unknown}, or run it once"
        )
    if stop.metric is not None:
        notes.append(
            f"the job may end earlier, when {stop.metric} reaches {stop.value}: the plan ignores that"
        )
    return replace(planned, work_note="; ".join(notes))


def _epochs_done(job: TrainingJob, per_epoch: int) -> float:
    """The status counts complete epochs; `data` is the progress of the open one."""
    data = job.status.data
    return job.status.training.epoch + min(data.done / (data.total or per_epoch), 1.0)


def _to_loss(job: TrainingJob, planned: FleetJob, profile: SpeedProfile | None) -> FleetJob:
    """The job with the steps to a target loss, from the loss curve that the user knows."""
    stop = job.spec.training.stop_after
    if stop.metric is None or stop.value is None:
        return replace(planned, work_note="the coordinator has not said how long the data are")
    try:
        return replace(planned, loss=_curve(job, profile))
    except ValueError as error:  # a UsageError is one
        return replace(planned, work_note=str(error))


def _curve(job: TrainingJob, profile: SpeedProfile | None) -> LossWork:
    stop = job.spec.training.stop_after
    assert stop.value is not None
    curve = profile.spec.convergence if profile is not None else None
    if stop.metric not in {"loss", "val_loss"} or curve is None:
        raise UsageError(
            f"the steps until {stop.metric} is {stop.value} are not known before it has come some of the way: stop "
            "after steps or epochs, or after the metric loss with a SpeedProfile that has spec.convergence"
        )
    from shoal.sizing.plan.problem import LossWork

    loss = job.status.training.loss
    return LossWork(
        target=float(stop.value),
        r1=float(curve.r1),
        r2=float(curve.r2),
        r3=float(curve.r3),
        r4=float(curve.r4),
        batch_range=(float(curve.least_batch), float(curve.most_batch)),
        done=None if loss is None else float(loss),
    )
