"""The course of the metric that ends a job: what is kept of it, and what a new operator finds."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.api.planning_status import PredictionStatus
from shoal.api.training_job import TrainingJob
from shoal.controllers.planning.progress import MOST_EPOCHS, Progress
from shoal.sizing.fleet import FleetJob, Model
from shoal.sizing.speed import efficiency
from shoal.sizing.speed.efficiency import WorkLeft, samples_to_target
from shoal_trainer.contract import (
    DataReport,
    EpochReport,
    ModelReport,
    Phase,
    StatusReport,
    WorkerReport,
    WorkerState,
)
from tests.unit.policy import build

PER_EPOCH, RECENT = 50_000, 16
"""A report has so many of the newest epochs."""
PLANNED = FleetJob("job", ("spot",), model=Model("a" * 64, 1e6, 1000, 3))


def job(**status: Any) -> TrainingJob:
    manifest = build.job_manifest(elasticity={"mode": "Auto"})
    manifest["metadata"] |= {"uid": "u"}
    manifest["spec"]["training"]["stopAfter"] = {"metric": "loss", "value": "0.35", "mode": "Min"}
    return TrainingJob.model_validate(manifest | {"status": status})


def report(epoch: int, workers: int) -> StatusReport:
    """After an epoch: a loss that falls to 0.3."""
    losses = {
        i: 0.3 + 2.0 / (1 + (i + 1) * PER_EPOCH / 2e5) for i in range(max(0, epoch - RECENT + 1), epoch + 1)
    }
    return StatusReport(
        job_uid="u",
        phase=Phase.TRAINING,
        model=ModelReport(fingerprint="a" * 64, parameters=1000, tensors=3, flops_per_sample=1e6),
        epoch=epoch + 1,
        step=1000,
        samples=(epoch + 1) * PER_EPOCH,
        epochs=tuple(EpochReport(epoch=i, metrics={"val_loss": loss}) for i, loss in losses.items()),
        data=DataReport(total=PER_EPOCH),
        workers=tuple(WorkerReport(slot=i, incarnation=0, state=WorkerState.ACTIVE) for i in range(workers)),
    )


def restarted(before: Progress) -> TrainingJob:
    """The job as a new operator finds it."""
    stored = PredictionStatus(course=before.course("u")).model_dump(by_alias=True, mode="json")
    return job(prediction=stored)


def test_a_restarted_operator_foresees_the_end_as_the_one_before_it() -> None:
    progress = Progress()
    for epoch in range(140):
        progress.observe(job(), report(epoch, 4 if epoch < 70 else 12), PER_EPOCH)
    known = progress.estimated(job(), PLANNED)
    assert known.samples_left is not None
    again = Progress()
    found = restarted(progress)
    again.observe(found, report(139, 12), PER_EPOCH)
    same = again.estimated(found, PLANNED)
    assert same.samples_left == pytest.approx(known.samples_left, rel=0.3)
    assert same.efficiency is not None
    assert known.efficiency is not None
    assert same.efficiency.penalty == pytest.approx(known.efficiency.penalty, rel=0.3)
    nothing = Progress()
    nothing.observe(job(), report(139, 12), PER_EPOCH)
    assert nothing.estimated(job(), PLANNED).samples_left is None, "of the newest epochs alone"


def test_what_is_remembered_stays_the_same_over_restarts() -> None:
    """Two points for each doubling; the workers between them in the mean."""
    without, often = Progress(), Progress()
    for epoch in range(300):
        workers = 4 if epoch < 100 else 12
        without.observe(job(), report(epoch, workers), PER_EPOCH)
        if epoch % 7 == 0 and epoch:
            found = restarted(often)
            often = Progress()
            often.observe(found, report(epoch, workers), PER_EPOCH)
        often.observe(job(), report(epoch, workers), PER_EPOCH)
    course = without.course("u")
    assert [point.epoch for point in course] == [
        0,
        1,
        2,
        3,
        5,
        7,
        11,
        15,
        22,
        31,
        45,
        63,
        90,
        127,
        181,
        255,
        299,
    ]
    mixed = next(point for point in course if point.epoch == 127)
    assert float(mixed.workers) == pytest.approx((9 * 4 + 28 * 12) / 37, rel=0.02)
    assert [(p.epoch, p.value, float(p.workers)) for p in often.course("u")] == [
        (p.epoch, p.value, pytest.approx(float(p.workers), rel=0.1)) for p in course
    ]


def test_the_first_value_is_kept_however_long_a_job_trains() -> None:
    progress = Progress()
    for epoch in range(2 * MOST_EPOCHS):
        progress.observe(job(), report(epoch, 4), PER_EPOCH)
    points = progress._courses["u"].points
    assert points[0].samples == PER_EPOCH
    assert len(points) < MOST_EPOCHS + 20


def test_epochs_that_were_undone_are_forgotten() -> None:
    progress = Progress()
    progress.observe(job(), report(20, 4), PER_EPOCH)
    progress.observe(job(), report(11, 4), PER_EPOCH)
    assert max(point.epoch for point in progress.course("u")) <= 12


def test_the_end_is_foreseen_anew_after_an_epoch_of_a_job_of_the_model_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each minute it took a third of a second for each of fifty jobs of one model."""
    asked, lessons = list[int](), efficiency._lesson.cache_info().misses

    def counted(points: Any, *args: Any, **how: Any) -> WorkLeft:
        asked.append(len(points))
        return samples_to_target(points, *args, **how)

    monkeypatch.setattr(efficiency, "samples_to_target", counted)
    progress, jobs = Progress(), [job(), job()]
    jobs[1] = jobs[1].model_copy(update={"metadata": jobs[1].metadata.model_copy(update={"uid": "v"})})

    def hear(*epochs: range) -> list[FleetJob]:
        for each, new in zip(jobs, epochs, strict=True):
            for epoch in new:
                progress.observe(each, report(epoch, 4 if epoch < 50 else 12), PER_EPOCH)
        return [progress.estimated(each, PLANNED) for each in jobs]

    first = hear(range(100), range(110))
    assert first[0].samples_left is not None
    assert hear(range(99, 100), range(109, 110)) == first
    assert asked == [100, 110]
    again = hear(range(0), range(110, 111))
    assert again != first
    assert asked == [100, 110, 100, 111]
    assert efficiency._lesson.cache_info().misses - lessons == 3
    progress.forget({"v"})
    assert progress._estimates.keys() == {"v"}


def test_courses_of_other_namespaces_teach_nothing() -> None:
    """A fingerprint is what a pod says: one made-up curve moved k, and with it the workers of everyone's job."""
    progress, mine = Progress(), job()
    about = mine.metadata.model_copy(update={"uid": "v", "namespace": "other"})
    theirs = mine.model_copy(update={"metadata": about})
    near = mine.model_copy(update={"metadata": mine.metadata.model_copy(update={"uid": "w"})})
    for each in (mine, theirs, near):
        progress.observe(each, report(20, 4), PER_EPOCH)
    model = progress._courses["u"].model
    assert progress._alike("u", model) == (progress._courses["w"].points,)


def evaluating(*epochs: tuple[float, float | None, bool]) -> StatusReport:
    """A report: each epoch with its training loss, the loss of its evaluation if any, and whether it is complete."""
    told = tuple(
        EpochReport(
            epoch=number,
            metrics={"loss": trained} | ({} if value is None else {"val_loss": value}),
            complete=complete,
        )
        for number, (trained, value, complete) in enumerate(epochs)
    )
    newest = report(len(epochs) - 1, 4)
    return newest.model_copy(update={"epochs": told})


def values(progress: Progress) -> list[float]:
    return [point.value for point in progress._courses["u"].points]


def test_an_epoch_counts_with_its_evaluation_however_often_one_looks_before_that_is_done() -> None:
    """The training loss of epochs that were seen before their evaluation stayed for good: an end 12 epochs too near."""
    progress = Progress()
    progress.observe(job(), evaluating((0.5, 0.9, True), (0.4, None, False)), PER_EPOCH)
    assert values(progress) == [0.9]
    progress.observe(job(), evaluating((0.5, 0.9, True), (0.4, 0.8, True)), PER_EPOCH)
    assert values(progress) == [0.9, 0.8]


def test_an_epoch_without_an_evaluation_counts_with_its_training_only_if_no_epoch_has_one() -> None:
    """The evaluation of a later epoch may replace its own, of which it can be the first one that is done."""
    progress = Progress()
    progress.observe(job(), evaluating((0.5, None, True), (0.4, None, True)), PER_EPOCH)
    assert values(progress) == [0.5, 0.4]
    progress.observe(job(), evaluating((0.5, None, True), (0.4, None, True), (0.3, 0.7, True)), PER_EPOCH)
    assert values(progress) == [0.7]


def test_an_epoch_that_is_trained_again_after_a_rollback_has_its_new_value() -> None:
    """Nobody may have looked while it was open again."""
    progress = Progress()
    progress.observe(job(), evaluating((0.5, 0.9, True), (9.0, 9.0, True)), PER_EPOCH)
    found = restarted(progress)
    progress.observe(job(), evaluating((0.5, 0.9, True), (0.4, 0.8, True)), PER_EPOCH)
    assert values(progress) == [0.9, 0.8]
    progress.observe(job(), evaluating((0.5, 0.9, True)), PER_EPOCH)
    assert values(progress) == [0.9]
    again = Progress()
    again.observe(found, evaluating((0.5, 0.9, True), (0.4, 0.8, True)), PER_EPOCH)
    assert values(again) == [0.9, 0.8]
