"""Metrics of `shoal-pools`, beside those of the runtime."""

from __future__ import annotations

from shoal.runtime.metrics import Metrics

LEADING = "shoal_pools_leading"


class PoolMetrics:
    """Counters in the registry of the process."""

    def __init__(self, metrics: Metrics) -> None:
        self.resizes = metrics.counter(
            "shoal_pool_resizes_total", "Sizes that were set, by mode and result.", "mode", "result"
        )
