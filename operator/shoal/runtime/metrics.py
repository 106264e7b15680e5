"""Prometheus metrics of the process and of every controller.

No label contains the name of a job, so their number stays small; that of a pool is one, since there are few.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shoal import __version__

logger = logging.getLogger(__name__)

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """The metrics of the runtime, in a registry of their own; controllers register theirs in it.

    `leading`: the name of the series that says whether this process leads. Each kind of process has one of its own: no
    leader of another kind may hide that one is missing.
    """

    def __init__(self, leading: str = "shoal_leading") -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "shoal_reconcile_seconds",
            "Duration of one reconcile, by controller and result.",
            ["controller", "result"],
            buckets=FAST,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "shoal_queue_seconds",
            "Time that an object waited to be reconciled, by controller.",
            ["controller"],
            buckets=FAST,
            registry=self.registry,
        )
        self.watch_restarts = Counter(
            "shoal_watch_restarts_total",
            "Watches that were restarted, by resource and reason.",
            ["resource", "reason"],
            registry=self.registry,
        )
        self.unread_objects = Counter(
            "shoal_unread_objects_total",
            "States of objects that could not be read, by resource.",
            ["resource"],
            registry=self.registry,
        )
        self.status_writes = Counter(
            "shoal_status_writes_total",
            "Status updates, by kind and result.",
            ["kind", "result"],
            registry=self.registry,
        )
        self.events = Counter(
            "shoal_events_total",
            "Events about objects, by result: posted, dropped, failed.",
            ["result"],
            registry=self.registry,
        )
        self.requests = Histogram(
            "shoal_api_request_seconds",
            "Duration of requests to the API server, by verb and HTTP status (0: no answer).",
            ["verb", "code"],
            buckets=FAST,
            registry=self.registry,
        )
        self.loop_lag = Histogram(
            "shoal_loop_lag_seconds",
            "How long the event loop was held by something else, sampled once a second.",
            buckets=FAST,
            registry=self.registry,
        )
        self.renewal_seconds = Histogram(
            "shoal_lease_renewal_seconds",
            "Duration of one renewal of the Lease.",
            buckets=FAST,
            registry=self.registry,
        )
        self.leading = Gauge(
            leading,
            "1 while this process holds the Lease and has read the cluster.",
            registry=self.registry,
        )

        Gauge("shoal_build_info", "1; the version is a label.", ["version"], registry=self.registry).labels(
            __version__
        ).set(1)

    def live(self, name: str, text: str, label: str, values: Callable[[], Mapping[str, float]]) -> None:
        """Export a gauge that is computed at each scrape; `values`: value by label."""
        self.registry.register(_Live(name, text, [label], values))

    def live_value(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Export a gauge without labels that is computed at each scrape."""
        self.registry.register(_Live(name, text, [], lambda: {"": value()}))


class _Live(Collector):
    """One that fails is left out of this scrape: the others, and what is alerted by them, are not lost with it."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], values: Callable[[], Mapping[str, float]]
    ) -> None:
        self._name, self._text, self._labels, self._values = name, text, labels, values

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        try:
            for label, value in sorted(self._values().items()):
                family.add_metric([label] if self._labels else [], value)
        except Exception:  # broad: as the class says
            logger.exception("%s cannot be told", self._name)
        yield family
