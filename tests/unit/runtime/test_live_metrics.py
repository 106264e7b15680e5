"""Gauges that are computed at each scrape."""

from __future__ import annotations

from prometheus_client import generate_latest

from shoal.runtime.metrics import Metrics


def test_one_that_fails_is_missing_and_the_others_are_told() -> None:
    metrics = Metrics()
    metrics.live("broken", "One.", "of", lambda: {"a": 1 / 0})
    metrics.live_value("broken_value", "Another.", lambda: 1 / 0)
    metrics.live_value("whole", "A third.", lambda: 3.0)
    told = generate_latest(metrics.registry).decode()
    assert "whole 3.0" in told
    assert "\nbroken{" not in told
    assert "\nbroken_value " not in told
