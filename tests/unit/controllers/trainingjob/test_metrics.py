"""Metrics: counted from written statuses, with few labels."""

from __future__ import annotations

from prometheus_client import generate_latest

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import Restarts, TrainingJobStatus
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.runtime.metrics import Metrics
from tests.unit.policy import build


def status(disruptions: int, failures: int, **by_reason: int) -> TrainingJobStatus:
    return TrainingJobStatus(
        restarts=Restarts(disruptions=disruptions, failures=failures, by_reason=by_reason)
    )


def test_only_increments_are_counted() -> None:
    metrics = JobMetrics(Metrics())
    one, two = status(1, 0, Gone=1), status(2, 1, Gone=2, Error=1)
    metrics.count_changes(TrainingJobStatus(), one)
    metrics.count_changes(one, two)
    metrics.count_changes(two, two)
    read = metrics.registry.get_sample_value
    assert read("shoal_disruptions_total") == 2
    assert read("shoal_failures_total") == 1
    assert read("shoal_workers_lost_total", {"reason": "Gone"}) == 2
    assert read("shoal_workers_lost_total", {"reason": "Error"}) == 1


def test_jobs_are_counted_by_phase_without_names() -> None:
    metrics = JobMetrics(Metrics())
    phases = ("Running", "Running", "", "Failed")
    jobs = [
        TrainingJob.model_validate({**build.job_manifest(), "status": {"phase": each}}) for each in phases
    ]
    metrics.count_jobs(lambda: jobs)
    text = generate_latest(metrics.registry).decode()
    assert 'shoal_jobs{phase="Running"} 2.0' in text
    assert 'shoal_jobs{phase="Pending"} 1.0' in text
    assert "job=" not in text
