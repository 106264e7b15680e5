"""What happened to a job, in time order and in words: `shoal status`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shoal.api.training_job import TrainingJob
from shoal.client.words import count, duration


@dataclass(frozen=True, order=True)
class Moment:
    """One thing that happened. `kind`: normal, warning, or good."""

    at: datetime
    what: str
    kind: str = "normal"


def moments(job: TrainingJob, events: Iterable[Mapping[str, Any]] = ()) -> list[Moment]:
    """From the status, which keeps the newest pod of each slot, and from events as far as Kubernetes still has them."""
    return sorted({*_life(job), *_pods(job), *_conditions(job), *_events(events)})


def _life(job: TrainingJob) -> Iterator[Moment]:
    status = job.status
    if job.metadata.creation_timestamp:
        yield Moment(datetime.fromisoformat(job.metadata.creation_timestamp), "the job was created")
    if status.completion_time:
        yield Moment(
            status.completion_time,
            f"the job has {status.phase.lower()}",
            "good" if status.phase == "Succeeded" else "warning",
        )
    if last := status.last_disruption:
        words = f"{last.pod} on {last.node or 'a node that is gone'} was taken: {last.reason}"
        if last.replacement_created_seconds is not None:
            words += f"; its replacement was created {duration(last.replacement_created_seconds)} later"
        if last.recovered_seconds is not None:
            words += f" and trained after {duration(last.recovered_seconds)}"
        yield Moment(last.time, words, "warning")
    if failed := status.last_failure:
        code = f", exit code {failed.exit_code}" if failed.exit_code is not None else ""
        yield Moment(
            failed.time, f"{failed.pod} failed: {failed.reason}{code}. {failed.message}".strip(), "warning"
        )


def _pods(job: TrainingJob) -> Iterator[Moment]:
    for slot in job.status.slots:
        name = f"{slot.role} {slot.index}-{slot.incarnation}"
        where = f" on {slot.node}" + (f" ({slot.pool})" if slot.pool else "") if slot.node else ""
        if slot.running_at:
            waited = (
                f", {duration((slot.running_at - slot.created_at).total_seconds())} after it was created"
                if slot.created_at
                else ""
            )
            yield Moment(slot.running_at, f"{name} runs{where}{waited}")
        elif slot.created_at:
            yield Moment(slot.created_at, f"{name} was created and does not run yet")
        if slot.ended_at:
            leaving = "is leaving" if slot.state == "Draining" else "ended"
            yield Moment(
                slot.ended_at,
                f"{name} {leaving}{where}" + (f": {slot.cause}" if slot.cause else ""),
                "warning" if slot.cause else "normal",
            )


def _conditions(job: TrainingJob) -> Iterator[Moment]:
    for condition in job.status.conditions:
        if condition.status == "True" and condition.message:
            kind = (
                "good" if condition.type == "Complete" else "warning" if condition.type in _BAD else "normal"
            )
            yield Moment(condition.last_transition_time, f"{condition.type}: {condition.message}", kind)


_BAD = {"Failed", "Stalled", "QuotaExceeded", "Degraded", "Disrupted", "NodeSignalsUnavailable"}


def _events(events: Iterable[Mapping[str, Any]]) -> Iterator[Moment]:
    for event in events:
        at = (
            event.get("lastTimestamp")
            or event.get("eventTime")
            or (event.get("series") or {}).get("lastObservedTime")
        )
        if not at:
            continue
        times = int(event.get("count") or 1)
        again = f" ({count(times, 'time')})" if times > 1 else ""
        about = event["involvedObject"]
        who = f"{about['name']}: " if about.get("kind") == "Pod" else ""
        kind = "warning" if event.get("type") == "Warning" else "normal"
        yield Moment(
            datetime.fromisoformat(at),
            f"{who}{event.get('message', '').strip()} [{event.get('reason', '')}]{again}",
            kind,
        )
