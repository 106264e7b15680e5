"""Metrics: counted from written statuses, with few labels."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import generate_latest

from shoal.api.base import Condition
from shoal.api.planning_status import CostStatus, PlanStatus, PredictionStatus
from shoal.api.training_job import MANAGED_BY, TrainingJob
from shoal.api.training_job_status import Restarts, TrainingJobStatus
from shoal.cluster.cache import Cache
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.policy.facts.losses import BY_NODE, LOSSES
from shoal.runtime.metrics import Metrics
from tests.unit.policy import build

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def status(disruptions: int, failures: int, **by_reason: int) -> TrainingJobStatus:
    return TrainingJobStatus(
        restarts=Restarts(disruptions=disruptions, failures=failures, by_reason=by_reason)
    )


def test_only_increments_are_counted() -> None:
    metrics = JobMetrics(process := Metrics())
    one, two = status(1, 0, Gone=1), status(2, 1, Gone=2, Error=1)
    for old, new in ((TrainingJobStatus(), one), (one, two), (two, two)):
        metrics.count_changes("u", old, new, NOW)
    read = process.registry.get_sample_value
    assert read("shoal_disruptions_total") == 2
    assert read("shoal_failures_total") == 1
    assert read("shoal_workers_lost_total", {"reason": "Gone"}) == 2
    assert read("shoal_workers_lost_total", {"reason": "Error"}) == 1


def test_the_first_wave_of_losses_is_an_increase() -> None:
    """Of a series that begins with what it counts, Prometheus sees none: a cloud takes nodes within one scrape."""
    metrics = JobMetrics(process := Metrics())
    read = process.registry.get_sample_value
    assert {read("shoal_workers_lost_total", {"reason": each}) for each in LOSSES} == {0}
    stages = [
        ("ps", "created"),
        ("ps", "running"),
        *(("worker", each) for each in ("created", "running", "first_push")),
    ]
    known = [{"role": role, "stage": stage, "reason": reason} for role, stage in stages for reason in BY_NODE]
    assert {read("shoal_reaction_seconds_count", each) for each in known} == {0}
    metrics.reacted("worker", "NodeShutdown", "created", 90.0)
    labels = {"role": "worker", "stage": "created", "reason": "NodeShutdown"}
    assert read("shoal_reaction_seconds_count", labels) == 1
    assert len(generate_latest(process.registry).splitlines()) < 2000, "each of 50 reasons would be 5000"


def test_costs_plans_and_predictions_are_compared_with_what_came() -> None:
    metrics = JobMetrics(process := Metrics())
    said = PredictionStatus(remaining_seconds=90, relative_error="-0.25")
    later = PredictionStatus(remaining_seconds=10, relative_error="0")
    one = TrainingJobStatus(
        prediction=said,
        plan=PlanStatus(revision=2),
        cost=CostStatus(accumulated="1.5", saved_versus_on_demand="3"),
    )
    two = one.model_copy(update={"prediction": later, "cost": CostStatus(accumulated="1.75")})
    done = two.model_copy(
        update={
            "phase": "Succeeded",
            "conditions": (Condition(type="Complete", status="True", reason="x", last_transition_time=NOW),),
        }
    )
    steps = [TrainingJobStatus(), one, two, done]
    for seconds, (old, new) in zip((0, 50, 100), pairwise(steps), strict=True):
        metrics.count_changes("u", old, new, NOW + timedelta(seconds=seconds))
    read = process.registry.get_sample_value
    assert read("shoal_cost_total") == 1.75
    assert read("shoal_cost_saved_total") == 3
    assert read("shoal_plan_changes_total") == 2
    assert read("shoal_predicted_speed_ratio_sum") == 0.75 + 1
    assert read("shoal_predicted_finish_ratio_sum") == 0.9
    assert read("shoal_predicted_finish_ratio_count") == 1


def test_jobs_are_counted_by_phase_without_names() -> None:
    metrics = JobMetrics(process := Metrics())
    phases = ("Running", "Running", "", "Failed")
    jobs = [
        TrainingJob.model_validate({**build.job_manifest(), "status": {"phase": each}}) for each in phases
    ]
    metrics.count_jobs(lambda: jobs)
    text = generate_latest(process.registry).decode()
    assert 'shoal_jobs{phase="Running"} 2.0' in text
    assert 'shoal_jobs{phase="Pending"} 1.0' in text
    assert "job=" not in text


def test_jobs_are_counted_by_the_conditions_of_trouble_that_hold() -> None:
    metrics = JobMetrics(process := Metrics())
    states = [
        {"NodeSignalsSuspect": "True", "Degraded": "True", "Running": "True"},
        {"NodeSignalsSuspect": "True", "Degraded": "False"},
        {"Stalled": "Unknown", "Complete": "True"},
    ]
    always = {"reason": "X", "lastTransitionTime": build.stamp(build.NOW)}
    conditions = [
        [{"type": kind, "status": is_so, **always} for kind, is_so in each.items()] for each in states
    ]
    jobs = [build.job({"conditions": each}) for each in conditions]
    metrics.count_jobs(lambda: jobs)
    text = generate_latest(process.registry).decode()
    assert sorted(line for line in text.splitlines() if line.startswith("shoal_jobs_troubled{")) == [
        'shoal_jobs_troubled{condition="Degraded"} 1.0',
        'shoal_jobs_troubled{condition="NodeSignalsSuspect"} 2.0',
    ]


def test_jobs_that_cannot_be_read_are_counted_though_nothing_else_is_known_of_them() -> None:
    """After a rollback below newer CRDs no job is read, and none is in the numbers of jobs."""
    cache = Cache[TrainingJob](lambda _old, _new, _ours: None)
    metrics = JobMetrics(process := Metrics())
    metrics.count_jobs(cache.all, unreadable=cache.unread)
    read = process.registry.get_sample_value
    assert read("shoal_jobs_unreadable") == 0
    cache.leave_unread("u1", 7)
    cache.leave_unread("u2", 8)
    assert read("shoal_jobs_unreadable") == 2
    cache.drop("u1", 9)
    assert read("shoal_jobs_unreadable") == 1


def test_jobs_that_have_not_begun_are_counted_by_reason() -> None:
    metrics = JobMetrics(process := Metrics())
    states = [
        {},
        {"phase": "Pending", "reason": "Invalid"},
        {"phase": "Starting", "reason": "WaitingForStorage"},
        {"phase": "Starting", "reason": "WaitingForStorage"},
        {"phase": "Running", "reason": "BelowMinReplicas"},
        {"phase": "Suspended", "reason": "Queued"},
        {"phase": "Failed", "reason": "UserError"},
    ]
    jobs = [TrainingJob.model_validate({**build.job_manifest(), "status": each}) for each in states]
    metrics.count_jobs(lambda: jobs)
    text = generate_latest(process.registry).decode()
    assert sorted(line for line in text.splitlines() if line.startswith("shoal_jobs_waiting{")) == [
        'shoal_jobs_waiting{reason="Invalid"} 1.0',
        'shoal_jobs_waiting{reason="Pending"} 1.0',
        'shoal_jobs_waiting{reason="WaitingForStorage"} 2.0',
    ]


def oldest(at: timedelta, *states: dict[str, Any], **spec: Any) -> dict[str, float]:
    """The age of the oldest wait by reason, so long after the jobs were created."""
    created = {"creationTimestamp": build.stamp(build.NOW)}
    manifest = build.job_manifest(**spec)
    manifest["metadata"] |= created
    jobs = [TrainingJob.model_validate({**manifest, "status": each}) for each in states]
    metrics = JobMetrics(process := Metrics(), wall=lambda: build.NOW + at)
    metrics.count_jobs(lambda: jobs)
    return {
        sample.labels["reason"]: sample.value
        for family in process.registry.collect()
        for sample in family.samples
        if sample.name == "shoal_jobs_waiting_oldest_seconds"
    }


def waiting(reason: str = "", **since: int) -> dict[str, Any]:
    """A job that is Starting, with these conditions False; numbers are minutes after it was created."""
    conditions = [
        {
            "type": kind,
            "status": "False",
            "reason": "X",
            "lastTransitionTime": build.stamp(build.NOW + timedelta(minutes=minutes)),
        }
        for kind, minutes in since.items()
    ]
    return {"phase": "Starting", "reason": reason, "conditions": conditions}


def test_the_oldest_wait_is_that_of_one_job() -> None:
    """The number of those that wait is above 0 where jobs come and go, and none of them waits for long."""
    hour = timedelta(hours=1)
    ready = {"phase": "Running", "reason": "Training"}
    assert oldest(hour, waiting("Unschedulable"), waiting("Unschedulable", Running=20), ready, {}) == {
        "Unschedulable": 3600,
        "Pending": 3600,
    }


@pytest.mark.parametrize("condition", ["Suspended", "QuotaExceeded", "Degraded", "Running"])
def test_a_wait_begins_anew_with_what_a_job_waits_for(condition: str) -> None:
    """A resume, quota, a place in a queue: before it nobody expected the job to train."""
    assert oldest(timedelta(hours=3), waiting(**{condition: 170})) == {"Starting": 600}
    assert oldest(timedelta(0), waiting(**{condition: 1})) == {"Starting": 0}, "the clock of another leader"


def test_a_job_of_another_controller_is_not_counted() -> None:
    assert oldest(timedelta(hours=1), {}, managedBy="kueue.x-k8s.io/multikueue") == {}
    assert oldest(timedelta(hours=1), {}, managedBy=MANAGED_BY) == {"Pending": 3600}
    jobs = [TrainingJob.model_validate(build.job_manifest(managedBy="x.io/y"))]
    metrics = JobMetrics(process := Metrics())
    metrics.count_jobs(lambda: jobs)
    text = generate_latest(process.registry).decode()
    assert "shoal_jobs_waiting{" not in text
    assert "shoal_jobs{" not in text
