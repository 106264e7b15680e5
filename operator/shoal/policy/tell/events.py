"""Events about what changed since the last status."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.api.training_job_status import TrainingJobStatus
from shoal.policy.decide.decide import Decisions
from shoal.policy.decide.members import every
from shoal.policy.facts.read import Facts
from shoal.policy.model import Event

_REPORTED = ("Degraded", "Stalled", "QuotaExceeded", "NodeSignalsSuspect")
"""Conditions that are also events when they become True or change their reason."""


def events_of_changes(facts: Facts, decided: Decisions, status: TrainingJobStatus) -> Iterator[Event]:
    """The events that follow from the new status."""
    before = facts.job.status
    yield from _replacements(facts, decided)
    yield from _suspension(before, status)
    yield from _scaling(facts, status)
    if status.training.restarts_from_nothing > before.training.restarts_from_nothing:
        words = "the parameter servers were lost with all snapshots: training began again from its initial parameters"
        yield Event("Warning", "TrainingRestarted", words)
    for kind in _REPORTED:
        was, now = before.condition(kind), status.condition(kind)
        if now and now.status == "True" and (not was or (was.status, was.reason) != ("True", now.reason)):
            yield Event("Warning", now.reason, now.message)


def _replacements(facts: Facts, decided: Decisions) -> Iterator[Event]:
    recorded = None
    for each in every(decided.servers, decided.workers):
        place = each.place
        if place.incarnation == 0 or each.slot.state != "Running" or not each.pod:
            continue
        if recorded is None:
            recorded = {slot.place: slot for slot in facts.job.status.slots}
        if place in recorded and recorded[place].has_run:
            continue
        reason = "WorkerReplaced" if place.role == "worker" else "ParameterServerRestored"
        where = f" on node {each.node}" if each.node else ""
        yield Event("Normal", reason, f"{each.pod.metadata.name} is running{where}")


def _suspension(before: TrainingJobStatus, after: TrainingJobStatus) -> Iterator[Event]:
    """Suspended and Resumed."""
    was, now = (_is_suspended(status) for status in (before, after))
    if now and not was:
        yield Event(
            "Normal", "Suspended", "the job is suspended: its servers saved a final snapshot and ended"
        )
    if was and not now:
        yield Event("Normal", "Resumed", "the job resumes from its last snapshot")


def _is_suspended(status: TrainingJobStatus) -> bool:
    condition = status.condition("Suspended")
    return condition is not None and condition.status == "True"


def _scaling(facts: Facts, status: TrainingJobStatus) -> Iterator[Event]:
    before = facts.job.status
    old, new = before.workers.desired, status.workers.desired
    if before.start_time and old != new and old and new:  # not when suspended or resumed
        yield Event("Normal", "ScaledUp" if new > old else "ScaledDown", f"workers: {old} -> {new}")
