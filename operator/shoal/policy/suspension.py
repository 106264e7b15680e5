"""Suspending, resuming, and how long the job was not active.

A suspended job has no pods: first the workers go, each with its last push, then the parameter servers with a last
snapshot. Nothing is lost, and nothing is started, also when a job is created suspended.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus, TrainingProgress
from shoal.policy.conditions import Conditions
from shoal.policy.incarnations import ByIndex
from shoal.policy.model import Event, Observation
from shoal.policy.names import Place, place_of
from shoal.policy.times import seconds_between


def wants_worker(job: TrainingJob) -> Callable[[Place], bool]:
    """Whether a worker's place is wanted."""
    replicas = 0 if job.spec.suspend else job.spec.workers.replicas
    return lambda place: place.index < replicas


def wants_server(seen: Observation, workers: ByIndex) -> Callable[[Place], bool]:
    """Whether a shard is wanted: as long as a worker still pushes to it, and shard 0 still saves all of them."""
    replicas = seen.job.spec.parameter_servers.replicas
    if not seen.job.spec.suspend or any(h.alive for of in workers.values() for h in of):
        return lambda place: place.index < replicas
    saving = any(
        (place := place_of(pod)) is not None
        and place.seat == ("ps", 0)
        and pod.status.phase not in {"Failed", "Succeeded"}
        for pod in seen.pods
    )
    return lambda place: saving and 0 < place.index < replicas


def say(seen: Observation, conditions: Conditions, *, anyone_left: bool) -> None:
    """Set the condition Suspended."""
    if seen.job.spec.suspend:
        words = "its pods are terminating" if anyone_left else "set spec.suspend to false to resume"
        conditions.set("Suspended", True, "Suspending" if anyone_left else "Suspended", words)
    else:
        conditions.happened("Suspended", None, "Resumed")


def suspended_seconds(seen: Observation) -> int:
    """For how long the job was suspended up to its last resumption, which may be now."""
    before = seen.job.status
    was = before.condition("Suspended")
    resumes = was is not None and was.status == "True" and not seen.job.spec.suspend
    if was is None or not resumes or before.start_time is None:
        return before.suspended_seconds
    since = max(was.last_transition_time, before.start_time)
    return before.suspended_seconds + seconds_between(since, seen.now)


def events(before: TrainingJobStatus, after: TrainingJobStatus) -> list[Event]:
    """Suspended and Resumed."""
    was, now = before.condition("Suspended"), after.condition("Suspended")
    suspended, suspends = bool(was and was.status == "True"), bool(now and now.status == "True")
    if suspends and not suspended:
        return [
            Event("Normal", "Suspended", "the job is suspended; its pods terminate after a final snapshot")
        ]
    if suspended and not suspends:
        return [Event("Normal", "Resumed", "the job resumes from its last snapshot")]
    return []


def no_progress(
    seen: Observation, training: TrainingProgress, wake_after: list[float]
) -> tuple[str, str] | None:
    """Degraded, reason NoProgress: no step was made for longer than the user allows."""
    limit, start = seen.job.spec.run_policy.progress_deadline_seconds, seen.job.status.start_time
    if limit is None or start is None or seen.job.spec.suspend:
        return None
    resumed = seen.job.status.condition("Suspended")
    since = max(
        training.last_progress_time or start, start, resumed.last_transition_time if resumed else start
    )
    left = (since + timedelta(seconds=limit) - seen.now).total_seconds()
    if left > 0:
        wake_after.append(left)
        return None
    return "NoProgress", f"no training step completed for {limit} s (runPolicy.progressDeadlineSeconds)"
