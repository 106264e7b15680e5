"""How fast each job's workers are now: from the samples that they pushed between two reports, by pool.

Time in tasks and waits is left out: it is predicted by itself (`sizing/beside.py`), however long an epoch is. Averages
of single steps will not do: where a quota stops a process, one step in six takes most of the time. While no worker can
be watched, also after a restart of the operator, what `status.prediction` says of the last watch holds.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from shoal.api.training_job import TrainingJob
from shoal.sizing.fleet import Watched
from shoal_trainer.contract import StatusReport, WorkerState

LEAST_SECONDS = 10.0
MOST_SECONDS = 90.0
START_SECONDS = 10.0
"""After its first push a worker's caches and clocks settle."""


class _Point(NamedTuple):
    at: float
    """On a clock that stands while the worker does not train."""
    samples: int


class _Rate(NamedTuple):
    per_second: float
    seconds: float


Points = dict[tuple[int, int, str], list[_Point]]
"""By slot, incarnation, and the process of the coordinator, since each counts anew."""


class Paces:
    """The speeds of all jobs, by uid. Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self._jobs: dict[str, Points] = {}

    def forget(self, uids: set[str]) -> None:
        """Drop all jobs but these."""
        self._jobs = {uid: points for uid, points in self._jobs.items() if uid in uids}

    def observe(self, job: TrainingJob, report: StatusReport | None, at: float) -> Watched:
        """Samples/s of single workers, of those that are steady. `at`: when the report was made."""
        points = self._jobs.setdefault(job.metadata.uid, {})
        pools = {
            (slot.index, slot.incarnation): slot.pool
            for slot in job.status.slots
            if slot.role == "worker" and slot.pool
        }
        process = report.speed_epoch if report is not None else ""
        active = {
            (worker.slot, worker.incarnation, process): _Point(at - worker.beside_seconds, worker.samples)
            for worker in (report.workers if report is not None else ())
            if worker.state is WorkerState.ACTIVE and worker.samples > 0
        }
        for gone in points.keys() - active.keys():
            del points[gone]
        found: dict[str, list[float]] = defaultdict(list)
        seconds = []
        for place, point in active.items():
            rate = _rate(points.setdefault(place, []), point)
            if rate and rate.per_second and place[:2] in pools:
                found[pools[place[:2]]].append(rate.per_second)
                seconds.append(rate.seconds)
        return Watched(found, sum(seconds) / len(seconds)) if found else Watched()


def _rate(points: list[_Point], now: _Point) -> _Rate | None:
    """The rate over the last 10 to 90 s; adds the point. The first one only marks when the worker began."""
    if points and now.samples < points[-1].samples:  # no rate is negative, whatever a pod says
        points.clear()
    if not points or now.at > points[-1].at:
        points.append(now)
    last = points[-1]
    steady = [point for point in points if point.at >= points[0].at + START_SECONDS]
    while len(steady) > 1 and steady[1].at <= last.at - MOST_SECONDS:
        points.remove(steady.pop(0))
    if not steady or last.at - steady[0].at < LEAST_SECONDS:
        return None
    seconds = last.at - steady[0].at
    return _Rate((last.samples - steady[0].samples) / seconds, seconds)
