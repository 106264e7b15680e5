"""The status in Prometheus' format: few series, none for each worker but its step time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal_trainer.contract import StatusReport, WorkerState

log = logging.getLogger(__name__)


class StatusCollector(Collector):
    """Reads `status` at each scrape."""

    def __init__(self, status: Callable[[], StatusReport]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """One family for each figure."""
        status = self._status()
        gauges: dict[str, tuple[str, float | None]] = {
            "shoal_loss": ("Smoothed training loss.", status.loss),
            "shoal_samples_per_second": (
                "Samples whose gradients were applied, a second.",
                status.samples_per_second,
            ),
            "shoal_progress_ratio": ("Share of the work done.", _ratio(status.progress_percent)),
            "shoal_goodput_ratio": ("Share of the computed steps that count.", status.goodput),
            "shoal_input_wait_ratio": (
                "Share of the workers' time that they wait for input.",
                status.input_wait,
            ),
            "shoal_epoch": ("Passes over the data that are complete.", float(status.epoch)),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(name, text, value)
        counters = {
            "shoal_steps": ("Steps (batches) that are in the parameters.", status.step),
            "shoal_samples": ("Samples whose gradients are in the parameters.", status.samples),
            "shoal_wasted_steps": ("Steps computed in vain.", status.wasted_steps),
            "shoal_rollbacks": ("Times that the job went back to a snapshot.", status.rollbacks),
            "shoal_samples_repeated": ("Samples applied twice.", status.data.repeated),
            "shoal_samples_partial": ("Samples applied on some shards only.", status.data.partial),
            "shoal_samples_lost": ("Samples called done that no parameters hold.", status.data.lost),
        }
        for name, (text, number) in counters.items():
            yield CounterMetricFamily(name, text, number)
        workers = GaugeMetricFamily("shoal_workers", "Workers by state.", labels=["state"])
        for state in WorkerState:
            workers.add_metric([state.value], sum(worker.state is state for worker in status.workers))
        yield workers
        parts = GaugeMetricFamily(
            "shoal_step_seconds", "Smoothed seconds of a step.", labels=["slot", "part"]
        )
        for worker in status.workers:
            if worker.state is WorkerState.ACTIVE:
                for part in ("step", "compute", "pull", "push", "input"):
                    seconds = getattr(worker, f"{part}_seconds")
                    if seconds is not None:
                        parts.add_metric([str(worker.slot), part], seconds)
        yield parts


def serve_metrics(status: Callable[[], StatusReport], host: str, port: int) -> Any:
    """Serve them over HTTP; None where the port is taken (several servers on one machine)."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        log.info("no metrics: %s", error)
        return None
    return server


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
