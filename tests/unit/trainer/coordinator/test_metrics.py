"""The metrics of one job."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from shoal_trainer.contract import Phase, StatusReport
from shoal_trainer.coordinator.metrics import StatusCollector


def test_counters_do_not_fall_after_a_rollback() -> None:
    """`rate()` would take a fall for a restart, and add all steps of the run."""
    report = StatusReport(job_uid="u", phase=Phase.TRAINING)
    registry = CollectorRegistry()
    collector = StatusCollector(lambda: report)
    registry.register(collector)
    for step, exported in ((1000, 1000), (900, 1000), (1100, 1100)):
        report = report.model_copy(update={"step": step})
        assert registry.get_sample_value("shoal_steps_total") == exported
