"""Each complete epoch is logged once, in a line from which the history of a job can be read."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from shoal_trainer.contract import EPOCH_LINE, EpochReport
from shoal_trainer.coordinator.epoch_history import EpochHistory
from shoal_trainer.coordinator.task_queue import Task, Tasks
from shoal_trainer.snapshot.storage import LocalStorage
from tests.unit.trainer.coordinator.bench import Bench


def epochs(*losses: float) -> list[dict[str, float]]:
    return [{"loss": loss} for loss in losses]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    """Update the log with one state after the other; the epochs that it wrote, as (epoch, loss)."""

    def follow(*states: list[dict[str, float]]) -> list[tuple[int, float]]:
        caplog.set_level(logging.INFO)
        log = EpochHistory(LocalStorage(tmp_path), lambda: None)
        for state in states:
            log.update(state)
        lines = [record.getMessage() for record in caplog.records]
        reports = [EpochReport.model_validate_json(line.removeprefix(EPOCH_LINE)) for line in lines]
        return [(report.epoch, report.metrics["loss"]) for report in reports]

    return follow


def test_each_epoch_once(logged):
    assert logged(epochs(), epochs(2.0), epochs(2.0), epochs(2.0, 1.0)) == [
        (0, 2.0),
        (1, 1.0),
    ]


def test_an_epoch_is_complete_after_its_evaluation():
    queue = [Task("evaluate", 1), Task("callbacks", 1), Task("export", 2)]
    assert Tasks(queue, epochs(2.0, 1.0)).complete() == epochs(2.0)
    assert Tasks(queue[2:], epochs(2.0, 1.0)).complete() == epochs(2.0, 1.0)
    assert Tasks([Task("evaluate", 0)], epochs(2.0)).complete() == []


def test_an_epoch_that_ends_while_its_history_is_read_waits_for_its_evaluation():
    """It is in the history before its evaluation is queued; nobody may look between the two."""
    bench, found = Bench(validation=True), []
    bench.join(0)
    reader = threading.Thread(target=lambda: found.append(bench.coordinator.complete_epochs()))

    class History(list):
        def append(self, logs):
            super().append(logs)
            reader.start()
            reader.join(0.2)

    bench.coordinator.record.tasks.history = History()
    assert bench.train(0).task == "evaluate"
    reader.join()
    assert found == [[]]


def test_an_epoch_that_changes_is_logged_again(logged):
    assert logged(epochs(3.0, 2.0), epochs(3.0, 1.5)) == [(0, 3.0), (1, 2.0), (1, 1.5)]


def test_a_rollback_logs_its_epochs_again(logged):
    assert logged(epochs(3.0, 2.0), epochs(3.0), epochs(3.0, 1.5)) == [
        (0, 3.0),
        (1, 2.0),
        (1, 1.5),
    ]


def test_a_new_process_logs_all_epochs_of_its_snapshot(logged):
    """The log of the pod before it is gone with its node."""
    assert [epoch for epoch, _ in logged(epochs(*[1.0] * 100))] == [*range(100)]
