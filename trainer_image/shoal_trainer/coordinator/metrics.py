"""Exports the status as Prometheus metrics.

Labels are bounded, as the report is: the only per-worker series is the step time, the measured speeds have at most
`MAX_SPEEDS` configurations, and the user's own names, of metrics, are at most `MOST_METRICS` at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from shoal_trainer.contract import StatusReport, WorkerState
from shoal_trainer.coordinator.bounded_http import BoundedHandler
from shoal_trainer.wire.gate import Visit
from shoal_trainer.wire.listener import Listener

log = logging.getLogger(__name__)

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

MAX_CONNECTIONS = 16
SECONDS = 5.0
"""A connection is closed after this time, also one that reads or sends slowly."""
CACHED_SECONDS = 1.0


class StatusCollector(Collector):
    """Reads `status` at each scrape. `kept`: a file that outlives this process, and is written only if it is there."""

    def __init__(self, status: Callable[[], StatusReport], kept: Path | None = None) -> None:
        self._status, self._kept = status, kept
        self._highest = _read(kept)
        """A rollback takes steps back, and so does a restart. Prometheus would read a counter that falls as one that
        began at 0, and add all of it."""

    def collect(self) -> Iterator[Metric]:
        """Yield one family per metric."""
        status = self._status()
        gauges: dict[str, tuple[str, float | None]] = {
            "shoal_loss": ("Smoothed training loss.", status.loss),
            "shoal_samples_per_second": ("Samples applied per second.", status.samples_per_second),
            "shoal_progress_ratio": ("Share of the work done.", _ratio(status.progress_percent)),
            "shoal_goodput_ratio": ("Share of the computed steps that are not wasted.", status.goodput),
            "shoal_input_wait_ratio": (
                "Share of the workers' time spent waiting for input.",
                status.input_wait,
            ),
            "shoal_epoch": ("Completed epochs.", float(status.epoch)),
            "shoal_samples_left": ("Samples still to be trained.", status.samples_left),
            "shoal_snapshots_failing_seconds": (
                "Since when no snapshot could be saved; 0 if the last one was.",
                status.snapshots_fail_seconds,
            ),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(name, text, value)
        metrics = "shoal_metric", "Metrics of training and evaluation by their Keras names."
        yield _labelled(GaugeMetricFamily(*metrics, labels=["name"]), status.metrics)
        counters = {
            "shoal_steps": ("Steps (batches) applied to the parameters.", status.step),
            "shoal_samples": ("Samples applied to the parameters.", status.samples),
            "shoal_wasted_steps": ("Computed steps that were discarded or undone.", status.wasted_steps),
            "shoal_rollbacks": ("Rollbacks to a snapshot.", status.rollbacks),
            "shoal_restarts_from_nothing": (
                "Restarts without a snapshot or a copy.",
                status.restarted_from_nothing,
            ),
            "shoal_leases_taken_back": (
                "Workers fenced because they read nothing, or did not reach a server that others reached.",
                status.leases_taken_back,
            ),
            "shoal_samples_repeated": ("Samples applied more than once.", status.data.repeated),
            "shoal_samples_partial": ("Samples applied on some shards only.", status.data.partial),
            "shoal_samples_lost": ("Samples left out by on_nan, as not finite.", status.data.lost),
        }
        self._keep({name: number for name, (_, number) in counters.items()})
        for name, (text, _) in counters.items():
            yield CounterMetricFamily(name, text, self._highest[name])
        states = {each.value: sum(worker.state is each for worker in status.workers) for each in WorkerState}
        yield _labelled(GaugeMetricFamily("shoal_workers", "Workers by state.", labels=["state"]), states)
        parts = GaugeMetricFamily("shoal_step_seconds", "Smoothed seconds per step.", labels=["slot", "part"])
        for worker in status.workers:
            if worker.state is WorkerState.ACTIVE:
                for part in ("step", "compute", "pull", "push", "input", "wait"):
                    if (seconds := getattr(worker, f"{part}_seconds")) is not None:
                        parts.add_metric([str(worker.slot), part], seconds)
        yield parts
        yield from _speeds(status)
        passed = {"tasks": status.beside.tasks, "waits": status.beside.waits}
        beside = "shoal_beside_samples", "Samples that workers did not train meanwhile."
        yield _labelled(CounterMetricFamily(*beside, labels=["part"]), passed)
        yield from _shards(status)

    def _keep(self, counters: Mapping[str, float]) -> None:
        self._highest = {name: max(number, self._highest.get(name, 0)) for name, number in counters.items()}
        if self._kept is not None:
            with contextlib.suppress(OSError), self._kept.open("r+") as file:
                file.write(json.dumps(self._highest))
                file.truncate()


def _read(kept: Path | None) -> dict[str, float]:
    """The counters in this file; none of one that is not there, or whose writer was killed."""
    try:
        found = (
            {str(name): float(value) for name, value in json.loads(kept.read_text()).items()} if kept else {}
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _speeds(status: StatusReport) -> Iterator[Metric]:
    """The measured steps by configuration."""
    labels = ["device", "devices", "cores", "batch_size", "workers", "servers"]
    steps = CounterMetricFamily("shoal_measured_steps", "Steps measured in a settled state.", labels=labels)
    typical = GaugeMetricFamily(
        "shoal_typical_seconds", "Geometric mean of a part of the measured steps.", labels=[*labels, "part"]
    )
    for row in status.speed:
        key = [value if isinstance(value, str) else f"{value:g}" for value in row.key]
        steps.add_metric(key, row.compute.count)
        for part, sums in (("compute", row.compute), ("pull", row.pull), ("push", row.push)):
            if sums.count:
                typical.add_metric([*key, part], math.exp(sums.mean))
    yield steps
    yield typical


def _shards(status: StatusReport) -> Iterator[Metric]:
    """The work of each parameter server."""
    counters = {
        "busy_seconds": ("shoal_server_busy_seconds", "Time spent on pushes."),
        "updates": ("shoal_server_updates", "Pushes applied."),
        "bytes_received": ("shoal_server_received_bytes", "Bytes of pushes."),
        "busy_answers": ("shoal_server_busy_answers", "Requests told to wait for memory."),
    }
    for field, what in counters.items():
        values = {str(shard.index): getattr(shard, field) for shard in status.shards}
        yield _labelled(CounterMetricFamily(*what, labels=["shard"]), values)


def _labelled(family: Family, values: Mapping[str, float]) -> Family:
    """A family with these values of its label."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


class Bodies:
    """The answers, at most `CACHED_SECONDS` old: a report takes the shard's lock, and to encode it takes the GIL."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._lock = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}
        """By format, of which there are two: what else is asked for costs nothing."""

    def newest(self, accept: str) -> tuple[str, bytes]:
        """The content type and the body, for what a request accepts."""
        open_format = "application/openmetrics-text" in accept
        kind = openmetrics.CONTENT_TYPE_LATEST if open_format else CONTENT_TYPE_PLAIN_0_0_4
        with self._lock:
            at, body = self._made.get(kind, (-math.inf, b""))
            if time.monotonic() - at > CACHED_SECONDS:
                encode = openmetrics.generate_latest if open_format else generate_latest
                body = encode(self._registry)
                self._made[kind] = time.monotonic(), body
        return kind, body


class MetricsServer:
    """Serves the metrics to anyone on `host`:`port`, so in few threads. `kept`: see `StatusCollector`."""

    def __init__(
        self, status: Callable[[], StatusReport], host: str, port: int, kept: Path | None = None
    ) -> None:
        bodies = Bodies(StatusCollector(status, kept))
        self._listener = Listener(
            "metrics",
            host,
            port,
            lambda sock, visit: _Metrics(sock, visit, self._listener, bodies),
            unproven=MAX_CONNECTIONS,
            proof_seconds=SECONDS,
        )
        self.port: int = self._listener.port
        self._listener.start()

    def close(self) -> None:
        """Stop accepting connections."""
        self._listener.close()


class _Metrics(BoundedHandler, BaseHTTPRequestHandler):
    timeout = SECONDS

    def __init__(self, sock: socket.socket, visit: Visit, listener: Listener, bodies: Bodies) -> None:
        self._bodies = bodies
        super().__init__(sock, visit, listener)

    def do_GET(self) -> None:
        """The metrics, at any path. A connection has one answer: what answers cost is bounded by the `Gate`."""
        kind, body = self._bodies.newest(self.headers.get("Accept", ""))
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def serve_metrics(
    status: Callable[[], StatusReport], host: str, port: int, kept: Path | None = None
) -> MetricsServer | None:
    """Serve the metrics; None if the port is in use (several servers on one machine)."""
    try:
        return MetricsServer(status, host, port, kept)
    except OSError as error:
        log.info("no metrics endpoint: %s", error)
        return None


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
