"""The work that is left of a job until `stopAfter`: samples, steps, or a loss; or why it is not known.

A metric's samples are estimated from its course (`speed/efficiency.py`), a loss from the curve that the user knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.sizing.fleet.resources import decimal
from shoal.sizing.fleet.values import FleetJob
from shoal.sizing.speed.measurements import Evaluation
from shoal_trainer.contract import StatusReport, StopAfter

if TYPE_CHECKING:  # numpy
    from shoal.sizing.speed.efficiency import WorkLeft

__all__ = ["course_of", "ending_by_metric", "samples_per_epoch", "with_work"]


def with_work(
    job: TrainingJob, planned: FleetJob, profile: SpeedProfile | None, report: StatusReport | None
) -> FleetJob:
    """The job with the work until `stopAfter`, or why that is not known; with its fewest workers, once it is."""
    return _chosen(job, _until_stop(job, planned, profile, report))


def ending_by_metric(
    job: TrainingJob,
    planned: FleetJob,
    course: Sequence[Evaluation],
    others: Sequence[Sequence[Evaluation]] = (),
    estimate: Callable[..., WorkLeft] | None = None,
) -> FleetJob:
    """The job with the samples left to its metric, where nothing else ends it; takes tens of milliseconds.

    Args:
        job: the job.
        planned: what `fleet_job` made of it.
        course: how the metric came along.
        others: how it did in other jobs of the same model.
        estimate: `samples_to_target`, or what remembers its answer.

    """
    from shoal.sizing.speed.efficiency import samples_to_target

    stop = job.spec.training.stop_after
    if stop.metric is None or stop.value is None or _ends_otherwise(planned):
        return planned
    said = StopAfter(metric=stop.metric, value=stop.value, mode=stop.mode)
    found = (estimate or samples_to_target)(
        course,
        stop.value,
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


def samples_per_epoch(
    job: TrainingJob, profile: SpeedProfile | None, report: StatusReport | None
) -> int | None:
    """Samples in one pass over the job's data: as it says, or else as other jobs of its model do, or the user."""
    prior = profile.spec.model if profile is not None else None
    said = prior.samples_per_epoch if prior is not None else None
    return _own_length(job, report) or _length_of_others(profile) or said


def _own_length(job: TrainingJob, report: StatusReport | None) -> int | None:
    """As the job says, now or before."""
    return (report.data.total if report is not None else None) or job.status.data.total


def _length_of_others(profile: SpeedProfile | None) -> int | None:
    measured = profile.status.model if profile is not None else None
    return measured.samples_per_epoch if measured else None


def _chosen(job: TrainingJob, planned: FleetJob) -> FleetJob:
    """With as few workers as is allowed, once there is something to plan; until then it runs with its replicas."""
    chooses = job.spec.elasticity.mode in {"Advise", "Auto"}
    known = chooses and planned.model is not None and planned.has_work
    return replace(planned, min_workers=job.spec.workers.min_replicas) if known else planned


def _ends_otherwise(planned: FleetJob) -> bool:
    return planned.samples_left is not None or planned.steps_left is not None


def _until_stop(
    job: TrainingJob, planned: FleetJob, profile: SpeedProfile | None, report: StatusReport | None
) -> FleetJob:
    stop, per_epoch = job.spec.training.stop_after, samples_per_epoch(job, profile, report)
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
    elif stop.epochs is not None and _own_length(job, report) is None and _length_of_others(profile):
        notes.append(f"an epoch is taken to be of {per_epoch:,} samples, as in other jobs of the model")
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
    stop, curve = job.spec.training.stop_after, profile.spec.convergence if profile is not None else None
    if stop.metric is None or stop.value is None:
        return replace(planned, work_note="the coordinator has not said how long the data are")
    if stop.metric not in {"loss", "val_loss"} or curve is None:
        words = (
            f"the steps until {stop.metric} is {stop.value:.15g} are not known before it has come some of the way: "
            "stop after steps or epochs, or after the metric loss with a SpeedProfile that has spec.convergence"
        )
        return replace(planned, work_note=words)
    from shoal.sizing.plan.work import LossWork  # numpy: at rest, the operator does without

    loss = job.status.training.loss
    try:
        work = LossWork(
            target=stop.value,
            r1=curve.r1,
            r2=curve.r2,
            r3=curve.r3,
            r4=curve.r4,
            batch_range=(float(curve.least_batch), float(curve.most_batch)),
            done=None if loss is None else float(loss),
        )
    except ValueError as error:  # a UsageError is one
        return replace(planned, work_note=str(error))
    return replace(planned, loss=work)
