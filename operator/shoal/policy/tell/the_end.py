"""How the end of a job is told: the status in which it finishes, and the status of a finished job."""

from __future__ import annotations

from shoal.api.training_job_status import TrainingJobStatus
from shoal.policy.common.times import whole
from shoal.policy.decide.afterwards import CleanUp
from shoal.policy.decide.completion import End
from shoal.policy.decide.counters import Counters
from shoal.policy.facts.read import Facts
from shoal.policy.model import Event, Plan, Reason
from shoal.policy.tell import progress
from shoal.policy.tell.conditions import Conditions, api_server_refuses
from shoal.policy.tell.events import failures_told

_NO_LONGER_TRUE = ("ParameterServersReady", "WorkersReady", "Running")
_ENDED_BY_FINISHING = (
    "Disrupted",
    "Degraded",
    "QuotaExceeded",
    "QuotaReserved",
    "NodeSignalsSuspect",
    "Reconciling",
    "Suspended",
)


def tell_end(facts: Facts, end: End, status: TrainingJobStatus, counters: Counters) -> Plan:
    """The plan in which the job finishes. Pods are cleaned up only after this status is written.

    Its events include what the same plan counted, such as the failure that exceeded the limit.
    """
    seen = facts.seen
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
        "training": progress.without_rates(status.training),
    }
    if end.evidence is not None:
        update |= progress.final(status, end.evidence)
    event = (
        Event("Normal", "Succeeded", end.message)
        if end.succeeded
        else Event("Warning", "Failed", f"{end.reason}: {end.message}")
    )
    return Plan((), status.model_copy(update=update), (*counters.events, event), wake_after=0.0)


def _set_stalled(conditions: Conditions) -> None:
    """A failed job stays stalled: by this condition alone, kstatus (Flux) sees that it failed."""
    failed = conditions.get("Failed")
    cause = Reason(failed.reason, failed.message) if failed and failed.status == "True" else None
    conditions.set_exceptional("Stalled", cause, "Finished")


def tell_afterwards(facts: Facts, done: CleanUp) -> Plan:
    """The plan of a finished job."""
    events = []
    if done.pods and any(slot.state != "Ended" for slot in facts.job.status.slots):
        words = f"deleting pods (cleanPodPolicy {facts.job.spec.run_policy.clean_pod_policy})"
        events.append(Event("Normal", "CleanedUp", words))
    status = _final_status(facts, released=done.released)
    events += failures_told(facts.job.status, status)
    return Plan((*done.pods, *done.others), status, tuple(events), wake_after=facts.timers.next_seconds)


def _final_status(facts: Facts, *, released: bool) -> TrainingJobStatus:
    """The status of a finished job, with the pods that still run."""
    before = facts.job.status
    pods = {
        each.place: each.pod for role in facts.sightings.values() for each in role if each.pod is not None
    }
    running = {place for place, pod in pods.items() if not pod.ended and not pod.metadata.deletion_timestamp}
    newest = {slot.place[:2]: slot.place for slot in before.slots}  # they are in order
    workers = sum(place.role == "worker" for place in running)
    slots = tuple(
        slot
        if slot.place in running or slot.state == "Ended"
        else slot.model_copy(
            update={"state": "Ended", "ran": slot.has_run, "ended_at": slot.ended_at or facts.now}
        )
        for slot in before.slots
        if slot.place in pods or slot.place == newest[slot.place[:2]]
    )
    conditions = Conditions(before.conditions, facts.job.metadata.generation, facts.seen.now)
    conditions.set_exceptional("Degraded", api_server_refuses(facts.seen), "Finished")
    _set_stalled(conditions)
    return before.model_copy(
        update={
            "observed_generation": facts.job.metadata.generation,
            "workers": before.workers.model_copy(
                update={"active": workers, "ready": workers, "pending": 0, "spot": 0, "on_demand": 0}
            ),
            "parameter_servers": before.parameter_servers.model_copy(
                update={"ready": len(running) - workers}
            ),
            "slots": slots,
            "conditions": conditions.in_order(),
            "released": before.released or released,
        }
    )
