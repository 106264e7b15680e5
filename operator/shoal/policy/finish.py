"""The end of a job and what comes after it. Nothing is started any more; what is left is cleaned up."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from itertools import chain

from shoal.api.training_job_status import Slot, TrainingJobStatus
from shoal.policy import cleanup, telemetry
from shoal.policy.completion import End
from shoal.policy.conditions import Conditions
from shoal.policy.incarnations import Incarnation
from shoal.policy.model import Action, DeleteJob, DeletePod, Event, Observation, Plan
from shoal.policy.names import Place, place_of
from shoal.policy.times import whole
from shoal.policy.verdict import judge


def ending(seen: Observation, end: End, status: TrainingJobStatus, events: Iterable[Event]) -> Plan:
    """The plan of the moment in which the job ends. The status goes first; pods are cleaned up after it is written.

    `events`: what was counted in the same moment, such as the failure that was one too many.
    """
    conditions = Conditions(status.conditions, seen.job.metadata.generation, seen.now)
    conditions.set("Complete" if end.succeeded else "Failed", True, end.reason, end.message)
    conditions.set("Running", False, "Finished")
    for kind in ("Disrupted", "Degraded", "QuotaExceeded", "Reconciling", "Stalled", "Suspended"):
        conditions.happened(kind, None, "Finished")
    update: dict[str, object] = {
        "phase": "Succeeded" if end.succeeded else "Failed",
        "reason": end.reason,
        "completion_time": whole(seen.now),
        "conditions": conditions.done(),
    }
    if end.evidence is not None:
        update |= telemetry.final(status, end.evidence)
    event = (
        Event("Normal", "Succeeded", end.message)
        if end.succeeded
        else Event("Warning", "Failed", f"{end.reason}: {end.message}")
    )
    return Plan((), status.model_copy(update=update), (*events, event), wake_after=0.0)


def afterwards(seen: Observation) -> Plan:
    """The plan of a job that has ended: cleanPodPolicy, then ttlSecondsAfterFinished."""
    wake_after: list[float] = []
    actions: list[Action] = [*cleanup.at_the_end(seen), *_stuck(seen, wake_after)]
    events = []
    if any(isinstance(a, DeletePod) for a in actions) and _anything_counted_as_running(seen):
        words = f"deleting pods (cleanPodPolicy {seen.job.spec.run_policy.clean_pod_policy})"
        events.append(Event("Normal", "CleanedUp", words))
    return Plan(
        actions=(*actions, *_expired(seen, wake_after)),
        status=_at_rest(seen),
        events=tuple(events),
        wake_after=min(wake_after, default=None),
    )


def _at_rest(seen: Observation) -> TrainingJobStatus:
    """The same status, with nobody at work in it but the pods that are still there."""
    before = seen.job.status
    running = [
        pod
        for pod in seen.pods
        if pod.status.phase not in {"Failed", "Succeeded"} and not pod.metadata.deletion_timestamp
    ]
    count = {"ps": 0, "worker": 0}
    for pod in running:
        if (place := place_of(pod)) is not None:
            count[place.role] += 1
    workers = before.workers.model_copy(
        update={"active": count["worker"], "ready": count["worker"], "pending": 0, "spot": 0, "on_demand": 0}
    )
    servers = before.parameter_servers.model_copy(update={"ready": count["ps"]})
    there = {place_of(pod) for pod in running}
    slots = tuple(
        slot
        if _place(slot) in there or slot.state == "Ended"
        else slot.model_copy(update={"state": "Ended", "ended_at": slot.ended_at or whole(seen.now)})
        for slot in before.slots
    )
    conditions = Conditions(before.conditions, seen.job.metadata.generation, seen.now)
    if (stalled := before.condition("Stalled")) is not None and stalled.status == "True":
        conditions.happened("Stalled", None, "Finished")
    return before.model_copy(
        update={
            "workers": workers,
            "parameter_servers": servers,
            "slots": slots,
            "conditions": conditions.done(),
        }
    )


def _anything_counted_as_running(seen: Observation) -> bool:
    return any(slot.state != "Ended" for slot in seen.job.status.slots)


def _stuck(seen: Observation, wake_after: list[float]) -> list[Action]:
    """Pods that are Terminating on machines that are gone."""
    records = {_place(slot): slot for slot in seen.job.status.slots}
    found: list[list[Action]] = []
    for pod in seen.pods:
        place = place_of(pod)
        if place is None or not pod.metadata.deletion_timestamp or place not in records:
            continue
        verdict = judge(pod, records[place], seen.nodes_if_read)
        holder = Incarnation(place, records[place], pod, verdict, settled=True)
        found.append(cleanup.force(seen, holder, pod, wake_after))
    return list(chain.from_iterable(found))


def _expired(seen: Observation, wake_after: list[float]) -> list[Action]:
    ttl, end = seen.job.spec.run_policy.ttl_seconds_after_finished, seen.job.status.completion_time
    if ttl is None or end is None:
        return []
    left = (end + timedelta(seconds=ttl) - seen.now).total_seconds()
    if left > 0:
        wake_after.append(left)
        return []
    return [DeleteJob(seen.job.metadata.name, seen.job.metadata.uid)]


def _place(slot: Slot) -> Place:
    return Place(slot.role, slot.index, slot.incarnation)
