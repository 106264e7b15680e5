"""Events about what changed since the last status."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.api.training_job_status import TrainingJobStatus
from shoal.policy.decide.decide import Decisions
from shoal.policy.decide.members import FELL_BACK, MOVED, every
from shoal.policy.facts.quota import PENDING
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import home_of
from shoal.policy.model import Event

_REPORTED = ("Degraded", "Stalled", "QuotaExceeded", "NodeSignalsSuspect")
"""Conditions that are also events when they become True or change their reason."""


def events_of_changes(facts: Facts, decided: Decisions, status: TrainingJobStatus) -> Iterator[Event]:
    """The events that follow from the new status."""
    before = facts.job.status
    yield from _replacements(facts, decided)
    yield from _homes(facts, decided)
    yield from _suspension(before, status)
    yield from _queueing(before, status)
    yield from _scaling(facts, status)
    if status.training.restarts_from_nothing > before.training.restarts_from_nothing:
        words = "the parameter servers were lost with all snapshots: training began again from its initial parameters"
        yield Event("Warning", "TrainingRestarted", words)
    yield from failures_told(before, status)


def failures_told(before: TrainingJobStatus, status: TrainingJobStatus) -> Iterator[Event]:
    """What is wrong now, and was not, or for another reason."""
    for kind in _REPORTED:
        was, now = before.condition(kind), status.condition(kind)
        if now and now.status == "True" and (not was or (was.status, was.reason) != ("True", now.reason)):
            yield Event("Warning", now.reason, now.message)


def _replacements(facts: Facts, decided: Decisions) -> Iterator[Event]:
    """Of servers: that a worker is replaced, its own pod tells, and the condition `Disrupted`."""
    recorded = {slot.place: slot for slot in facts.records if slot.role == "ps"}
    for each in every(decided.servers):
        if not each.slot.replaces or each.slot.state != "Running" or not each.pod:
            continue
        if each.place in recorded and recorded[each.place].has_run:
            continue
        where = f" on node {each.slot.node}" if each.slot.node else ""
        yield Event("Normal", "ParameterServerRestored", f"{each.pod.metadata.name} is running{where}")


def _homes(facts: Facts, decided: Decisions) -> Iterator[Event]:
    """FellBackToOnDemand and ReturnedToSpot."""
    wanted = decided.wanted
    if not facts.job.spec.workers.fallback:
        return
    fell = (each for each in every(decided.workers) if each.slot.cause == FELL_BACK and not each.recorded)
    for each in fell:
        index = each.place.index
        home = wanted.homes[index]
        where = f"a node of pool {home.pool}" if home.pool else "an on-demand node"
        yield Event(
            "Warning",
            "FellBackToOnDemand",
            f"worker {index} waited for a spot node in vain: it runs on {where}",
        )
    was_starting = {slot.place for slot in facts.job.status.slots if slot.state == "Starting"}
    for index, members in decided.workers.items():
        newest = members[-1]
        moved = any(each.slot.cause == MOVED for each in members[:-1])
        if moved and newest.slot.state == "Running" and newest.place in was_starting:
            where = f"a node of pool {newest.slot.pool}" if newest.slot.pool else "a spot node"
            if not wanted.places.is_on_demand(home_of(newest.slot)):
                yield Event("Normal", "ReturnedToSpot", f"worker {index} runs on {where} again")


def _suspension(before: TrainingJobStatus, after: TrainingJobStatus) -> Iterator[Event]:
    """Suspended and Resumed."""
    was, now = (_is_suspended(status) for status in (before, after))
    if now == was or (before.start_time is None and after.condition("QuotaReserved") is not None):
        return  # it has only waited for quota
    if now:
        words = "the job is suspended: its servers saved a final snapshot and ended"
        yield Event("Normal", "Suspended", words)
    else:
        yield Event("Normal", "Resumed", "the job resumes from its last snapshot")


def _queueing(before: TrainingJobStatus, after: TrainingJobStatus) -> Iterator[Event]:
    """Queued, Admitted and Evicted."""
    was, now = (status.condition("QuotaReserved") for status in (before, after))
    if now is None or (was and (was.status, was.reason) == (now.status, now.reason)):
        return
    if now.status == "True":
        yield Event("Normal", "Admitted", now.message)
    elif was and was.status == "True" and now.reason not in {PENDING, "Suspended", "Finished"}:
        yield Event("Warning", "Evicted", f"{now.reason}: {now.message}")
    elif now.reason == PENDING:
        yield Event("Normal", "Queued", now.message)


def _is_suspended(status: TrainingJobStatus) -> bool:
    condition = status.condition("Suspended")
    return condition is not None and condition.status == "True"


def _scaling(facts: Facts, status: TrainingJobStatus) -> Iterator[Event]:
    before = facts.job.status
    old, new = before.workers.desired, status.workers.desired
    if before.start_time and old != new and old and new:  # not when suspended or resumed
        yield Event("Normal", "ScaledUp" if new > old else "ScaledDown", f"workers: {old} -> {new}")
