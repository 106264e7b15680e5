"""The plan in which a job finishes, and the plans after it: no pods are created, remaining ones are cleaned up."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from shoal.api.training_job_status import TrainingJobStatus
from shoal.policy import cleanup, telemetry
from shoal.policy.completion import End
from shoal.policy.conditions import Conditions
from shoal.policy.incarnations import Incarnation
from shoal.policy.model import Action, DeleteJob, DeletePod, Event, Observation, Plan, Reason
from shoal.policy.names import place_of, place_of_slot
from shoal.policy.timers import Timers
from shoal.policy.times import whole
from shoal.policy.verdict import judge

_NO_LONGER_TRUE = ("ParameterServersReady", "WorkersReady", "Running")
_ENDED_BY_FINISHING = (
    "Disrupted",
    "Degraded",
    "QuotaExceeded",
    "Reconciling",
    "Suspended",
)


def ending(seen: Observation, end: End, status: TrainingJobStatus, events: Iterable[Event]) -> Plan:
    """The plan in which the job finishes. Pods are cleaned up only after this status is written.

    `events`: what the same plan counted, such as the failure that exceeded the limit.
    """
    conditions = Conditions(status.conditions, seen.job.metadata.generation, seen.now)
    conditions.set("Complete" if end.succeeded else "Failed", True, end.reason, end.message)
    for kind in _NO_LONGER_TRUE:
        conditions.set(kind, False, "Finished")
    for kind in _ENDED_BY_FINISHING:
        conditions.set_exceptional(kind, None, "Finished")
    _set_stalled(conditions)
    update: dict[str, object] = {
        "phase": "Succeeded" if end.succeeded else "Failed",
        "reason": end.reason,
        "completion_time": whole(seen.now),
        "conditions": conditions.in_order(),
    }
    if end.evidence is not None:
        update |= telemetry.final(status, end.evidence)
    event = (
        Event("Normal", "Succeeded", end.message)
        if end.succeeded
        else Event("Warning", "Failed", f"{end.reason}: {end.message}")
    )
    return Plan((), status.model_copy(update=update), (*events, event), wake_after=0.0)


def _set_stalled(conditions: Conditions) -> None:
    """A failed job stays stalled: by this condition alone, kstatus (Flux) sees that it failed."""
    failed = conditions.get("Failed")
    cause = Reason(failed.reason, failed.message) if failed and failed.status == "True" else None
    conditions.set_exceptional("Stalled", cause, "Finished")


def afterwards(seen: Observation) -> Plan:
    """The plan of a finished job: cleanPodPolicy, then ttlSecondsAfterFinished."""
    timers = Timers(seen.now)
    actions: list[Action] = [*cleanup.at_the_end(seen), *cleanup.budget(seen), *_stuck(seen, timers)]
    events = []
    if any(isinstance(a, DeletePod) for a in actions) and _any_slot_active(seen):
        words = f"deleting pods (cleanPodPolicy {seen.job.spec.run_policy.clean_pod_policy})"
        events.append(Event("Normal", "CleanedUp", words))
    actions += _expired(seen, timers)
    return Plan(tuple(actions), _final_status(seen), tuple(events), wake_after=timers.next_seconds)


def _final_status(seen: Observation) -> TrainingJobStatus:
    """The status of a finished job, with the pods that still run."""
    before = seen.job.status
    running = [
        place
        for pod in seen.pods
        if not pod.ended and not pod.metadata.deletion_timestamp and (place := place_of(pod)) is not None
    ]
    workers = sum(place.role == "worker" for place in running)
    slots = tuple(
        slot
        if place_of_slot(slot) in running or slot.state == "Ended"
        else slot.model_copy(update={"state": "Ended", "ended_at": slot.ended_at or whole(seen.now)})
        for slot in before.slots
    )
    conditions = Conditions(before.conditions, seen.job.metadata.generation, seen.now)
    _set_stalled(conditions)
    return before.model_copy(
        update={
            "observed_generation": seen.job.metadata.generation,
            "workers": before.workers.model_copy(
                update={"active": workers, "ready": workers, "pending": 0, "spot": 0, "on_demand": 0}
            ),
            "parameter_servers": before.parameter_servers.model_copy(
                update={"ready": len(running) - workers}
            ),
            "slots": slots,
            "conditions": conditions.in_order(),
        }
    )


def _any_slot_active(seen: Observation) -> bool:
    return any(slot.state != "Ended" for slot in seen.job.status.slots)


def _stuck(seen: Observation, timers: Timers) -> list[Action]:
    """Force-deletions of pods that are Terminating on lost nodes."""
    records = {place_of_slot(slot): slot for slot in seen.job.status.slots}
    actions: list[Action] = []
    for pod in seen.pods:
        place = place_of(pod)
        if place is None or not pod.metadata.deletion_timestamp or place not in records:
            continue
        verdict = judge(pod, records[place], seen.nodes_if_readable)
        incarnation = Incarnation(place, records[place], pod, verdict, recorded=True)
        actions += cleanup.force(seen, incarnation, pod, timers)
    return actions


def _expired(seen: Observation, timers: Timers) -> list[Action]:
    ttl, end = seen.job.spec.run_policy.ttl_seconds_after_finished, seen.job.status.completion_time
    if ttl is None or end is None or timers.pending(end + timedelta(seconds=ttl)):
        return []
    return [DeleteJob(seen.job.metadata.name, seen.job.metadata.uid)]
