"""What happened to a job, in time order and in words: `shoal status`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TROUBLE
from shoal.words import count, duration


@dataclass(frozen=True, order=True)
class Moment:
    """One thing that happened. `kind`: normal, warning, or good."""

    at: datetime
    what: str
    kind: str = "normal"


OLDEST = "1970-01-01T00:00:00+00:00"
Objects = Iterable[Mapping[str, Any]]


def moments(job: TrainingJob, events: Objects = (), pods: Objects = ()) -> list[Moment]:
    """From the status, which keeps the newest pod of each slot, from pods and events as far as there still are any."""
    return sorted({*_life(job), *_slots(job), *_pods(pods, job), *_conditions(job), *_events(events, job)})


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


def _slots(job: TrainingJob) -> Iterator[Moment]:
    for slot in job.status.slots:
        if slot.ended_at:
            name = f"{slot.role} {slot.index}-{slot.incarnation}"
            what = "is leaving" if slot.state == "Draining" else "ended"
            why = f": {slot.cause}" if slot.cause else ""
            yield Moment(
                slot.ended_at,
                f"{name} {what}{_where(slot.node, slot.pool)}{why}",
                "warning" if why else "normal",
            )


def _pods(pods: Iterable[Mapping[str, Any]], job: TrainingJob) -> Iterator[Moment]:
    pools = {(slot.role, slot.index, slot.incarnation): slot.pool for slot in job.status.slots}
    for pod in pods:
        labels, status = pod["metadata"].get("labels") or {}, pod.get("status", {})
        role = labels.get("shoal.dev/role", "")
        place = (role, int(labels.get("shoal.dev/index", -1)), int(labels.get("shoal.dev/incarnation", -1)))
        name = f"{role} {place[1]}-{place[2]}"
        created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
        began = _began(status, role)
        if began is None:
            yield Moment(created, f"{name} was created and does not run yet")
        else:
            waited = duration((began - created).total_seconds())
            where = _where(pod["spec"].get("nodeName", ""), pools.get(place, ""))
            yield Moment(began, f"{name} runs{where}, {waited} after it was created")


def _began(status: Mapping[str, Any], container: str) -> datetime | None:
    """When the container started, as far as its pod says."""
    for each in status.get("containerStatuses") or ():
        if each["name"] == container:
            state = each.get("state") or {}
            begun = (state.get("running") or state.get("terminated") or {}).get("startedAt")
            return datetime.fromisoformat(begun) if begun else None
    return None


def _where(node: str, pool: str) -> str:
    return f" on {node}" + (f" ({pool})" if pool else "") if node else ""


def _told(job: TrainingJob) -> dict[str, str]:
    """What the conditions that hold say, by type; not what is part of another one."""
    held = {
        each.type: each.message for each in job.status.conditions if each.status == "True" and each.message
    }
    if any(message in held.get("Reconciling", "") for kind, message in held.items() if kind != "Reconciling"):
        del held["Reconciling"]
    return held


def _conditions(job: TrainingJob) -> Iterator[Moment]:
    told = _told(job)
    for condition in job.status.conditions:
        if condition.type in told:
            bad = "warning" if condition.type in TROUBLE else "normal"
            kind = "good" if condition.type == "Complete" else bad
            yield Moment(condition.last_transition_time, f"{condition.type}: {condition.message}", kind)


def _events(events: Iterable[Mapping[str, Any]], job: TrainingJob) -> Iterator[Moment]:
    """Not those of an earlier job, what goes well for kubelet and scheduler, nor what a condition says, too."""
    told = _told(job).values()
    created = datetime.fromisoformat(job.metadata.creation_timestamp or OLDEST)
    for event in events:
        at = (
            event.get("lastTimestamp")
            or event.get("eventTime")
            or (event.get("series") or {}).get("lastObservedTime")
        )
        usual = event["involvedObject"].get("kind") == "Pod" and event.get("type") == "Normal"
        if not at or usual or datetime.fromisoformat(at) < created:
            continue
        if (message := event.get("message", "").strip()) and any(message in each for each in told):
            continue
        times = int(event.get("count") or 1)
        again = f" ({count(times, 'time')})" if times > 1 else ""
        about = event["involvedObject"]
        who = f"{about['name']}: " if about.get("kind") == "Pod" else ""
        kind = "warning" if event.get("type") == "Warning" else "normal"
        yield Moment(
            datetime.fromisoformat(at),
            f"{who}{message} [{event.get('reason', '')}]{again}",
            kind,
        )
