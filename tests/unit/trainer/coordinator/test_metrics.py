"""The metrics of one job."""

from __future__ import annotations

from pathlib import Path

import pytest
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


def exported(step: int, kept: Path) -> float | None:
    """By a new process, which has the pod's file."""
    registry = CollectorRegistry()
    report = StatusReport(job_uid="u", phase=Phase.TRAINING, step=step)
    registry.register(StatusCollector(lambda: report, kept))
    return registry.get_sample_value("shoal_steps_total")


def test_counters_do_not_fall_when_a_container_restarts_in_its_pod(tmp_path: Path) -> None:
    """It is the same target of a scrape, and begins with an older snapshot."""
    kept = tmp_path / "marker"
    kept.touch()
    assert [exported(step, kept) for step in (1000, 900, 1100, 1000)] == [1000, 1000, 1100, 1100]


@pytest.mark.parametrize("content", ["{", "[1]", '{"shoal_steps": "many"}', '{"shoal_steps": NaN}'])
def test_a_file_of_counters_that_is_damaged_is_not_used(tmp_path: Path, content: str) -> None:
    """Its writer was killed."""
    (kept := tmp_path / "marker").write_text(content)
    assert [exported(step, kept) for step in (3, 2)] == [3, 3]


def test_the_file_of_counters_is_not_made_where_there_is_none(tmp_path: Path) -> None:
    """That it is there says that its process had parameters."""
    assert [exported(step, tmp_path / "marker") for step in (3, 2)] == [3, 2]
    assert not list(tmp_path.iterdir())


def test_metrics_of_the_model_are_exported_by_name() -> None:
    report = StatusReport(job_uid="u", phase=Phase.TRAINING, metrics={"accuracy": 0.75, "val_loss": 1.5})
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: report))
    values = [registry.get_sample_value("shoal_metric", {"name": name}) for name in report.metrics]
    assert values == [0.75, 1.5]
