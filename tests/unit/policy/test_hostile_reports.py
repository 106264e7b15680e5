"""An image is its user's: whatever number its coordinator reports, the job is planned and its status can be stored."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from shoal.policy.model import Observation
from shoal.policy.plan import plan
from shoal_trainer.contract import StatusReport
from tests.unit.policy import build

EXTREMES = (1e20, 1.7e12, 10**30, -5, 1e300, -1e300, float("inf"), float("nan"))
REPORT: dict[str, Any] = {
    "jobUid": build.UID,
    "phase": "Training",
    "epoch": 1,
    "step": 1,
    "samples": 1,
    "loss": 1.0,
    "metrics": {"accuracy": 0.5},
    "epochs": [{"epoch": 0, "metrics": {"loss": 1.0}}],
    "samplesPerSecond": 1.0,
    "progressPercent": 1.0,
    "remainingSeconds": 1.0,
    "samplesLeft": 1.0,
    "wastedSteps": 0,
    "restartedFromNothing": 0,
    "goodput": 1.0,
    "inputWait": 0.1,
    "data": {"done": 1, "leased": 1, "total": 9, "repeated": 0, "partial": 0, "lost": 0},
    "workers": [{"slot": 0, "incarnation": 1, "state": "Active", "firstPushAt": 1.0, "staleness": 1.0}],
    "shards": [{"index": 0, "epoch": 0, "boot": 1, "lastSnapshotAt": 1.0}],
    "speed": [{"device": "T4", "devices": 1, "cores": 4.0, "batchSize": 1, "workers": 1, "servers": 1}],
    "beside": {"epochs": 1, "others": 1, "tasks": 1.0, "waits": 1.0},
}


def places(where: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every number in a document."""
    if isinstance(where, int | float):
        yield path
    elif isinstance(where, dict | list):
        for key in where if isinstance(where, dict) else range(len(where)):
            yield from places(where[key], (*path, key))


def reported(path: tuple[Any, ...], value: float) -> StatusReport | None:
    """The report with this value there; None: the contract refuses it, as if there were no answer."""
    document = json.loads(json.dumps(REPORT))
    where = document
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = value
    try:
        return StatusReport.model_validate_json(json.dumps(document))
    except ValidationError:
        return None


def a_job_after_a_loss() -> Observation:
    fresh = build.job()
    pods = [build.pod("worker", i, 0) for i in range(3)] + [build.pod("ps", 0, 0, node="safe-0")]
    begun = fresh.model_copy(update={"status": plan(build.observe(fresh, *pods)).status})
    gone = {"digits-worker-0-0": ""}
    lost = begun.model_copy(update={"status": plan(build.observe(begun, *pods[1:], gone_pods=gone)).status})
    return build.observe(lost, *pods[1:], build.pod("worker", 0, 1))


@pytest.mark.parametrize("path", list(places(REPORT)), ids=lambda path: ".".join(map(str, path)))
def test_any_number_of_a_report_can_be_told(path: tuple[Any, ...]) -> None:
    seen = a_job_after_a_loss()
    for value in EXTREMES:
        if (report := reported(path, value)) is None:
            continue
        status = json.loads(plan(replace(seen, report=report)).status.model_dump_json(by_alias=True))
        for told in places(status):
            found: Any = status
            for key in told:
                found = found[key]
            assert isinstance(found, bool) or 0 <= found < 2**63, (value, told)


def test_an_ordinary_report_is_read_with_all_its_numbers() -> None:
    report = StatusReport.model_validate(REPORT)
    assert report.loss == report.workers[0].staleness == 1.0
    assert report.metrics == {"accuracy": 0.5}
    assert report.shards[0].last_snapshot_at == 1.0


def test_what_is_not_finite_is_not_told_and_does_not_hide_the_rest() -> None:
    report = StatusReport.model_validate_json(
        json.dumps({**REPORT, "loss": float("nan"), "metrics": {"a": float("inf"), "b": None, "c": 1.0}})
    )
    assert (report.loss, report.metrics, report.step) == (None, {"c": 1.0}, 1)


def test_what_a_server_said_before_it_died_a_day_ago_is_not_told() -> None:
    seen = a_job_after_a_loss()
    report = StatusReport.model_validate(REPORT).model_copy(update={"step": 7})
    pods = tuple(pod for pod in seen.pods if pod.place and pod.place.role == "worker")
    died = replace(seen, pods=pods, report=report, report_age=86400.0, gone_pods={"digits-ps-0-0": ""})
    made = plan(died)
    assert ("ps", 0, 1) in {slot.place for slot in made.status.slots}, "it is to be replaced"
    assert made.status.parameter_servers.last_snapshot_time is None
    assert made.status.data.total is None


def test_words_of_an_image_are_stored_without_control_characters() -> None:
    """An administrator reads them in a terminal, which would obey: a title, the clipboard, a cleared screen."""
    evil = "\x1b]52;c;Y3VybA==\x07\x1b[2J\x9b1;1Hall is\twell\r"
    said = json.dumps({"outcome": "Failed", "reason": "UserError", "message": evil})
    worker = build.pod(phase="Failed", state=build.ended(1, message=said))
    report = StatusReport.model_validate({**REPORT, "message": evil})
    done = plan(build.observe(build.job(), build.pod("ps"), worker, report=report))
    assert done.status.last_failure is not None
    assert "all is well" in done.status.last_failure.message
    assert report.message.endswith("all is well ")
    told = [report.message, done.status.model_dump_json(), *(event.message for event in done.events)]
    assert not [each for each in "".join(told) if unicodedata.category(each) == "Cc"]
    assert "\\u00" not in told[1]
