"""The parts of the status that come from parameter server 0's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from shoal.api.planning_status import PredictionStatus
from shoal.api.training_job_status import (
    DataStatus,
    LastDisruption,
    Output,
    TrainingJobStatus,
    TrainingProgress,
)
from shoal.manifests.names import place_of_name
from shoal.policy.common.times import parse_time, seconds_between, whole
from shoal.policy.decide.members import ByIndex
from shoal.policy.facts.read import Facts
from shoal_trainer.contract import DataReport, Outcome, StatusReport, TerminationMessage

MAX_MESSAGE = 1024
"""Characters of a message of the trainer, which may contain much of an error."""
MAX_METRICS, MAX_METRIC_NAME = 64, 128


def decimal(value: float | None) -> str | None:
    """A number with at least four significant digits."""
    if value is None:
        return None
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"


def progress(facts: Facts) -> TrainingProgress:
    """`status.training`. The step never decreases, though the server's does when it restarts from a snapshot.

    Except when training began again from nothing: an old step would look as if the job hung. Steps that are done again
    are progress once: a job that goes back to the same snapshot again and again makes none.
    """
    before, report = facts.job.status.training, facts.report
    if facts.coordinator_pod is None or (report is None and facts.seen.report is not None):
        return without_rates(before)
    if report is None:  # the operator has just started
        return before.model_copy(update={"message": ""}) if before.message else before
    again = report.restarted_from_nothing > before.restarts_from_nothing
    regained = before.regained_step
    grew = report.step > (before.step if regained is None else regained)
    step = report.step if again else max(before.step, report.step)
    return TrainingProgress(
        phase=report.phase.value,
        step=step,
        regained_step=max(report.step, regained or 0) if report.step < step else None,
        epoch=report.epoch if again else max(before.epoch, report.epoch),
        loss=decimal(report.loss) or before.loss,
        samples_per_second=decimal(report.samples_per_second),
        progress_percent=_percent(report) if report.progress_percent is not None else before.progress_percent,
        remaining_seconds=None
        if report.remaining_seconds is None
        else max(0, round(report.remaining_seconds)),
        wasted_steps=max(before.wasted_steps, report.wasted_steps),
        goodput=decimal(report.goodput) or before.goodput,
        input_wait=decimal(report.input_wait) or before.input_wait,
        last_progress_time=facts.now if grew else before.last_progress_time,
        message=_first(report.messages),
        restarts_from_nothing=max(before.restarts_from_nothing, report.restarted_from_nothing),
        metrics=_metrics(report.metrics) or before.metrics,
    )


def without_rates(before: TrainingProgress) -> TrainingProgress:
    """The progress of a job that does not train now."""
    nothing: dict[str, object] = {
        "samples_per_second": None,
        "remaining_seconds": None,
        "input_wait": None,
        "message": "",
    }
    if all(getattr(before, name) == value for name, value in nothing.items()):
        return before
    return before.model_copy(update=nothing)


def _metrics(reported: Mapping[str, float]) -> dict[str, str]:
    """The reported metrics: only so many, since a status that is too large is refused."""
    names = sorted(name for name in reported if len(name) <= MAX_METRIC_NAME)[:MAX_METRICS]
    return {name: decimal(reported[name]) or "" for name in names}


def _first(messages: Sequence[str]) -> str:
    """The first message and the number of others: many workers usually wait for the same."""
    if not messages:
        return ""
    others = f" (and {len(messages) - 1} more)" if messages[1:] else ""
    return messages[0][:MAX_MESSAGE] + others


def _percent(report: StatusReport) -> int:
    return min(100, max(0, int(report.progress_percent or 0)))


def data(before: DataStatus, report: DataReport | None) -> DataStatus:
    """`status.data`: figures of the epoch as reported, totals of the run only growing."""
    if report is None:
        return before
    return DataStatus(
        done=report.done,
        leased=report.leased,
        total=report.total,
        repeated=max(before.repeated, report.repeated),
        partial=max(before.partial, report.partial),
        lost=max(before.lost, report.lost),
    )


def final(before: TrainingJobStatus, message: TerminationMessage) -> dict[str, object]:
    """The changes to the status that follow from parameter server 0's termination message."""
    training = before.training.model_copy(
        update={
            "phase": message.outcome.value,
            "step": max(before.training.step, message.step),
            "regained_step": None,
            "epoch": max(before.training.epoch, message.epoch),
            "loss": decimal(message.loss) or before.training.loss,
            "message": "",
            "progress_percent": 100,
            "remaining_seconds": 0,
            "wasted_steps": max(before.training.wasted_steps, message.wasted_steps),
            "metrics": _metrics(message.metrics) or before.training.metrics,
        }
    )
    output = (
        Output(uri=message.model_uri, digest=message.model_digest) if message.model_uri else before.output
    )
    counts = data(before.data, message.data)
    if message.outcome is Outcome.SUCCEEDED:  # exact: a later comparison of the servers may have lowered them
        found = message.data
        counts = counts.model_copy(
            update={"repeated": found.repeated, "partial": found.partial, "lost": found.lost}
        )
    return {"training": training, "data": counts, "output": output}


def last_snapshot(facts: Facts) -> datetime | None:
    """The oldest of the shards' last snapshots; at most now, where a node's clock is ahead."""
    before = facts.job.status.parameter_servers.last_snapshot_time
    shards = facts.report.shards if facts.report else ()
    if not shards or any(s.last_snapshot_at is None for s in shards):
        return before
    now = whole(facts.now)
    at = min(now, whole(datetime.fromtimestamp(min(s.last_snapshot_at or 0.0 for s in shards), UTC)))
    return max(at, before) if before and before <= now else at


def recovery(last: LastDisruption | None, facts: Facts, workers: ByIndex) -> LastDisruption | None:
    """Add how long it took until the replacement was created, and until its first push."""
    place = place_of_name(last.pod) if last else None
    if last is None or place is None or place.role != "worker" or last.recovered_seconds is not None:
        return last
    at_rest = facts.at_rest.get(place.index)
    there = (*workers.get(place.index, ()), *((at_rest,) if at_rest else ()))
    replacement = next((each.pod for each in there if each.pod and each.place > place), None)
    created = parse_time(replacement.metadata.creation_timestamp) if replacement else None
    if created is not None and last.replacement_created_seconds is None:
        last = last.model_copy(update={"replacement_created_seconds": seconds_between(last.time, created)})
    pushed = facts.coordinator.pushed
    pushes = [at for p, at in pushed.items() if p.index == place.index and p.incarnation > place.incarnation]
    if pushes:
        at = datetime.fromtimestamp(min(pushes), UTC)
        last = last.model_copy(update={"recovered_seconds": seconds_between(last.time, at)})
    return last


def prediction(facts: Facts) -> PredictionStatus | None:
    """What the planner expects of the job. What its workers did before its user suspended it may be of another week.

    While its queue holds it, it is planned, and may be back in a minute.
    """
    said = _expected(facts)
    if said is None or not facts.job.spec.suspend:
        return said
    return said.model_copy(update={"relative_error": None, "watched_seconds": None})


def _expected(facts: Facts) -> PredictionStatus | None:
    before, proposal = facts.job.status.prediction, facts.seen.proposal
    if proposal is None:
        return before
    if proposal.samples_per_second is None:
        known = (before or PredictionStatus()).model_copy(update={"course": proposal.course})
        return known if proposal.course else before
    left, between = proposal.remaining_seconds, proposal.remaining_range
    watched = proposal.watched_seconds
    return PredictionStatus(
        samples_per_second=decimal(proposal.samples_per_second),
        remaining_seconds=None if left is None else round(left),
        earliest_seconds=None if between is None else round(between[0]),
        latest_seconds=None if between is None else round(between[1]),
        relative_error=decimal(proposal.relative_error),
        watched_seconds=None if watched is None else round(watched),
        basis=proposal.basis,
        course=proposal.course or None,
    )
