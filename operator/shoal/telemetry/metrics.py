"""Prometheus metrics of the operator. No label contains a job's name, so that their number stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shoal.api.training_job_status import TrainingJobStatus

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """All metrics, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "shoal_reconcile_seconds",
            "Duration of one reconcile of a job.",
            ["result"],
            buckets=FAST,
            registry=self.registry,
        )
        self.actions = Counter(
            "shoal_actions_total",
            "Actions of reconciles, by kind and result.",
            ["action", "result"],
            registry=self.registry,
        )
        self.watch_restarts = Counter(
            "shoal_watch_restarts_total",
            "Watches that were restarted, by resource and reason.",
            ["resource", "reason"],
            registry=self.registry,
        )
        self.status_writes = Counter(
            "shoal_status_writes_total",
            "Status updates of jobs, by result.",
            ["result"],
            registry=self.registry,
        )
        self.disruptions = Counter(
            "shoal_disruptions_total", "Workers that the platform disrupted.", registry=self.registry
        )
        self.failures = Counter(
            "shoal_failures_total", "Failures of jobs (disruptions not included).", registry=self.registry
        )
        self.lost = Counter(
            "shoal_workers_lost_total",
            "Failures and disruptions of workers, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.server_restarts = Counter(
            "shoal_parameter_server_restarts_total",
            "Replacements and restarts of parameter servers.",
            registry=self.registry,
        )
        self.leading = Gauge(
            "shoal_leading",
            "1 while this process holds the Lease and has read the cluster.",
            registry=self.registry,
        )

    def count_jobs(self, phases: Callable[[], Iterable[str]], queued: Callable[[], int]) -> None:
        """Export the number of jobs by phase and of queued jobs, computed at each scrape."""
        self.registry.register(_LiveGauges(phases, queued))

    def count_changes(self, old: TrainingJobStatus, new: TrainingJobStatus) -> None:
        """Count the increments between two written statuses, so that nothing is counted twice."""
        self.disruptions.inc(max(0, new.restarts.disruptions - old.restarts.disruptions))
        self.failures.inc(max(0, new.restarts.failures - old.restarts.failures))
        self.server_restarts.inc(max(0, new.parameter_servers.restarts - old.parameter_servers.restarts))
        for reason, more in _increments(old.restarts.by_reason, new.restarts.by_reason).items():
            self.lost.labels(reason).inc(more)


class _LiveGauges(Collector):
    def __init__(self, phases: Callable[[], Iterable[str]], queued: Callable[[], int]) -> None:
        self._phases = phases
        self._queued = queued

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterable[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("shoal_jobs", "TrainingJobs by phase.", labels=["phase"])
        counts: dict[str, int] = {}
        for phase in self._phases():
            counts[phase or "Pending"] = counts.get(phase or "Pending", 0) + 1
        for phase, count in sorted(counts.items()):
            jobs.add_metric([phase], count)
        yield jobs
        waiting = GaugeMetricFamily("shoal_queue_length", "Jobs waiting to be reconciled.")
        waiting.add_metric([], self._queued())
        yield waiting


def _increments(old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    return {reason: count - old.get(reason, 0) for reason, count in new.items() if count > old.get(reason, 0)}
