"""Whether a pool has more nodes to be had, and how often and for how long it had none: pure.

Nobody says that a pool is out of stock. It shows where workers wait in vain, and is counted in the pool's one status
write, of the time since the last write, whose state that status has: so each second counts once, whatever crashes.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Literal

from shoal.api.capacity_pool_status import CapacityPoolStatus, MeasuredStock
from shoal.controllers.capacitypool.counted import Sums
from shoal.controllers.capacitypool.seen import Seen
from shoal.sizing.fleet.resources import decimal
from shoal.sizing.speed import priors

DEVIATIONS = 3.0
"""A pod waits too long after `priors.PATIENCE` times the mean wait for a node, and after so many deviations more."""
LEAST_PATIENCE = timedelta(seconds=30)
UNSEEN, UNSEEN_SECONDS = 4.0, 120.0
"""While no start was measured: so many times what the spec says, if that is no longer than this. A guess that is too
short would give up each node just before it comes, and never be corrected."""
LATE = 2
"""So it would where nodes take longer than they did. So a node that comes within so many patiences after it was asked
for is a start, though nobody waits any more; and pods that try a pool again wait for so many."""
HELD, LONGEST = timedelta(seconds=60), timedelta(minutes=30)
"""A pool stays exhausted for at least this long, twice the wait that showed it, and as long again as it was out of
nodes before, up to the longest: plans would go back and forth."""
LEAST_WEIGHT = 0.5**50
"""A clock that was ahead by four years or less has lost nothing for good."""
COUNTED, UNWATCHED = timedelta(minutes=5), timedelta(minutes=10)
"""The stock is counted this often, and with whatever else changes; after a longer time nobody was there to see it."""


def start(total: Sums) -> tuple[float, float]:
    """Mean and standard deviation of the seconds until nodes came that were waited for; 0 without one."""
    if total.starts <= 0:
        return 0.0, 0.0
    mean = total.start_seconds / total.starts
    return mean, math.sqrt(max(0.0, total.start_seconds_squared / total.starts - mean * mean))


def patience(seen: Seen, total: Sums) -> timedelta:
    """How long a pod waits for a node before it does so in vain. `total`: the use of all jobs."""
    return timedelta(seconds=patience_after(float(seen.pool.spec.startup_seconds), total))


def patience_after(said: float, total: Sums) -> float:
    """Seconds of patience with a pool whose spec says that a node takes `said` seconds, after these starts."""
    mean, deviation = start(total)
    if mean > 0:
        seconds = max(said, priors.PATIENCE * mean, mean + DEVIATIONS * deviation)
    else:
        seconds = max(priors.PATIENCE * said, min(UNSEEN * said, UNSEEN_SECONDS))
    return max(LEAST_PATIENCE.total_seconds(), seconds)


def waiting_too_long(seen: Seen, patience: timedelta) -> list[timedelta]:
    """For how long pods have waited for a node in vain: since the last one came, which others may have needed more.

    Also if that is gone: there were nodes, as far as is known, up to when that was counted.

    One that has waited for longer than a pool stays exhausted says nothing any more: its requests may fit no node at
    all, and the pool is to be tried again by others.
    """
    status = seen.pool.status
    tried_again = status.out_since is not None and status.exhausted is None
    known = _known_until(seen) if status.out_since is None else None
    had = max(filter(None, (seen.newest, known)), default=None)
    least = patience * LATE if tried_again else patience
    young = (since for since in seen.waiting if seen.now - since <= least + LONGEST)
    waits = (seen.now - max(since, had or since) for since in young)
    return [waited for waited in waits if waited > least]


def late_start(seen: Seen, patience: timedelta) -> Sums:
    """The start of a node that came soon after its pods had given up: a short patience is corrected.

    It was not theirs if one of them waits still; and where it was, and they do not give up, they say so themselves.
    """
    since = seen.pool.status.out_since
    if since is None or not _has_come(seen, since) or any(waits < since for waits in seen.waiting):
        return Sums()
    waited = seen.now - since + patience
    if not timedelta() <= waited <= LATE * patience:  # of a leader whose clock was ahead, nobody knows
        return Sums()
    seconds = waited.total_seconds()
    return Sums(starts=1.0, start_seconds=seconds, start_seconds_squared=seconds**2)


def still_exhausted(seen: Seen, patience: timedelta) -> bool:
    """Nobody waits any more, but it is too soon to try again, and no node has come since."""
    before = seen.pool.status.exhausted
    if before is None:
        return False
    since = seen.pool.status.out_since or before.last_transition_time
    held = held_for(patience, before.last_transition_time - since)
    # Of an earlier leader whose clock is ahead, it would be too soon for so much longer.
    return not _has_come(seen, since) and abs(seen.now - before.last_transition_time) < held


def held_for(patience: timedelta, out: timedelta) -> timedelta:
    """How long a pool stays exhausted that was `out` of nodes for so long before."""
    return max(HELD, 2 * patience, min(out, LONGEST))


def out_since(seen: Seen, *, exhausted: bool) -> datetime | None:
    """When the first pod was seen to wait in vain; forgotten with the next node, or when nobody tries for long."""
    known = seen.pool.status.out_since
    if exhausted:
        gone_on = known is not None and not _has_come(seen, known)
        return known if gone_on else seen.now.replace(microsecond=0)
    before = (
        each for each in seen.pool.status.conditions if each.type == "Exhausted" and each.status == "False"
    )
    tried = next((each.last_transition_time for each in before), seen.now)
    return None if known is None or _has_come(seen, known) or seen.now - tried > LONGEST else known


def _has_come(seen: Seen, since: datetime) -> bool:
    """Whether a machine has come since then."""
    return seen.newest is not None and seen.newest >= since


def is_due(seen: Seen) -> bool:
    """Whether it is time to count again, though nothing changed but that a machine has come."""
    until = seen.pool.status.stock.counted_until
    if until is None:
        return False
    if _is_ahead(seen, until) or _came_after(seen, until):
        return True
    return _was(seen.pool.status) is not None and seen.now - until >= COUNTED


def _known_until(seen: Seen) -> datetime | None:
    """Up to when it is known that there were nodes, or none; not if a clock said so that was ahead."""
    known = seen.pool.status.stock.known_until
    return None if known is None or _is_ahead(seen, known) else known


def _came_after(seen: Seen, until: datetime) -> bool:
    """Whether a machine has come that no write has seen yet."""
    return seen.newest is not None and until < seen.newest <= seen.now


def _is_ahead(seen: Seen, until: datetime) -> bool:
    """Whether that was counted by a leader whose clock was ahead by more than clocks differ: it begins anew."""
    return until - seen.now > UNWATCHED


def weight(seen: Seen) -> float:
    """What was measured up to the last write counts so much now.

    A clock that was ahead made it all older than it was, and now it is made as much younger, up to what a number holds.
    """
    until = seen.pool.status.stock.counted_until or seen.now
    if _is_ahead(seen, until):
        return 1 / max(priors.weight((until - seen.now).total_seconds()), LEAST_WEIGHT)
    return priors.weight((seen.now - until).total_seconds())


def count(seen: Seen, patience: timedelta, after: CapacityPoolStatus) -> MeasuredStock:
    """How long there were nodes, and were none, up to now."""
    before, now = seen.pool.status, seen.now.replace(microsecond=0)
    old = before.stock
    since = old.counted_until if old.counted_until and not _is_ahead(seen, old.counted_until) else now
    passed = max(now - since, timedelta())
    was = (_was(before) or ("Stocked" if _came_after(seen, since) else None)) if passed <= UNWATCHED else None
    known_until = _known_until(seen)
    undecided = max(now - min(known_until or since, since), timedelta())
    out = passed if was == "Out" else timedelta()
    watched = passed if was else timedelta()
    ran_out = before.out_since is None and after.out_since is not None
    if ran_out:  # that it was out is known only now, after a wait, of which some may be counted
        out = min(max(waiting_too_long(seen, patience), default=timedelta()), undecided)
        watched = max(watched, out)
    kept = weight(seen)

    def added(known: str, more: float) -> str:
        return f"{kept * decimal(known) + more:.9g}"

    return MeasuredStock(
        watched_seconds=added(old.watched_seconds, watched.total_seconds()),
        out_seconds=added(old.out_seconds, out.total_seconds()),
        outs=added(old.outs, float(ran_out)),
        counted_until=max(now, since),
        known_until=max(now, since) if was or ran_out else known_until,
    )


def _was(status: CapacityPoolStatus) -> Literal["Out", "Stocked"] | None:
    """Whether there were more nodes to be had, as far as anybody could have noticed.

    A pool that runs out loses nodes, so it was not out while workers had theirs and none waited. Once it is, it stays
    so until a node comes, however often it is tried again, if it is.
    """
    if status.out_since is not None:
        return "Out" if status.exhausted or status.waiting else None
    return "Stocked" if status.used and not status.waiting else None
