"""The sum of what jobs counted in a pool, each count once: pure.

The pool remembers the part of each job as it last saw it (`counted`), and adds it to `retired` in the write that drops
it: when the job is deleted, or an hour after it finished, since finished jobs may be kept by the thousand. Which of
those that still exist are in `retired` follows from `retiredUntil`, in the same write. Where there are more of them
than a status can hold, those that ended first are added sooner, and jobs that the pool does not know yet are counted
later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter

from shoal.api.capacity_pool import CapacityPoolStatus, CountedUsage, Usage
from shoal.api.training_job import TrainingJob

KEPT = timedelta(hours=1)
"""A job that finished so long ago, and has nothing left to be given back, uses no pool any more."""

MOST_PARTS = 4000
"""Parts in a status: 0.7 MB of the 1.5 that etcd takes of an object."""

_COUNTS = tuple(Usage.model_fields)
_values = attrgetter(*_COUNTS)
_MOST = 2**63 - 1
"""The largest number that the API server stores: with a larger one the status of the pool could be written no more."""


@dataclass(frozen=True)
class Counted:
    """The parts, and their sum."""

    parts: tuple[CountedUsage, ...]
    retired: Usage
    retired_until: datetime | None
    total: Usage
    moved: frozenset[str]
    """Operators whose jobs are this one's now: it was installed in their place."""


def count(
    name: str, before: CapacityPoolStatus, jobs: Iterable[TrainingJob], operator: str, now: datetime
) -> Counted:
    """Count. A job belongs to the operator that sees it; jobs of others are not seen."""
    known = {each.uid: each for each in before.counted}
    seen = {job.metadata.uid: job for job in jobs}
    # Until an operator of this version has written it, a part says not whose job it is.
    theirs = [each for each in before.counted if each.uid not in seen and each.operator not in {"", operator}]
    gone = [each for each in before.counted if each.uid not in seen and each.operator in {"", operator}]
    using = {
        uid: usage for uid, job in seen.items() if (usage := job.status.pool_usage.get(name)) is not None
    }
    room = max(0, MOST_PARTS - len(theirs))
    before_then = before.retired_until
    until = max(before_then or now - KEPT, now - KEPT, _soonest([seen[uid] for uid in using], room, now))
    ours, ended = list[CountedUsage](), list[Usage]()
    for uid in sorted(using, key=lambda uid: uid not in known):
        job, usage = seen[uid], using[uid]
        if not _ended(job, until):
            if uid in known or len(ours) < room:
                ours.append(_part(known.get(uid), uid, operator, usage))
        elif uid in known or before_then is None or not _ended(job, before_then):
            ended.append(usage)
    parts = tuple(sorted([*ours, *theirs], key=lambda each: each.uid))
    retired = _sum([before.retired, *gone, *ended])
    moved = {known[uid].operator for uid in known.keys() & seen.keys()} - {"", operator}
    return Counted(parts, retired, until if ended else before_then, _sum([retired, *parts]), frozenset(moved))


def _soonest(jobs: Sequence[TrainingJob], room: int, now: datetime) -> datetime:
    """When those had ended of which there are more than there is room for; long ago: there is room for all."""
    ends = (
        []
        if len(jobs) <= room
        else sorted(
            end for job in jobs if _ended(job, now) and (end := job.status.completion_time) is not None
        )
    )
    return ends[min(len(jobs) - room, len(ends)) - 1] if ends else now - KEPT


def _ended(job: TrainingJob, until: datetime) -> bool:
    """Whether it ended by then, and counts nothing any more."""
    end = job.status.completion_time
    return job.status.finished and job.status.released and end is not None and end <= until


def _part(before: CountedUsage | None, uid: str, operator: str, usage: Usage) -> CountedUsage:
    """The part of a job: the same object as before if nothing of it has changed, since there may be a thousand."""
    if before is not None and before.operator == operator and _values(before) == _values(usage):
        return before
    return CountedUsage(uid=uid, operator=operator, **dict(zip(_COUNTS, _values(usage), strict=True)))


def _sum(parts: Sequence[Usage]) -> Usage:
    sums = (min(sum(column), _MOST) for column in zip(*map(_values, parts), strict=True))
    return Usage(**dict(zip(_COUNTS, sums, strict=False)))
