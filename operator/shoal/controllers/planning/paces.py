"""How fast each job's workers are now: from the samples that they pushed between two reports, by pool.

Time in tasks and waits is left out: it is predicted by itself (`sizing/beside.py`), however long an epoch is. Averages
of single steps will not do: where a quota stops a process, one step in six takes most of the time. Kept in memory for
as long as a job is planned; after a restart two reports are enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.api.training_job import TrainingJob
from shoal_trainer.contract import StatusReport, WorkerState

LEAST_SECONDS = 10.0
MOST_SECONDS = 90.0
START_SECONDS = 10.0
"""After its first push a worker's caches and clocks settle."""


class _Point(NamedTuple):
    at: float
    """On a clock that stands while the worker does not train."""
    samples: int


@dataclass
class _Job:
    points: dict[tuple[int, int], list[_Point]] = field(default_factory=lambda: defaultdict(list))
    newest: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Paces:
    """The speeds of all jobs, by uid. Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    def forget(self, uids: set[str]) -> None:
        """Drop all jobs but these."""
        self._jobs = {uid: job for uid, job in self._jobs.items() if uid in uids}

    def observe(
        self, job: TrainingJob, report: StatusReport | None, at: float
    ) -> Mapping[str, Sequence[float]]:
        """Samples/s of single workers, by pool; what was found last while no worker is steady.

        `at`: when the report was made.
        """
        known = self._jobs.setdefault(job.metadata.uid, _Job())
        pools = {
            (slot.index, slot.incarnation): slot.pool
            for slot in job.status.slots
            if slot.role == "worker" and slot.pool
        }
        found: dict[str, list[float]] = defaultdict(list)
        active = {
            (worker.slot, worker.incarnation): _Point(at - worker.beside_seconds, worker.samples)
            for worker in (report.workers if report is not None else ())
            if worker.state is WorkerState.ACTIVE and worker.samples > 0
        }
        for gone in known.points.keys() - active.keys():
            del known.points[gone]
        for place, point in active.items():
            rate = _rate(known.points[place], point)
            if rate and place in pools:
                found[pools[place]].append(rate)
        if found:
            known.newest = dict(found)
        return known.newest


def _rate(points: list[_Point], now: _Point) -> float | None:
    """The rate over the last 10 to 90 s; adds the point. The first one only marks when the worker began."""
    if points and (now.samples < points[-1].samples or now.at <= points[-1].at):
        if now.samples < points[-1].samples:  # a restarted coordinator counts anew
            points[:] = [now]
        return None
    points.append(now)
    steady = [point for point in points if point.at >= points[0].at + START_SECONDS]
    while len(steady) > 1 and steady[1].at <= now.at - MOST_SECONDS:
        points.remove(steady.pop(0))
    if not steady or now.at - steady[0].at < LEAST_SECONDS:
        return None
    return (now.samples - steady[0].samples) / (now.at - steady[0].at)
