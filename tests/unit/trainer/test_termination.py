"""Termination messages within the 4,096 bytes that Kubernetes keeps."""

import pytest

from shoal_trainer.contract import Outcome, TerminationMessage
from shoal_trainer.termination.termination_log import TERMINATION_LOG_ENV, write_termination

LIMIT = 4096


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Writes a message, and returns what a reader of the first 4,096 bytes gets."""
    path = tmp_path / "message"
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(path))

    def write(**fields):
        write_termination(TerminationMessage(outcome=Outcome.SUCCEEDED, **fields))
        return TerminationMessage.model_validate_json(path.read_bytes()[:LIMIT])

    return write


def test_values_of_a_metric_with_many_are_dropped_first(written):
    names = [f"val_{metric}_{n}" for metric in ("f1_score", "precision") for n in range(100)]
    metrics = dict.fromkeys(names, 0.4285714030265808) | {"val_accuracy": 0.98}
    kept = written(metrics=metrics, message="trained 3 epochs", model_uri="s3://bucket/model")
    assert kept.metrics["val_accuracy"] == 0.98
    assert 50 < len(kept.metrics) < 201
    assert (kept.message, kept.model_uri) == ("trained 3 epochs", "s3://bucket/model")


def test_many_long_metrics_leave_a_readable_message(written):
    kept = written(metrics={f"val_{n}_{'x' * 500}": float(n) for n in range(50)}, message="trained")
    assert 0 < len(kept.metrics) < 50
    assert kept.message == "trained"


@pytest.mark.parametrize("letter", ["x", "ü", "\n", "\U0001f41f"])
def test_long_text_is_cut_and_the_metrics_stay(written, letter):
    kept = written(message="the label is 7 " + letter * 10_000, metrics={"val_accuracy": 0.98})
    assert kept.message.startswith("the label is 7 ")
    assert kept.message.endswith(" …")
    assert kept.metrics == {"val_accuracy": 0.98}


def test_short_message_is_written_in_full(written):
    assert written(message="ü", metrics={"val_x_1": 1.0}).metrics == {"val_x_1": 1.0}
