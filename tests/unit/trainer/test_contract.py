"""Reports: older ones parse, sums of logarithms give mean and variance, and differences of reports add up."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.contract import (
    LogSums,
    Phase,
    ShardReport,
    SpeedSums,
    StatusReport,
    WorkerReport,
    WorkerState,
    job_key,
)

SECONDS = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=50)


def sums(seconds: list[float]) -> LogSums:
    logs = [math.log(s) for s in seconds]
    return LogSums(count=len(logs), total=sum(logs), squares=sum(x * x for x in logs))


def test_a_report_of_an_older_trainer_parses() -> None:
    old = (
        '{"version":1,"jobUid":"u","phase":"Training","step":3,"shards":[{"index":0,"epoch":2,"version":7}]}'
    )
    report = StatusReport.model_validate_json(old)
    assert report.phase is Phase.TRAINING
    assert (report.model, report.speed, report.samples_left) == (None, (), None)
    assert report.restarted_from_nothing == 0
    assert report.shards[0].updates == 0


def test_what_a_newer_trainer_says_of_its_parts_too_is_left_out() -> None:
    new = """{"version": 1, "jobUid": "u", "phase": "Training", "of": "tomorrow",
              "workers": [{"slot": 1, "incarnation": 2, "state": "Active", "of": "tomorrow"}],
              "shards": [{"index": 0, "epoch": 2, "of": "tomorrow"}]}"""
    report = StatusReport.model_validate_json(new)
    assert report.workers == (WorkerReport(slot=1, incarnation=2, state=WorkerState.ACTIVE),)
    assert report.shards == (ShardReport(index=0, epoch=2),)
    assert "tomorrow" not in report.to_json()


def test_speeds_survive_json() -> None:
    row = SpeedSums(
        device="T4", devices=2, cores=4, batch_size=128, workers=3, servers=2, compute=sums([0.1, 0.2])
    )
    report = StatusReport(job_uid="u", phase=Phase.TRAINING, speed=(row,), speed_epoch="1-2")
    assert StatusReport.model_validate_json(report.to_json()) == report
    assert row.key == ("T4", 2, 4, 128, 3, 2)


@given(SECONDS)
def test_mean_and_variance_are_those_of_the_logarithms(seconds: list[float]) -> None:
    logs = [math.log(s) for s in seconds]
    found = sums(seconds)
    assert found.mean == pytest.approx(statistics.fmean(logs))
    assert found.variance == pytest.approx(statistics.pvariance(logs), abs=1e-9)


def test_no_measurement_has_mean_and_variance_zero() -> None:
    assert (LogSums().mean, LogSums().variance) == (0.0, 0.0)


@given(SECONDS, SECONDS)
def test_the_difference_of_two_reports_is_what_was_measured_between_them(
    early: list[float], late: list[float]
) -> None:
    difference = sums(early + late).since(sums(early))
    assert difference.count == len(late)
    assert difference.mean == pytest.approx(sums(late).mean, abs=1e-9)


@pytest.mark.parametrize("fingerprint", ["a/b c", "AB" * 32, "ab" * 31, "ab" * 33, ""])
def test_a_fingerprint_is_a_digest_and_no_name(fingerprint: str) -> None:
    """Objects of the cluster are named after it."""
    said = StatusReport(job_uid="u", phase=Phase.TRAINING).model_dump(mode="json")
    model = {"fingerprint": fingerprint, "parameters": 1, "tensors": 1}
    with pytest.raises(ValueError, match="fingerprint"):
        StatusReport.model_validate({**said, "model": model})


def test_the_key_of_a_run_is_the_same_in_all_versions_and_of_one_run_and_one_key() -> None:
    """Operator and trainer of two versions derive it, and an upgrade makes no Secret anew."""
    install_key = bytes(range(32))
    known = "2f536b6094eaa636f328471a6ad964405c6fd342d357332728c84975b757bf78"
    assert job_key(install_key, "0000-uid", "key-1").hex() == known
    assert len({job_key(install_key, uid, key_id) for uid in ("a", "b") for key_id in ("1", "2")}) == 4
