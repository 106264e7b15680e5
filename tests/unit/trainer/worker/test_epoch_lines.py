"""The lines per epoch that `shoal-trainer run` prints from the status reports."""

import pytest

from shoal_trainer.contract import EpochReport, Outcome, Phase, StatusReport, TerminationMessage
from shoal_trainer.run.epoch_lines import EpochLines
from shoal_trainer.run.table import metric

LOSS = {"loss": 0.5}
EVALUATED = {"loss": 0.5, "val_accuracy": 0.9, "val_loss": 0.25}


def report(*epochs, phase=Phase.TRAINING):
    """`epochs`: (number, metrics, complete)."""
    found = tuple(EpochReport(epoch=epoch, metrics=metrics, complete=done) for epoch, metrics, done in epochs)
    return StatusReport(job_uid="u", phase=phase, epochs_total=9, epochs=found)


@pytest.fixture
def lines():
    lines = EpochLines()
    assert lines.update(report(phase=Phase.STARTING), 0.0) == []
    assert lines.update(report(), 10.0) == []
    return lines


def test_epoch_waits_for_its_evaluation_and_is_one_line(lines):
    assert lines.update(report((0, LOSS, False)), 11.84) == []
    assert lines.pending == ["Epoch 1/9  loss 0.5000  1.8 s"]
    assert lines.update(report((0, EVALUATED, True)), 12.0) == [
        "Epoch 1/9  loss 0.5000  val_accuracy 0.9000  val_loss 0.2500  1.8 s"
    ]
    assert lines.pending == []
    assert lines.update(report((0, EVALUATED, True)), 12.5) == []


def test_late_evaluation_belongs_to_its_own_epoch(lines):
    lines.update(report((0, LOSS, False)), 11.0)
    assert lines.update(report((0, LOSS, False), (1, LOSS, True)), 12.0) == []
    assert lines.update(report((0, EVALUATED, True), (1, LOSS, True)), 13.0) == [
        "Epoch 1/9  loss 0.5000  val_accuracy 0.9000  val_loss 0.2500  1.0 s",
        "Epoch 2/9  loss 0.5000  1.0 s",
    ]


def test_several_epochs_between_two_reports_have_a_line_each_without_duration(lines):
    assert lines.update(report((0, LOSS, True), (1, LOSS, True)), 10.3) == [
        "Epoch 1/9  loss 0.5000",
        "Epoch 2/9  loss 0.5000",
    ]


def test_restarted_coordinator_repeats_no_line(lines):
    lines.update(report((0, EVALUATED, True), (1, EVALUATED, True)), 12.0)
    assert lines.update(report(phase=Phase.STARTING), 13.0) == []
    assert lines.update(report((0, EVALUATED, True)), 14.0) == []
    assert lines.update(report((0, EVALUATED, True), (1, EVALUATED, True)), 15.0) == []
    assert lines.update(report((1, EVALUATED, True), (2, LOSS, True)), 16.0) == [
        "Epoch 3/9  loss 0.5000  4.0 s"
    ]


def test_end_completes_the_last_epoch(lines):
    lines.update(report((0, EVALUATED, True)), 11.0)
    lines.update(report((0, EVALUATED, True), (1, LOSS, False)), 90.0)
    end = TerminationMessage(outcome=Outcome.SUCCEEDED, epoch=2, loss=0.4, metrics={"val_loss": 0.3})
    assert lines.finish(end, 95.0) == ["Epoch 2/9  loss 0.5000  val_loss 0.3000  1m19s"]


def test_end_in_the_middle_of_an_epoch_has_the_last_metrics_in_its_line(lines):
    lines.update(report((0, EVALUATED, True), (1, LOSS, False)), 11.0)
    end = TerminationMessage(outcome=Outcome.SUCCEEDED, epoch=1, loss=0.4, metrics={"val_loss": 0.3})
    assert lines.finish(end, 12.0) == ["Epoch 2/9  loss 0.5000  val_loss 0.3000"]


def test_epoch_that_no_report_showed_is_printed_at_the_end(lines):
    end = TerminationMessage(outcome=Outcome.SUCCEEDED, epoch=1, loss=0.4)
    assert lines.finish(end, 12.0) == ["Epoch 1/9  loss 0.4000  2.0 s"]


def test_values_are_written_as_by_keras():
    assert [metric(number) for number in (0.0, 0.5, 12.34567, 0.0001)] == [
        "0.0000", "0.5000", "12.3457", "1.0000e-04",
    ]  # fmt: skip
