"""How the metric that ends a job came along, and with how many workers: what the samples left are estimated from.

Kept in memory for as long as a job is planned, and thinned out in `status.prediction.course`, where a new operator
finds it: a report has the newest epochs only. The workers of epochs that nobody saw count as the present ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.api.planning_status import CoursePoint
from shoal.api.training_job import TrainingJob
from shoal.sizing.fleet import Evaluation, FleetJob
from shoal.sizing.fleet.work import course_of, ending_by_metric
from shoal_trainer.contract import EpochReport, StatusReport, WorkerState

if TYPE_CHECKING:  # numpy
    from shoal.sizing.speed.efficiency import WorkLeft

MOST_EPOCHS = 400
Points = tuple[Evaluation, ...]


@dataclass
class _Course:
    model: str = ""
    """Its namespace and fingerprint."""
    values: dict[int, Evaluation] = field(default_factory=dict)
    """By epoch."""
    evaluates: bool = False
    """Whether the job evaluates: then the metric is that of an evaluation, which has its value later than training."""
    remembered: int = -1
    """The newest epoch that an operator before this one saw: of those up to it, only `values` are known."""
    seen: list[tuple[float, int]] = field(default_factory=list)
    """Samples and workers at each report since the last epoch."""
    points: Points = ()
    """The values in order; the same object until they change."""

    def __post_init__(self) -> None:
        self.settle()

    def hear(self, told: EpochReport, metric: str, per_epoch: int, active: int) -> None:
        """Take an epoch as it is told now: one that was trained again has another value."""
        number, value = told.epoch, told.metrics.get(metric)
        known = self.values.get(number)
        if value is None or not (told.complete or self.evaluates):
            self.values.pop(number, None)
        elif known is not None:
            self.values[number] = replace(known, value=value)
        elif number > self.remembered:
            samples = float((number + 1) * per_epoch)
            during = [n for at, n in self.seen if samples - per_epoch <= at <= samples] or [max(active, 1)]
            self.values[number] = Evaluation(samples, value, sum(during) / len(during))

    def settle(self) -> None:
        """The values may have changed."""
        now = tuple(self.values[epoch] for epoch in sorted(self.values))
        self.points = self.points if now == self.points else now


class Progress:
    """The courses of all jobs that end by a metric, by uid."""

    def __init__(self) -> None:
        self._courses: dict[str, _Course] = {}
        self._estimates: dict[str, tuple[object, WorkLeft]] = {}
        """By uid: what was asked last, and the answer."""

    def forget(self, uids: set[str]) -> None:
        """Drop all jobs but these."""
        self._courses = {uid: course for uid, course in self._courses.items() if uid in uids}
        self._estimates = {uid: known for uid, known in self._estimates.items() if uid in uids}

    def observe(self, job: TrainingJob, report: StatusReport | None, per_epoch: int | None) -> None:
        """Read the finished epochs of a report."""
        name = job.spec.training.stop_after.metric
        if name is None or report is None:
            return
        per_epoch = report.data.total or per_epoch
        active = sum(worker.state is WorkerState.ACTIVE for worker in report.workers)
        uid = job.metadata.uid
        if uid not in self._courses:
            before = course_of(job)
            self._courses[uid] = _Course(values=before, remembered=max(before, default=-1))
        course = self._courses[uid]
        course.model = f"{job.metadata.namespace}/{report.model.fingerprint}" if report.model else ""
        if active:
            course.seen.append((float(report.samples), active))
        if not per_epoch:
            return
        evaluated = name if name.startswith("val_") else f"val_{name}"
        told = (report.metrics, *(epoch.metrics for epoch in report.epochs))
        course.evaluates = course.evaluates or any(evaluated in metrics for metrics in told)
        for epoch in report.epochs:
            course.hear(epoch, evaluated if course.evaluates else name, per_epoch, active)
        # Epochs after the current one were undone by a return to a snapshot.
        finished = {epoch.epoch for epoch in report.epochs}
        course.values = {
            epoch: value
            for epoch, value in sorted(course.values.items())
            if epoch < report.epoch or epoch in finished
        }
        course.remembered = min(course.remembered, report.epoch - 1)
        if len(course.values) > MOST_EPOCHS:
            newest = dict(list(course.values.items())[-MOST_EPOCHS // 2 :])
            course.values = thinned({e: v for e, v in course.values.items() if e not in newest}) | newest
        course.settle()
        course.seen = [each for each in course.seen if each[0] > report.samples - 2 * per_epoch][
            -MOST_EPOCHS:
        ]

    def course(self, uid: str) -> tuple[CoursePoint, ...]:
        """What is to be remembered of a job's course."""
        values = self._courses[uid].values if uid in self._courses else {}
        return tuple(
            CoursePoint(
                epoch=epoch,
                samples=int(point.samples),
                value=f"{point.value:.6g}",
                workers=f"{point.workers:.4g}",
            )
            for epoch, point in thinned(values).items()
        )

    def estimated(self, job: TrainingJob, planned: FleetJob) -> FleetJob:
        """The job with the samples left to its metric, where nothing else ends it.

        That takes tens of milliseconds after an epoch of it, or of another job of its model.
        """
        uid = job.metadata.uid
        course = self._courses.get(uid, _Course())
        return ending_by_metric(
            job, planned, course.points, self._alike(uid, course.model), partial(self._estimate, uid)
        )

    def _estimate(self, uid: str, points: Points, target: float, **how: Any) -> WorkLeft:
        asked = points, target, how  # the same objects, as a rule: that they are equal is seen at once
        known = self._estimates.get(uid)
        if known is None or known[0] != asked:
            from shoal.sizing.speed.efficiency import samples_to_target

            known = self._estimates[uid] = asked, samples_to_target(points, target, **how)
        return known[1]

    def _alike(self, uid: str, model: str) -> tuple[Points, ...]:
        """The courses of other jobs of the same model, in the same namespace: a fingerprint is what a pod says."""
        return tuple(
            course.points
            for other, course in self._courses.items()
            if other != uid and model and course.model == model
        )


def thinned(values: Mapping[int, Evaluation]) -> dict[int, Evaluation]:
    """Two points for each doubling of the epochs, and the newest. Done again when there are more, it is the same."""
    kept, before, passed = dict[int, Evaluation](), -1, 0.0
    since = list[tuple[float, float]]()
    for epoch in sorted(values):
        point = values[epoch]
        since.append((max(point.samples - passed, 1.0), point.workers))
        passed, half = point.samples, int(2 * math.log2(epoch + 1) + 1e-9)
        if half > before or epoch == max(values):
            workers = sum(samples * n for samples, n in since) / sum(samples for samples, _ in since)
            kept[epoch] = replace(point, workers=workers)
            before, since = half, []
    return kept
