"""What a TrainingJob has left to do, in steps or samples, and the time left to do it."""

from __future__ import annotations

from datetime import datetime

from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import StopAfter, TrainingJob
from shoal.errors import UsageError
from shoal.sizing.fleet.resources import beside_of
from shoal.sizing.plan.problem import LossWork, StepWork, Work

__all__ = ["seconds_left", "work_left"]


def seconds_left(job: TrainingJob, now: datetime) -> float | None:
    """Seconds from now to the deadline, which counts from the start of the job, suspended or not. None: no deadline.

    Raises:
        UsageError: the deadline has passed.
    """
    deadline, start = job.spec.elasticity.objective.deadline_seconds, job.status.start_time
    if deadline is None or start is None:
        return deadline
    if start.tzinfo is None:
        raise UsageError(f"status.startTime has no time zone: write it as {start.isoformat()}Z")
    left = deadline - max(0.0, (now - start).total_seconds())
    if left <= 0:
        raise UsageError(
            f"the deadline of {deadline} s after the start of the job ({start:%Y-%m-%d %H:%M:%S %Z}) has passed: "
            "set --deadline to the seconds from now"
        )
    return left


def work_left(job: TrainingJob, profile: SpeedProfile, notes: list[str]) -> Work:
    """The work that the job has left. Adds notes on what the plan leaves out."""
    stop = job.spec.training.stop_after
    if stop.steps is None and stop.epochs is None:
        return _loss_work(job, profile, notes)
    if stop.metric is not None:
        notes.append(
            f"The job may end earlier, when {stop.metric} reaches {stop.value}: the plan ignores that."
        )
    return StepWork(
        steps=_steps_left(job),
        samples=_samples_left(job, profile, notes),
        beside=beside_of(profile.status, profile.model.samples_per_epoch),
    )


def _loss_work(job: TrainingJob, profile: SpeedProfile, notes: list[str]) -> LossWork:
    """The steps to a target loss, from the loss curve of the profile."""
    stop, curve = job.spec.training.stop_after, profile.spec.convergence
    if stop.metric is None or stop.value is None:
        raise UsageError(
            "the job does not say when it ends: set training.stopAfter to epochs, steps or metric and value"
        )
    if stop.metric not in ("loss", "val_loss") or curve is None:
        raise UsageError(
            f"the steps until {stop.metric} is {stop.value} cannot be planned: stop after steps or epochs, or after "
            "the metric loss with a SpeedProfile that has spec.convergence"
        )
    if stop.metric == "val_loss":
        notes.append("The plan assumes that the validation loss follows the curve of the training loss.")
    loss = job.status.training.loss
    return LossWork(
        target=_target(stop, stop.value),
        r1=float(curve.r1),
        r2=float(curve.r2),
        r3=float(curve.r3),
        r4=float(curve.r4),
        batch_range=(float(curve.least_batch), float(curve.most_batch)),
        done=None if loss is None else float(loss),
    )


def _target(stop: StopAfter, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise UsageError(f"the value of {stop.metric} must be a decimal number, not {value!r}") from error


def _steps_left(job: TrainingJob) -> int | None:
    steps = job.spec.training.stop_after.steps
    if steps is None:
        return None
    left = steps - job.status.training.step
    if left < 1:
        raise UsageError("the job has made all its steps: nothing is left to plan")
    return left


def _samples_left(job: TrainingJob, profile: SpeedProfile, notes: list[str]) -> float | None:
    stop, data = job.spec.training.stop_after, job.status.data
    if stop.epochs is None:
        return None
    per_epoch = profile.model.samples_per_epoch
    if per_epoch is None:
        if stop.steps is None:
            raise UsageError(
                "the job stops after epochs, and the SpeedProfile does not say how long one is: set "
                "spec.model.samplesPerEpoch in it"
            )
        notes.append(
            "The job may end earlier, after its epochs: set spec.model.samplesPerEpoch in the SpeedProfile."
        )
        return None
    # The status counts complete epochs; `data` is the progress of the open one.
    epochs = stop.epochs - job.status.training.epoch - min(data.done / (data.total or per_epoch), 1.0)
    if epochs * per_epoch < 1:
        raise UsageError("the job has made all its epochs: nothing is left to plan")
    return epochs * per_epoch
