"""Suspending and resuming, and how long the job was suspended.

A suspended job has no pods. Workers end first, each with a last push, then the parameter servers with a final
snapshot, so no progress is lost. A job created suspended starts no pods.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus, TrainingProgress
from shoal.policy.conditions import Conditions
from shoal.policy.incarnations import ByIndex, every
from shoal.policy.model import Event, Observation, Reason
from shoal.policy.names import Place, place_of
from shoal.policy.timers import Timers
from shoal.policy.times import seconds_between


def wants_worker(job: TrainingJob) -> Callable[[Place], bool]:
    """Whether a worker is wanted."""
    replicas = 0 if job.spec.suspend else job.spec.workers.replicas
    return lambda place: place.index < replicas


def wants_server(seen: Observation, workers: ByIndex, timers: Timers) -> Callable[[Place], bool]:
    """Whether a shard is wanted: while suspending, until no worker pushes and shard 0 has saved all shards."""
    replicas = seen.job.spec.parameter_servers.replicas
    if not seen.job.spec.suspend or any(worker.may_run(timers) for worker in every(workers)):
        return lambda place: place.index < replicas
    saving = any(
        (place := place_of(pod)) is not None and place.is_coordinator and not pod.ended for pod in seen.pods
    )
    return lambda place: saving and 0 < place.index < replicas


def set_condition(seen: Observation, conditions: Conditions) -> None:
    """Set the condition Suspended."""
    if not seen.job.spec.suspend:
        conditions.set_exceptional("Suspended", None, "Resumed")
    elif any(not pod.ended for pod in seen.pods):  # one that failed is kept for its logs
        conditions.set("Suspended", True, "Suspending", "its pods are terminating")
    else:
        conditions.set("Suspended", True, "Suspended", "set spec.suspend to false to resume")


def suspended_seconds(seen: Observation) -> int:
    """Total suspended time up to the last resumption, which may be now."""
    before = seen.job.status
    condition = before.condition("Suspended")
    resumes = condition is not None and condition.status == "True" and not seen.job.spec.suspend
    if condition is None or not resumes or before.start_time is None:
        return before.suspended_seconds
    since = max(condition.last_transition_time, before.start_time)
    return before.suspended_seconds + seconds_between(since, seen.now)


def events(before: TrainingJobStatus, after: TrainingJobStatus) -> list[Event]:
    """Suspended and Resumed."""
    was, now = (_is_suspended(status) for status in (before, after))
    if now and not was:
        return [
            Event("Normal", "Suspended", "the job is suspended; its pods terminate after a final snapshot")
        ]
    if was and not now:
        return [Event("Normal", "Resumed", "the job resumes from its last snapshot")]
    return []


def _is_suspended(status: TrainingJobStatus) -> bool:
    condition = status.condition("Suspended")
    return condition is not None and condition.status == "True"


def no_progress(seen: Observation, training: TrainingProgress, timers: Timers) -> Reason | None:
    """Degraded: no training step completed within progressDeadlineSeconds."""
    limit, start = seen.job.spec.run_policy.progress_deadline_seconds, seen.job.status.start_time
    if limit is None or start is None or seen.job.spec.suspend:
        return None
    suspended = seen.job.status.condition("Suspended")
    resumed = start
    if suspended is not None:
        resumed = seen.now if suspended.status == "True" else suspended.last_transition_time
    since = max(training.last_progress_time or start, start, resumed)
    if timers.pending(since + timedelta(seconds=limit)):
        return None
    # Not the message itself: it may contain seconds, and a condition that changes is written at once.
    see = "; see status.training.message" if training.message else ""
    message = f"no training step completed for {limit} s (runPolicy.progressDeadlineSeconds){see}"
    return Reason("NoProgress", message)
