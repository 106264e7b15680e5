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


def test_metrics_of_the_model_are_exported_by_name() -> None:
    report = StatusReport(job_uid="u", phase=Phase.TRAINING, metrics={"accuracy": 0.75, "val_loss": 1.5})
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: report))
    values = [registry.get_sample_value("shoal_metric", {"name": name}) for name in report.metrics]
    assert values == [0.75, 1.5]
