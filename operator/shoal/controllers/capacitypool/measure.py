"""The status of a CapacityPool from what is seen of nodes, jobs and other pools: pure.

Every count is made once: a job counts its own use in its one status write (`status.poolUsage`); the pool remembers the
part of each job as it last saw it, and adds the part of a deleted job to `retired` in the write that drops it. What
`shoal-pools` writes (`scaling`, and conditions of its own) is kept.

Operators that are scoped to namespaces share a pool: each writes what its own jobs have and want, keeps what the others
wrote, and sums up. A write is refused if another one came first, so none is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from shoal.api.base import Condition
from shoal.api.capacity_pool import (
    CapacityPool,
    CapacityPoolStatus,
    CountedUsage,
    MeasuredInterruptions,
    MeasuredStartup,
    OperatorShare,
    Recommendation,
    UnfulfilledWaits,
    Usage,
)
from shoal.api.kube import Node, Pod
from shoal.api.training_job import TrainingJob
from shoal.controllers.trainingjob.claims import holdings

PATIENCE = 2.0
"""A pod waits too long after this many times the pool's start-up time."""
LEAST_PATIENCE = timedelta(seconds=30)
UNSEEN, UNSEEN_SECONDS = 4.0, 120.0
"""While no start was measured: so many times what the spec says, if that is no longer than this. A guess that is too
short would give up each node just before it comes, and never be corrected."""
HELD, LONGEST = timedelta(seconds=60), timedelta(minutes=30)
"""A pool stays exhausted for at least this long, twice the wait that showed it, and as long again as it was out of
nodes before, up to the longest: plans would go back and forth."""
NAMED_JOBS = 3
RENEWED = timedelta(minutes=30)
"""Interval at which an operator repeats what it said."""
STALE = timedelta(hours=1)
"""What another operator said so long ago counts no more: it may be uninstalled."""

_COUNTS = tuple(Usage.model_fields)


@dataclass(frozen=True)
class Seen:
    """What is seen of one pool at one moment. `nodes`: those that its selector matches."""

    pool: CapacityPool
    now: datetime
    nodes: Sequence[Node]
    used: int
    """Nodes with a pod of a job."""
    jobs: Sequence[TrainingJob]
    """All jobs that exist."""
    waiting: Sequence[Pod]
    """Pods of this pool that have no node."""
    problem: tuple[str, str] | None = None
    """What is wrong with the pool's description, as a reason and a message."""
    overlaps: str = ""
    """Another pool that selects one of its nodes."""
    operator: str = ""
    """Who sees this."""


def measure(seen: Seen) -> CapacityPoolStatus:
    """The pool's status."""
    pool, before = seen.pool, seen.pool.status
    name = pool.metadata.name
    counted, retired = _counted(name, before, seen.jobs, seen.operator)
    total = _sum([retired, *counted])
    shares = _shares(seen, total)
    pending = sum(share.pending for share in shares)
    still = _still_exhausted(seen, total)
    return CapacityPoolStatus(
        observed_generation=pool.metadata.generation,
        nodes=len(seen.nodes),
        used=min(len(seen.nodes), sum(share.used for share in shares)),
        waiting=sum(share.waiting for share in shares),
        startup=_startup(total),
        interruptions=_interruptions(total, before),
        unfulfilled=UnfulfilledWaits(waits=total.unfulfilled, pending=pending),
        out_since=_out_since(seen, exhausted=bool(pending) or still),
        recommended=_recommended(shares, pool.spec.limits.nodes),
        shares=shares,
        counted=tuple(counted),
        retired=retired,
        conditions=_conditions(seen, pending, still=still),
        scaling=before.scaling,
    )


def matches(pool: CapacityPool, node: Node) -> bool:
    """Whether a node is one of the pool: it has all labels of the selector. A pool without a selector has none."""
    selector = pool.spec.node_selector
    return bool(selector) and selector.items() <= node.metadata.labels.items()


def _counted(
    name: str, before: CapacityPoolStatus, jobs: Iterable[TrainingJob], operator: str
) -> tuple[list[CountedUsage], Usage]:
    """The part of each existing job, and that of the deleted ones. Jobs of other operators are not seen."""
    now = {job.metadata.uid: job.status.pool_usage[name] for job in jobs if name in job.status.pool_usage}
    exists = {job.metadata.uid for job in jobs}
    # Until an operator of this version has written it, a part says not whose job it is.
    ours = [each for each in before.counted if each.operator in {"", operator}]
    others = [each for each in before.counted if each.operator not in {"", operator}]
    counted = [
        CountedUsage(uid=uid, operator=operator, **{count: getattr(usage, count) for count in _COUNTS})
        for uid, usage in now.items()
    ]
    gone = [each for each in ours if each.uid not in exists]
    return sorted([*counted, *others], key=lambda each: each.uid), _sum([before.retired, *gone])


def _shares(seen: Seen, total: Usage) -> tuple[OperatorShare, ...]:
    """What the operators say: this one now, the others before."""
    before = {share.operator: share for share in seen.pool.status.shares}
    nodes, reason = _planned(seen.pool, seen.jobs)
    if seen.used > nodes:
        nodes, reason = seen.used, ", ".join(filter(None, (reason, f"{seen.used} in use")))
    others = [
        share for share in before.values() if share.operator != seen.operator and seen.now - share.at < STALE
    ]
    fresh = OperatorShare(
        operator=seen.operator,
        used=seen.used,
        waiting=len(seen.waiting),
        pending=len(_waiting_too_long(seen, total)),
        nodes=nodes,
        reason=reason,
        at=seen.now.replace(microsecond=0),
    )
    said = before.get(seen.operator)
    if said is not None and said == fresh.model_copy(update={"at": said.at}):
        fresh = fresh if seen.now - said.at >= RENEWED else said
    return tuple(sorted([*others, fresh], key=lambda share: share.operator))


def _sum(parts: Iterable[Usage]) -> Usage:
    totals = dict.fromkeys(_COUNTS, 0)
    for part in parts:
        for count in _COUNTS:
            totals[count] += getattr(part, count)
    return Usage(**totals)


def _startup(total: Usage) -> MeasuredStartup:
    if total.starts <= 0:
        return MeasuredStartup()
    mean = total.start_seconds / total.starts
    variance = max(0.0, total.start_seconds_squared / total.starts - mean * mean)
    return MeasuredStartup(
        seconds=round(mean), deviation_seconds=round(math.sqrt(variance)), seen=total.starts
    )


def _interruptions(total: Usage, before: CapacityPoolStatus) -> MeasuredInterruptions:
    hours = total.node_seconds / 3600
    return MeasuredInterruptions(
        per_hour=f"{total.interruptions / hours:.4g}" if hours > 0 else "0",
        seen=total.interruptions,
        node_hours=f"{hours:.4g}",
        shocks=total.shocks,
        together=before.interruptions.together,
    )


def _planned(pool: CapacityPool, jobs: Iterable[TrainingJob]) -> tuple[int, str]:
    """The nodes that the jobs that are seen have, or are to have by a plan that is carried out, and whose they are."""
    name = pool.metadata.name
    wanted = {
        f"{job.metadata.namespace}/{job.metadata.name}": count
        for job in jobs
        if (count := holdings(job)[name]) > 0
    }
    most = sorted(wanted.items(), key=lambda item: (-item[1], item[0]))
    words = ", ".join(f"{count} for {job}" for job, count in most[:NAMED_JOBS])
    more = f" and {len(most) - NAMED_JOBS} more jobs" if len(most) > NAMED_JOBS else ""
    return sum(wanted.values()), f"{words}{more}"


def _recommended(shares: Iterable[OperatorShare], limit: int) -> Recommendation:
    """What all jobs together have and are to have, at most the pool's limit."""
    asking = [share for share in shares if share.nodes > 0]
    nodes = sum(share.nodes for share in asking)
    if not asking:
        return Recommendation(nodes=0, reason="no job plans to use it")
    clamped = f"; the limit is {limit}" if nodes > limit else ""
    words = ", ".join(share.reason for share in asking)
    return Recommendation(nodes=min(nodes, limit), reason=f"{words}{clamped}")


def _waiting_too_long(seen: Seen, total: Usage) -> list[Pod]:
    patience = _patience(seen, total)
    return [pod for pod in seen.waiting if seen.now - _created(pod, seen.now) > patience]


def _patience(seen: Seen, total: Usage) -> timedelta:
    if total.starts:
        seconds = PATIENCE * total.start_seconds / total.starts
    else:
        said = float(seen.pool.spec.startup_seconds)
        seconds = max(PATIENCE * said, min(UNSEEN * said, UNSEEN_SECONDS))
    return max(LEAST_PATIENCE, timedelta(seconds=seconds))


def _still_exhausted(seen: Seen, total: Usage) -> bool:
    """Nobody waits any more, but it is too soon to try again, and no node has come since."""
    before = _exhausted(seen)
    if before is None or before.status != "True" or before.last_transition_time is None:
        return False
    since = seen.pool.status.out_since or before.last_transition_time
    held = max(HELD, 2 * _patience(seen, total), min(before.last_transition_time - since, LONGEST))
    return not _has_grown(seen) and seen.now - before.last_transition_time < held


def _out_since(seen: Seen, *, exhausted: bool) -> datetime | None:
    """When the first pod was seen to wait in vain; forgotten with the next node, or when nobody tries for long."""
    known, before = seen.pool.status.out_since, _exhausted(seen)
    if exhausted:
        return known if known is not None and not _has_grown(seen) else seen.now.replace(microsecond=0)
    tried = before.last_transition_time if before is not None and before.status == "False" else seen.now
    return None if _has_grown(seen) or tried is None or seen.now - tried > LONGEST else known


def _has_grown(seen: Seen) -> bool:
    return len(seen.nodes) > seen.pool.status.nodes


def _exhausted(seen: Seen) -> Condition | None:
    """The condition as it was."""
    return next((c for c in seen.pool.status.conditions if c.type == "Exhausted"), None)


def _created(pod: Pod, now: datetime) -> datetime:
    stamp = pod.metadata.creation_timestamp
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")) if stamp else now


def _conditions(seen: Seen, pending: int, *, still: bool) -> tuple[Condition, ...]:
    problem = seen.problem
    if problem is None and seen.overlaps:
        words = (
            f"nodes of this pool are also selected by CapacityPool {seen.overlaps}: give each node one pool"
        )
        problem = ("Overlaps", words)
    ready = ("Ready", problem is None, problem or ("Valid", ""))
    words = (
        f"{pending} pods wait for a node of this pool, the longest of them for more than its start-up time"
    )
    if still and not pending:
        words = "pods waited for a node of this pool in vain; it is tried again soon"
    none = bool(pending) or still
    exhausted = ("Exhausted", none, ("NoNodes", words) if none else ("NodesAvailable", ""))
    before = {condition.type: condition for condition in seen.pool.status.conditions}
    kept = [each for kind, each in before.items() if kind not in {"Ready", "Exhausted"}]
    return (
        *(_condition(seen, before.get(kind), kind, holds, why) for kind, holds, why in (ready, exhausted)),
        *kept,
    )


def _condition(
    seen: Seen, before: Condition | None, kind: str, holds: bool, why: tuple[str, str]
) -> Condition:
    status = "True" if holds else "False"
    since = before.last_transition_time if before is not None and before.status == status else None
    return Condition(
        type=kind,
        status="True" if holds else "False",
        observed_generation=seen.pool.metadata.generation,
        last_transition_time=since or seen.now.replace(microsecond=0),
        reason=why[0],
        message=why[1],
    )
