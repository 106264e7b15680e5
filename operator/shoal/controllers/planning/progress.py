"""How the metric that ends a job came along, and with how many workers: what the samples left are estimated from.

Kept in memory for as long as a job is planned. After a restart the newest epochs come again with the next report; the
workers of those that nobody saw count as the present ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.api.training_job import TrainingJob
from shoal.sizing.fleet import Evaluation, FleetJob
from shoal_trainer.contract import StatusReport, StopAfter, WorkerState

MOST_EPOCHS = 400


@dataclass
class _Course:
    fingerprint: str = ""
    values: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """Samples, the metric, and mean workers, by epoch."""
    seen: list[tuple[float, int]] = field(default_factory=list)
    """Samples and workers at each report since the last epoch."""


class Progress:
    """The courses of all jobs that end by a metric, by uid."""

    def __init__(self) -> None:
        self._courses: dict[str, _Course] = {}

    def forget(self, uids: set[str]) -> None:
        """Drop all jobs but these."""
        self._courses = {uid: course for uid, course in self._courses.items() if uid in uids}

    def observe(self, job: TrainingJob, report: StatusReport | None, per_epoch: int | None) -> None:
        """Read the finished epochs of a report."""
        name = job.spec.training.stop_after.metric
        if name is None or report is None:
            return
        per_epoch = report.data.samples_per_epoch or per_epoch
        active = sum(worker.state is WorkerState.ACTIVE for worker in report.workers)
        course = self._courses.setdefault(job.metadata.uid, _Course())
        course.fingerprint = report.model.fingerprint if report.model else ""
        if active:
            course.seen.append((float(report.samples), active))
        if not per_epoch:
            return
        for epoch in report.epochs:
            value = epoch.metrics.get(f"val_{name}", epoch.metrics.get(name))
            if value is not None and epoch.epoch not in course.values:
                samples = float((epoch.epoch + 1) * per_epoch)
                during = [n for at, n in course.seen if samples - per_epoch <= at <= samples] or [
                    max(active, 1)
                ]
                course.values[epoch.epoch] = samples, value, sum(during) / len(during)
        # Epochs after the current one were undone by a return to a snapshot.
        kept = sorted(epoch for epoch in course.values if epoch <= report.epoch)[-MOST_EPOCHS:]
        course.values = {epoch: course.values[epoch] for epoch in kept}
        course.seen = [each for each in course.seen if each[0] > report.samples - 2 * per_epoch][
            -MOST_EPOCHS:
        ]

    def _points(self, uid: str) -> list[Evaluation]:
        course = self._courses.get(uid, _Course())
        return [Evaluation(*course.values[epoch]) for epoch in sorted(course.values)]

    def estimated(self, job: TrainingJob, planned: FleetJob) -> FleetJob:
        """The job with the samples left to its metric, where nothing else ends it; takes tens of milliseconds."""
        from shoal.sizing.speed.efficiency import (
            samples_to_target,  # numpy: at rest, the operator does without
        )

        stop = job.spec.training.stop_after
        if stop.metric is None or stop.value is None or planned.samples_left is not None:
            return planned
        said = StopAfter(metric=stop.metric, value=float(stop.value), mode=stop.mode)
        uid = job.metadata.uid
        course = self._courses.get(uid, _Course())
        points = self._points(uid)
        workers = float(max(sum(planned.running.values()), 1))
        found = samples_to_target(
            points,
            float(stop.value),
            rises=said.direction == "Max",
            workers=workers,
            others=self._alike(uid, course.fingerprint),
        )
        ends = f"the job ends when {stop.metric} is {stop.value}"
        if found.samples is None:
            return replace(planned, work_note=f"{ends}, and {found.why}")
        assumed = "" if found.learned else (
            "; how many more samples more workers need is an assumption until the job has run with different numbers"
        )  # fmt: skip
        return replace(
            planned,
            samples_left=found.samples,
            samples_sigma=found.sigma,
            efficiency=found.efficiency,
            min_workers=job.spec.workers.min_replicas
            if job.spec.elasticity.mode in {"Advise", "Auto"} and planned.model is not None
            else planned.min_workers,
            work_note=f"{ends}: {found.why}{assumed}",
        )

    def _alike(self, uid: str, fingerprint: str) -> Sequence[Sequence[Evaluation]]:
        """The courses of other jobs of the same model."""
        return [
            self._points(other)
            for other, course in self._courses.items()
            if other != uid and fingerprint and course.fingerprint == fingerprint
        ]
