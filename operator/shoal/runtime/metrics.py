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
        self.reconcile_seconds = self.histogram(
            "shoal_reconcile_seconds",
            "Duration of one reconcile, by controller and result.",
            "controller",
            "result",
        )
        self.queue_seconds = self.histogram(
            "shoal_queue_seconds", "Time that an object waited to be reconciled, by controller.", "controller"
        )
        self.watch_restarts = self.counter(
            "shoal_watch_restarts_total",
            "Watches that were restarted, by resource and reason.",
            "resource",
            "reason",
        )
        self.unread_objects = self.counter(
            "shoal_unread_objects_total", "States of objects that could not be read, by resource.", "resource"
        )
        self.status_writes = self.counter(
            "shoal_status_writes_total", "Status updates, by kind and result.", "kind", "result"
        )
        self.events = self.counter(
            "shoal_events_total", "Events about objects, by result: posted, dropped, failed.", "result"
        )
        self.requests = self.histogram(
            "shoal_api_request_seconds",
            "Duration of requests to the API server, by verb and HTTP status (0: no answer).",
            "verb",
            "code",
        )
        self.loop_lag = self.histogram(
            "shoal_loop_lag_seconds",
            "How long the event loop was held by something else, sampled once a second.",
        )
        self.renewal_seconds = self.histogram(
            "shoal_lease_renewal_seconds", "Duration of one renewal of the Lease."
        )
        self.leading = self.gauge(leading, "1 while this process holds the Lease and has read the cluster.")

        self.gauge("shoal_build_info", "1; the version is a label.", "version").labels(__version__).set(1)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter in the registry."""
        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A gauge in the registry."""
        return Gauge(name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = FAST) -> Histogram:
        """A histogram in the registry."""
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

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
