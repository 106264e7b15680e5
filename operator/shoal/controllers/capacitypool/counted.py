"""The sum of what jobs counted in a pool, each count once, and old ones with less weight: pure.

A job's counts only grow. The pool remembers those of each job as it last saw them (`counted`), and adds what is more to
its sums in the same write. It drops them when the job is deleted, or an hour after it finished, since finished jobs may
be kept by the thousand. Which of those that still exist it has dropped follows from `retiredUntil`, in the same write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter

from shoal.api.capacity_pool import CapacityPoolStatus, CountedUsage, Usage, UsageSums
from shoal.api.training_job import TrainingJob
from shoal.sizing.fleet.resources import decimal

KEPT = timedelta(hours=1)
"""A job that finished so long ago, and has nothing left to be given back, uses no pool any more."""

_COUNTS = tuple(Usage.model_fields)
_values = attrgetter(*_COUNTS)


@dataclass(frozen=True)
class Sums:
    """What jobs used, as numbers: the fields of `Usage`, some of it of long ago."""

    node_seconds: float = 0.0
    starts: float = 0.0
    start_seconds: float = 0.0
    start_seconds_squared: float = 0.0
    warm_starts: float = 0.0
    warm_start_seconds: float = 0.0
    unfulfilled: float = 0.0
    interruptions: float = 0.0
    shocks: float = 0.0
    in_shocks: float = 0.0
    at_shocks: float = 0.0

    def plus(self, other: Sums, weight: float = 1.0) -> Sums:
        """The sum with what `other` says, and this with a weight."""
        mine, more = (attrgetter(*_COUNTS)(each) for each in (self, other))
        return Sums(**{name: weight * a + b for name, a, b in zip(_COUNTS, mine, more, strict=True)})

    def text(self) -> UsageSums:
        """The same for a status."""
        return UsageSums(**{name: f"{getattr(self, name):.12g}" for name in _COUNTS})


def sums_of(status: CapacityPoolStatus) -> Sums:
    """The sums of a status; 0 for what is no number, since anyone may have edited it."""
    return Sums(**{name: max(0.0, decimal(getattr(status.sums, name))) for name in _COUNTS})


@dataclass(frozen=True)
class Counted:
    """The counts of each job, and what is new in them."""

    parts: tuple[CountedUsage, ...]
    fresh: Sums
    retired_until: datetime | None
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
    before_then, until = before.retired_until, max(before.retired_until or now - KEPT, now - KEPT)
    ours, fresh, retires = list[CountedUsage](), [0] * len(_COUNTS), False
    for uid, job in seen.items():
        usage, was = job.status.pool_usage.get(name), known.get(uid)
        if usage is None or (was is None and before_then is not None and _ended(job, before_then)):
            continue
        if was is None or _values(was) != _values(usage):
            old = _values(was) if was is not None else [0] * len(_COUNTS)
            fresh = [
                total + max(0, new - seen_before)
                for total, new, seen_before in zip(fresh, _values(usage), old, strict=True)
            ]
        if _ended(job, until):
            retires = True
        else:
            ours.append(_part(was, uid, operator, usage))
    parts = tuple(sorted([*ours, *theirs], key=lambda each: each.uid))
    moved = {known[uid].operator for uid in known.keys() & seen.keys()} - {"", operator}
    more = Sums(**dict(zip(_COUNTS, map(float, fresh), strict=True)))
    return Counted(parts, more, until if retires else before_then, frozenset(moved))


def _ended(job: TrainingJob, until: datetime) -> bool:
    """Whether it ended by then, and counts nothing any more."""
    end = job.status.completion_time
    return job.status.finished and job.status.released and end is not None and end <= until


def _part(before: CountedUsage | None, uid: str, operator: str, usage: Usage) -> CountedUsage:
    """The part of a job: the same object as before if nothing of it has changed, since there may be a thousand."""
    if before is not None and before.operator == operator and _values(before) == _values(usage):
        return before
    return CountedUsage(uid=uid, operator=operator, **dict(zip(_COUNTS, _values(usage), strict=True)))
