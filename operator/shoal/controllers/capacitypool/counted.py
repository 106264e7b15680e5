"""The sum of what jobs counted in a pool, each count once, and old ones with less weight: pure.

A job's counts only grow. The pool remembers those of each job as it last saw them (`counted`), and adds what is more to
its sums in the same write. A job that is older than the pool counts from when the pool first sees that it uses it: what
it used before may be of another pool of this name. The pool drops the counts when the job is deleted, or an hour after
it finished, since finished jobs may be kept by the thousand. Which of those that still exist it has dropped follows
from `retiredUntil`, in the same write. Where there are more of them than a status can hold, those that ended first are
dropped sooner, and jobs that the pool does not know yet are counted later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter

from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_status import CapacityPoolStatus, CountedUsage, Usage, UsageSums
from shoal.api.training_job import TrainingJob
from shoal.sizing.fleet.resources import decimal

KEPT = timedelta(hours=1)
"""A job that finished so long ago, and has nothing left to be given back, uses no pool any more."""

MOST_PARTS = 3000
"""Parts in a status: 0.8 MB of the 1.5 that etcd takes of an object."""

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
        both = zip(_COUNTS, _values(self), _values(other), strict=True)
        return Sums(**{name: weight * mine + theirs for name, mine, theirs in both})

    def text(self) -> UsageSums:
        """The same for a status."""
        return UsageSums(**{name: f"{getattr(self, name):.12g}" for name in _COUNTS})


def sums_of(status: CapacityPoolStatus) -> Sums:
    """The sums of a status; 0 for what is no number, since anyone may have edited it.

    One without any is of a version that added up the parts of jobs, or of a CRD that keeps none: they begin with these.
    """
    if status.sums is None:
        parts = [_values(each) for each in status.counted]
        return Sums(**{name: float(sum(of)) for name, *of in zip(_COUNTS, *parts, strict=True)})
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
    pool: CapacityPool,
    jobs: Iterable[TrainingJob],
    operator: str,
    now: datetime,
    unread: Callable[[str], bool],
) -> Counted:
    """Count. A job belongs to the operator that sees it; jobs of others are not seen. `unread`: see `Seen`."""
    name, before = pool.metadata.name, pool.status
    known = {each.uid: each for each in before.counted}
    seen = {job.metadata.uid: job for job in jobs}
    # Until an operator of this version has written it, a part says not whose job it is.
    unseen = [
        each
        for each in before.counted
        if each.uid not in seen and (each.operator not in {"", operator} or unread(each.uid))
    ]
    using = {
        uid: usage for uid, job in seen.items() if (usage := job.status.pool_usage.get(name)) is not None
    }
    room = max(0, MOST_PARTS - len(unseen))
    before_then = before.retired_until
    until = max(before_then or now - KEPT, now - KEPT, _soonest([seen[uid] for uid in using], room, now))
    ours, fresh, retires = list[CountedUsage](), [0] * len(_COUNTS), False
    for uid in sorted(using, key=lambda uid: uid not in known):
        job, usage, was = seen[uid], using[uid], known.get(uid)
        ended = _ended(job, until)
        dropped_before = ended and before_then is not None and _ended(job, before_then)
        if was is None and (dropped_before or (not ended and len(ours) >= room)):
            continue
        values = _values(usage)
        old = _values(was) if was is not None else values if _is_older(job, pool) else (0,) * len(_COUNTS)
        if values != old:
            more = (max(0, new - known_of) for new, known_of in zip(values, old, strict=True))
            fresh = [total + each for total, each in zip(fresh, more, strict=True)]
        if ended:
            retires = True
        elif was is not None and was.operator == operator and values == old:
            ours.append(was)  # the same object, since there may be a thousand
        else:
            ours.append(CountedUsage(uid=uid, operator=operator, **dict(zip(_COUNTS, values, strict=True))))
    parts = tuple(sorted([*ours, *unseen], key=lambda each: each.uid))
    moved = {known[uid].operator for uid in known.keys() & seen.keys()} - {"", operator}
    news = Sums(**dict(zip(_COUNTS, map(float, fresh), strict=True)))
    return Counted(parts, news, until if retires else before_then, frozenset(moved))


def _is_older(job: TrainingJob, pool: CapacityPool) -> bool:
    """Whether the job was there before the pool: what it used may be of an earlier pool of this name."""
    begun, made = job.metadata.creation_timestamp, pool.metadata.creation_timestamp
    return bool(begun and made and begun < made)  # of one server, in one form


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
    return end is not None and end <= until and job.status.finished and job.status.released
