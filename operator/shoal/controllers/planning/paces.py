"""How fast each job's workers are now, by pool: from push to push, as the coordinator's `pace` measures the job.

A push brings what was trained before it. So a speed is what was pushed after one push until another, over the time
between them: in the time from report to report there may be one step more, or none, and steps may take minutes.

Time in tasks and waits is left out: it is predicted by itself (`sizing/beside.py`), however long an epoch is. Averages
of single steps will not do: where a quota stops a process, one step in six takes most of the time. While no worker can
be watched, also after a restart of the operator, what `status.prediction` says of the last watch holds. So it does
while a parameter server is away, for which all workers wait, however many there are.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import NamedTuple

from shoal.api.training_job import TrainingJob
from shoal.sizing.fleet import Watched
from shoal_trainer.contract import StatusReport, WorkerReport, WorkerState

LEAST_SECONDS = 10.0
MOST_SECONDS = 90.0
LEAST_STEPS, MANY_STEPS = 2, 10
"""In a watch there are at least so many; and where the last 90 s have fewer than ten, it is as long as ten take."""
STEP_SECONDS = 0.5
"""A step tells no more than so many seconds of a watch (`NOISE` of `sizing/fleet/pace`): single ones differ by 30 %."""
START_SECONDS = 10.0
"""After its first push a worker's caches and clocks settle."""


class _Point(NamedTuple):
    """A push, or the last of several since the report before."""

    at: float
    """On a clock that stands while the worker does not train."""
    samples: int
    steps: int


class _Rate(NamedTuple):
    per_second: float
    window: float
    """Seconds that were watched."""
    seconds: float
    """Of a watch that tells as much."""


Watches = dict[tuple[int, int, str], list[_Point]]
"""Of workers, by slot, incarnation, and the process of the coordinator, since each counts anew."""


class Paces:
    """The speeds of all jobs, by uid. Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self._jobs: dict[str, Watches] = {}

    def forget(self, uids: set[str]) -> None:
        """Drop all jobs but these."""
        self._jobs = {uid: watches for uid, watches in self._jobs.items() if uid in uids}

    def observe(self, job: TrainingJob, report: StatusReport | None, at: float) -> Watched:
        """Samples/s of single workers, of those that are steady. `at`: when the report was made."""
        if report is not None and not all(shard.ready for shard in report.shards):
            report = None
        watches = self._jobs.setdefault(job.metadata.uid, {})
        pools = {
            (slot.index, slot.incarnation): slot.pool
            for slot in job.status.slots
            if slot.role == "worker" and slot.pool
        }
        process = report.speed_epoch if report is not None else ""
        active = {
            (worker.slot, worker.incarnation, process): worker
            for worker in (report.workers if report is not None else ())
            if worker.state is WorkerState.ACTIVE and worker.samples > 0
        }
        for gone in watches.keys() - active.keys():
            del watches[gone]
        found: dict[str, list[float]] = defaultdict(list)
        rates = list[_Rate]()
        pushing = list[tuple[str, float]]()
        for place, worker in active.items():
            points, now = watches.setdefault(place, []), at - worker.beside_seconds
            rate = _rate(points, worker, now)
            if (pool := pools.get(place[:2])) is None:
                continue
            pushing.append((pool, max(now, points[-1].at) - points[0].at))  # whatever a pod says, it did push
            if rate:
                found[pool].append(rate.per_second)
                rates.append(rate)
        if not rates:
            return Watched()
        window = fmean(rate.window for rate in rates)
        company: dict[str, float] = defaultdict(float)
        for pool, seconds in pushing:
            company[pool] += min(seconds / window, 1.0)
        return Watched(found, fmean(rate.seconds for rate in rates), company)


def _rate(points: list[_Point], worker: WorkerReport, now: float) -> _Rate | None:
    """The rate over the last 10 to 90 s, or ten steps; adds the last push. The first one only marks the begin.

    `now`: of the report, on the clock of the points. What is waited for longer than from push to push counts as well: a
    push may bring several steps.
    """
    # No rate and no time is negative, whatever a pod says. After a restart of the coordinator its time beside steps may
    # be 0 until its first heartbeat: the clock of the points runs back by all of it.
    if points and (worker.samples < points[-1].samples or now < points[0].at):
        points.clear()
    pushed = now - worker.last_push_seconds
    if not points or (worker.samples > points[-1].samples and pushed > points[-1].at):
        points.append(_Point(pushed, worker.samples, worker.steps))
    last = points[-1]
    steady = [point for point in points if point.at >= points[0].at + START_SECONDS]
    while (
        len(steady) > 1
        and steady[1].at <= last.at - MOST_SECONDS
        and last.steps - steady[1].steps >= MANY_STEPS
    ):
        points.remove(steady.pop(0))
    if not steady or last.steps - steady[0].steps < LEAST_STEPS or last.at - steady[0].at < LEAST_SECONDS:
        return None
    steps, seconds = last.steps - steady[0].steps, last.at - steady[0].at
    seconds += max(0.0, now - last.at - seconds / (len(steady) - 1))
    return _Rate((last.samples - steady[0].samples) / seconds, seconds, min(seconds, STEP_SECONDS * steps))
