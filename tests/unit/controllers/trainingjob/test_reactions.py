"""Reactions: the clock of a loss begins once, and ends with the replacement's first push."""

from __future__ import annotations

from typing import Any

from shoal.api.training_job_status import TrainingJobStatus
from shoal.controllers.trainingjob.reactions import Reactions
from shoal.policy.model import Observation
from shoal_trainer.contract import Phase, StatusReport, WorkerReport, WorkerState
from tests.unit.policy import build

Told = list[tuple[str, str, str, float]]


def status(*slots: dict[str, Any]) -> TrainingJobStatus:
    return TrainingJobStatus.model_validate({"slots": list(slots)})


def seen(before: TrainingJobStatus, *pods: Any, pushed: tuple[int, int] | None = None) -> Observation:
    workers = (
        (WorkerReport(slot=pushed[0], incarnation=pushed[1], state=WorkerState.ACTIVE, first_push_at=1.0),)
        if pushed
        else ()
    )
    report = StatusReport(job_uid="u", phase=Phase.TRAINING, workers=workers)
    job = build.job().model_copy(update={"status": before})
    return build.observe(job, *pods, report=report)


RUNS, TAKEN = {"index": 0}, {"index": 0, "state": "Draining", "cause": "SpotReclaim"}


def tracker() -> tuple[Reactions, Told]:
    told: Told = []
    return Reactions(lambda *each: told.append(each)), told


def test_a_lost_worker_is_timed_to_its_replacements_first_push() -> None:
    reactions, told = tracker()
    before, after = status(RUNS), status(TAKEN)
    reactions.lost(seen(before), after, woken=10.0)
    reactions.lost(seen(before), after, woken=11.0)  # the write was refused: the same loss again
    reactions.replaced(seen(before), 10.5)
    assert told == []
    created = build.pod("worker", 0, 1, phase="Pending")
    reactions.replaced(seen(after, created), 11.0)
    reactions.replaced(seen(after, created), 12.0)
    running = build.pod("worker", 0, 1)
    reactions.replaced(seen(after, running), 13.0)
    reactions.replaced(seen(after, running, pushed=(0, 0)), 14.0)
    reactions.replaced(seen(after, running, pushed=(0, 1)), 20.0)
    reactions.replaced(seen(after, running, pushed=(0, 1)), 21.0)
    assert told == [
        ("worker", "SpotReclaim", "created", 1.0),
        ("worker", "SpotReclaim", "running", 3.0),
        ("worker", "SpotReclaim", "first_push", 10.0),
    ]


def test_what_the_operator_decided_and_what_came_back_is_no_loss() -> None:
    reactions, told = tracker()
    unwanted = {"index": 0, "state": "Draining", "cause": "Unwanted"}
    silent = {"index": 1, "state": "Silent"}
    before = status(RUNS, {"index": 1})
    reactions.lost(seen(before), status(unwanted, silent), woken=0.0)
    reactions.lost(seen(status(unwanted, silent)), status(unwanted, {"index": 1}), woken=5.0)
    reactions.replaced(seen(before, build.pod("worker", 0, 1), build.pod("worker", 1, 1)), 9.0)
    assert told == []


def test_a_server_has_no_push_and_a_silent_worker_a_reason() -> None:
    reactions, told = tracker()
    server = {"role": "ps", "index": 0}
    before = status(server, {"index": 2})
    after = status({**server, "state": "Ended", "cause": "NodeLost"}, {"index": 2, "state": "Silent"})
    reactions.lost(seen(before), after, woken=0.0)
    pods = build.pod("ps", 0, 1), build.pod("worker", 2, 1)
    reactions.replaced(seen(after, *pods, pushed=(2, 1)), 4.0)
    assert sorted(told) == [
        ("ps", "NodeLost", "created", 4.0),
        ("ps", "NodeLost", "running", 4.0),
        ("worker", "Silent", "created", 4.0),
        ("worker", "Silent", "first_push", 4.0),
        ("worker", "Silent", "running", 4.0),
    ]


def test_a_job_that_ends_is_forgotten() -> None:
    reactions, told = tracker()
    reactions.lost(seen(status(RUNS)), status(TAKEN), woken=0.0)
    suspended = build.observe(build.job(suspend=True))
    reactions.lost(suspended, status(TAKEN), woken=1.0)
    reactions.replaced(seen(status(TAKEN), build.pod("worker", 0, 1)), 2.0)
    assert told == []
