"""The lines per epoch that `shoal-trainer run` prints from the status reports."""

import pytest

from shoal_trainer.contract import Outcome, Phase, StatusReport, TerminationMessage
from shoal_trainer.epoch_lines import EpochLines, value


def report(epoch, metrics=None, *, phase=Phase.TRAINING, loss=0.5, total=9):
    return StatusReport(
        job_uid="u", phase=phase, epoch=epoch, epochs_total=total, loss=loss, metrics=metrics or {}
    )


@pytest.fixture
def lines():
    lines = EpochLines()
    assert lines.update(report(0, phase=Phase.STARTING), 0.0) == []
    assert lines.update(report(0), 10.0) == []
    return lines


def test_epoch_with_evaluation_is_one_line(lines):
    assert lines.update(report(1), 11.84) == []
    assert lines.pending == "Epoch 1/9  loss 0.5000  1.8 s"
    assert lines.update(report(1, {"val_accuracy": 0.9, "val_loss": 0.25}), 12.0) == [
        "Epoch 1/9  loss 0.5000  val_accuracy 0.9000  val_loss 0.2500  1.8 s"
    ]
    assert lines.pending == ""
    assert lines.update(report(1, {"val_accuracy": 0.9, "val_loss": 0.25}), 12.5) == []


def test_epoch_without_evaluation_is_printed_when_the_next_one_ends(lines):
    lines.update(report(1), 12.0)
    assert lines.update(report(2), 13.0) == ["Epoch 1/9  loss 0.5000  2.0 s"]
    assert lines.pending == "Epoch 2/9  loss 0.5000  1.0 s"


def test_long_epoch_is_printed_before_its_evaluation_ends(lines):
    lines.update(report(1), 12.0)
    assert lines.update(report(1), 25.0) == ["Epoch 1/9  loss 0.5000  2.0 s"]
    assert lines.update(report(1, {"val_loss": 0.25}), 26.0) == ["Epoch 1/9  val_loss 0.2500"]


def test_evaluation_of_an_uncertain_epoch_names_none(lines):
    lines.update(report(1), 11.0)
    lines.update(report(2), 12.0)
    assert lines.update(report(2, {"val_loss": 0.3}), 12.5) == [
        "Epoch 2/9  loss 0.5000  1.0 s",
        "Evaluation  val_loss 0.3000",
    ]
    assert lines.update(report(2, {"val_loss": 0.2}), 12.8) == ["Epoch 2/9  val_loss 0.2000"]


def test_several_epochs_between_two_reports_share_a_line(lines):
    assert lines.update(report(3), 10.3) == []
    assert lines.pending == "Epochs 1-3/9  loss 0.5000  0.3 s"


def test_restarted_coordinator_repeats_no_line(lines):
    lines.update(report(2, {"val_loss": 0.3}), 12.0)
    assert lines.update(report(0, phase=Phase.STARTING, loss=None), 13.0) == []
    assert lines.update(report(1), 14.0) == []
    assert lines.update(report(2, {"val_loss": 0.3}), 15.0) == []


def test_end_completes_the_last_epoch(lines):
    lines.update(report(8, {"val_loss": 0.3}), 11.0)
    end = TerminationMessage(outcome=Outcome.SUCCEEDED, epoch=9, loss=0.4)
    assert lines.finish(end, 90.0) == ["Epoch 9/9  loss 0.4000  1m19s"]


def test_values_are_written_as_by_keras():
    assert [value(number) for number in (0.0, 0.5, 12.34567, 0.0001)] == [
        "0.0000", "0.5000", "12.3457", "1.0000e-04",
    ]  # fmt: skip
