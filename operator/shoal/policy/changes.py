"""Events about what changed since the last status."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.api.training_job_status import TrainingJobStatus
from shoal.policy import suspension
from shoal.policy.incarnations import ByIndex, every
from shoal.policy.model import Event, Observation
from shoal.policy.names import place_of_slot

_REPORTED = ("Degraded", "Stalled", "QuotaExceeded")
"""Conditions that are also events when they become True or change their reason."""


def events_of_changes(
    seen: Observation, servers: ByIndex, workers: ByIndex, status: TrainingJobStatus
) -> Iterator[Event]:
    """The events that follow from the new status."""
    before = seen.job.status
    yield from _replacements(seen, servers, workers)
    yield from suspension.events(before, status)
    yield from _scaling(seen, status)
    for kind in _REPORTED:
        was, now = before.condition(kind), status.condition(kind)
        if now and now.status == "True" and (not was or (was.status, was.reason) != ("True", now.reason)):
            yield Event("Warning", now.reason, now.message)


def _replacements(seen: Observation, servers: ByIndex, workers: ByIndex) -> Iterator[Event]:
    ran_before = {place_of_slot(slot) for slot in seen.job.status.slots if slot.running_at is not None}
    for each in every(servers, workers):
        place = each.place
        if place.incarnation == 0 or each.slot.running_at is None or place in ran_before or not each.pod:
            continue
        reason = "WorkerReplaced" if place.role == "worker" else "ParameterServerRestored"
        where = f" on node {each.node}" if each.node else ""
        yield Event("Normal", reason, f"{each.pod.metadata.name} is running{where}")


def _scaling(seen: Observation, status: TrainingJobStatus) -> Iterator[Event]:
    before = seen.job.status
    old, new = before.workers.desired, status.workers.desired
    suspension_changes = seen.job.spec.suspend or before.phase == "Suspended"
    if before.start_time and old != new and not suspension_changes:
        yield Event("Normal", "ScaledUp" if new > old else "ScaledDown", f"workers: {old} -> {new}")
