"""Each complete epoch is logged once, in a line from which the history of a job can be read."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from shoal_trainer.contract import EPOCH_LINE, EpochReport
from shoal_trainer.coordinator.epoch_log import EpochLog


def tasks(*losses: float, evaluating: int | None = None) -> SimpleNamespace:
    queue = [] if evaluating is None else [SimpleNamespace(epoch=evaluating, kind="evaluate")]
    return SimpleNamespace(history=[{"loss": loss} for loss in losses], queue=queue)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture):
    """Update the log with the states of the tasks; the epochs that it wrote, as (epoch, loss)."""

    def follow(*states: SimpleNamespace) -> list[tuple[int, float]]:
        caplog.set_level(logging.INFO)
        log = EpochLog()
        for state in states:
            log.update(state)
        lines = [record.getMessage() for record in caplog.records]
        reports = [EpochReport.model_validate_json(line.removeprefix(EPOCH_LINE)) for line in lines]
        return [(report.epoch, report.metrics["loss"]) for report in reports]

    return follow


def test_each_epoch_once(logged):
    assert logged(tasks(), tasks(2.0), tasks(2.0), tasks(2.0, 1.0)) == [
        (0, 2.0),
        (1, 1.0),
    ]


def test_an_epoch_waits_for_its_evaluation(logged):
    assert logged(tasks(2.0, evaluating=0)) == []
    assert logged(tasks(2.0, evaluating=0), tasks(2.0, 1.0, evaluating=1)) == [(0, 2.0)]


def test_a_rollback_logs_its_epochs_again(logged):
    assert logged(tasks(3.0, 2.0), tasks(3.0), tasks(3.0, 1.5)) == [
        (0, 3.0),
        (1, 2.0),
        (1, 1.5),
    ]


def test_a_new_process_logs_all_epochs_of_its_snapshot(logged):
    """The log of the pod before it is gone with its node."""
    assert [epoch for epoch, _ in logged(tasks(*[1.0] * 100))] == [*range(100)]
