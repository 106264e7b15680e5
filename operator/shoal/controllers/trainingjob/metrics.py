"""Prometheus metrics of TrainingJobs: the increments between two written statuses, so that nothing is counted twice."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Counter

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus
from shoal.runtime.metrics import Metrics


class JobMetrics:
    """The metrics of all jobs together. No label contains a job's name, so that their number stays small."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.registry = registry = metrics.registry
        self.actions = Counter(
            "shoal_actions_total",
            "Actions of reconciles of jobs, by kind and result.",
            ["action", "result"],
            registry=registry,
        )
        self.polls = Counter(
            "shoal_coordinator_polls_total",
            "Reads of coordinators, by result: read, unreachable.",
            ["result"],
            registry=registry,
        )
        self.disruptions = Counter(
            "shoal_disruptions_total", "Workers that the platform disrupted.", registry=registry
        )
        self.failures = Counter(
            "shoal_failures_total", "Failures of jobs (disruptions not included).", registry=registry
        )
        self.lost = Counter(
            "shoal_workers_lost_total",
            "Failures and disruptions of workers, by reason.",
            ["reason"],
            registry=registry,
        )
        self.server_restarts = Counter(
            "shoal_parameter_server_restarts_total",
            "Replacements and restarts of parameter servers.",
            registry=registry,
        )

    def count_jobs(self, jobs: Callable[[], Iterable[TrainingJob]]) -> None:
        """Export the number of jobs by phase, computed at each scrape."""
        self._metrics.live(
            "shoal_jobs",
            "TrainingJobs by phase.",
            "phase",
            lambda: Count(job.status.phase or "Pending" for job in jobs()),
        )

    def count_changes(self, old: TrainingJobStatus, new: TrainingJobStatus) -> None:
        """Count the increments between two written statuses."""
        self.disruptions.inc(max(0, new.restarts.disruptions - old.restarts.disruptions))
        self.failures.inc(max(0, new.restarts.failures - old.restarts.failures))
        self.server_restarts.inc(max(0, new.parameter_servers.restarts - old.parameter_servers.restarts))
        for reason, more in _increments(old.restarts.by_reason, new.restarts.by_reason).items():
            self.lost.labels(reason).inc(more)


def _increments(old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    return {reason: count - old.get(reason, 0) for reason, count in new.items() if count > old.get(reason, 0)}
