"""The status of a CapacityPool from what is seen of nodes, jobs and other pools: pure.

Every count is made once: a job counts its own use in its one status write (`status.poolUsage`), and the pool sums up
(`counted.py`). How long there were nodes to be had is counted in `stock`: of the time since the last write, whose state
that status has, up to `countedUntil` of this one (`stock.py`). Both lose weight with time, in the same write. What
`shoal-pools` writes (`scaling`, and conditions of its own) is kept.

Operators that are scoped to namespaces share a pool: each writes what its own jobs have and want, keeps what the others
wrote, and sums up. A write is refused if another one came first, so none is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from shoal.api.base import Condition, Reason
from shoal.api.capacity_pool_status import (
    LACKS_ACCELERATOR,
    CapacityPoolStatus,
    MeasuredInterruptions,
    MeasuredStartup,
    OperatorShare,
    Recommendation,
    UnfulfilledWaits,
)
from shoal.controllers.capacitypool import stock
from shoal.controllers.capacitypool.counted import Counted, Sums, count, sums_of
from shoal.controllers.capacitypool.members import in_words
from shoal.controllers.capacitypool.seen import Seen

NAMED_JOBS = 3
UNREADABLE = (
    "nodes cannot be read by {}, or have not been yet, so nobody knows which are in use: if that lasts, let it list "
    "nodes (scope.nodes)"
)
OVERLAPS = (
    "nodes of this pool are also selected by {}, which is older: give each node one pool; what runs here stays, and no "
    "plan adds to it"
)
RENEWED = timedelta(minutes=5)
"""Interval at which an operator repeats what it said, so that others know that it runs."""


def measure(seen: Seen) -> CapacityPoolStatus:
    """The pool's status."""
    pool, before = seen.pool, seen.pool.status
    counted = count(pool, seen.jobs, seen.operator, seen.now, seen.unread)
    known = sums_of(before)
    patience = stock.patience(seen, known.plus(counted.fresh))
    shares = _shares(seen, counted, patience)
    pending = sum(share.pending for share in shares)
    still = stock.still_exhausted(seen, patience)
    nodes = len(seen.nodes) if seen.nodes_readable else before.nodes
    waiting = sum(share.waiting for share in shares)
    waiting_nodes = sum(
        share.waiting if share.waiting_nodes is None else share.waiting_nodes for share in shares
    )
    status = before.model_copy(
        update={
            "observed_generation": pool.metadata.generation,
            "nodes": nodes,
            "used": min(nodes, sum(share.used for share in shares)),
            "waiting": waiting,
            "waiting_nodes": waiting_nodes if waiting_nodes != waiting else None,
            "unfulfilled": UnfulfilledWaits(waits=before.unfulfilled.waits, pending=pending),
            "out_since": stock.out_since(seen, exhausted=bool(pending) or still),
            "recommended": _recommended(shares, pool.spec.limits.nodes),
            "shares": shares,
            "counted": counted.parts,
            "retired_until": counted.retired_until,
            "overlaps": seen.overlaps,
            "conditions": _conditions(seen, nodes, shares, pending, still=still),
        }
    )
    if status == before and not stock.is_due(seen):
        return before
    sums = known.plus(counted.fresh, stock.weight(seen)).plus(stock.late_start(seen, patience))
    measured = {
        "sums": sums.text(),
        "startup": _startup(sums),
        "interruptions": _interruptions(sums),
        "unfulfilled": UnfulfilledWaits(waits=round(sums.unfulfilled), pending=pending),
        "stock": stock.count(seen, patience, status),
    }
    return status.model_copy(update=measured)


def _shares(seen: Seen, counted: Counted, patience: timedelta) -> tuple[OperatorShare, ...]:
    """What the operators say: this one now, the others before."""
    before = {share.operator: share for share in seen.pool.status.shares}
    nodes, reason = _wanted(seen)
    said = [share for share in before.values() if share.operator not in {seen.operator, *counted.moved}]
    others = [
        share if share.runs(seen.now) else _left(share)
        for share in said
        if share.runs(seen.now) or share.used
    ]
    workers = len(seen.waiting) - seen.servers_waiting
    fresh = OperatorShare(
        operator=seen.operator,
        used=seen.used,
        serving=seen.serving,
        full=seen.full,
        waiting=workers + seen.server_nodes,
        waiting_nodes=seen.more_nodes + seen.server_nodes if seen.more_nodes != workers else None,
        pending=len(stock.waiting_too_long(seen, patience)),
        nodes=nodes,
        reason=reason,
        blind=not seen.nodes_readable,
        at=seen.now.replace(microsecond=0),
    )
    last = before.get(seen.operator)
    if last is not None and last == fresh.model_copy(update={"at": last.at}):
        fresh = fresh if abs(seen.now - last.at) >= RENEWED else last
    return tuple(sorted([*others, fresh], key=lambda share: share.operator))


def _left(share: OperatorShare) -> OperatorShare:
    """What an old share still says: its jobs had these nodes, and nobody else sees whether they do."""
    reason = f"{share.used} in use by jobs of {share.operator}, which does not run"
    return OperatorShare(
        operator=share.operator,
        used=share.used,
        serving=share.serving,
        full=share.full,
        nodes=share.used,
        reason=reason,
        at=share.at,
    )


def _startup(total: Sums) -> MeasuredStartup:
    mean, deviation = stock.start(total)
    warm = total.warm_start_seconds / total.warm_starts if total.warm_starts else 0.0
    return MeasuredStartup(
        seconds=round(mean + warm) if total.starts else 0,
        deviation_seconds=round(deviation),
        seen=round(total.starts),
        warm_seconds=round(warm),
        warm_seen=round(total.warm_starts),
    )


def _interruptions(total: Sums) -> MeasuredInterruptions:
    hours = total.node_seconds / 3600
    return MeasuredInterruptions(
        per_hour=f"{total.interruptions / hours:.4g}" if hours > 0 else None,
        seen=round(total.interruptions),
        node_hours=f"{hours:.4g}",
        shocks=round(total.shocks),
        in_shocks=round(total.in_shocks),
        at_shocks=round(total.at_shocks),
        together=f"{total.in_shocks / total.at_shocks:.3g}" if total.at_shocks else None,
    )


def _wanted(seen: Seen) -> tuple[int, str]:
    """The nodes that the jobs that are seen have, or are to have, and whose they are.

    No worker is to have one that lacks its accelerator: it costs, and the next one, once it is gone, may be good.
    """
    lacks = seen.problem is not None and seen.problem.reason == LACKS_ACCELERATOR
    held = {} if lacks else seen.held
    most = sorted(held.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(most) - NAMED_JOBS} more jobs" if len(most) > NAMED_JOBS else ""
    words = [", ".join(f"{count} for {job}" for job, count in most[:NAMED_JOBS]) + more]
    planned, working = sum(held.values()), seen.used - seen.apart
    needed = min(planned, seen.worker_nodes)
    if needed < planned:
        words.append("several of them on a node")
    if working > planned:
        words.append(f"{working} in use")
    if servers := seen.apart + seen.server_nodes:
        words.append(f"{servers} for parameter servers")
    return max(needed, working) + servers, ", ".join(filter(None, words))


def _recommended(shares: Iterable[OperatorShare], limit: int) -> Recommendation:
    """What all jobs together have and are to have, at most the pool's limit."""
    asking = [share for share in shares if share.nodes > 0]
    nodes = sum(share.nodes for share in asking)
    if not asking:
        return Recommendation(nodes=0, reason="no job plans to use it")
    clamped = f"; the limit is {limit}" if nodes > limit else ""
    words = ", ".join(share.reason for share in asking)
    return Recommendation(nodes=min(nodes, limit), reason=f"{words}{clamped}")


def _conditions(
    seen: Seen, nodes: int, shares: Iterable[OperatorShare], pending: int, *, still: bool
) -> tuple[Condition, ...]:
    problem = seen.problem
    blind = [] if problem is not None else [share.operator for share in shares if share.blind]
    if problem is None and seen.overlaps:
        older = f"CapacityPool {seen.overlaps.name} ({in_words(seen.overlaps.node_selector)})"
        problem = Reason("Overlaps", OVERLAPS.format(older))
    ready: tuple[str, bool | None, Reason] = ("Ready", problem is None, problem or Reason("Valid", ""))
    if blind:  # a recommendation without the nodes in use is none, whoever writes it
        ready = ("Ready", None, Reason("NodesUnreadable", UNREADABLE.format(", ".join(blind))))
    words = (
        f"{pending} pods wait for a node of this pool, the longest of them for more than its start-up time"
    )
    if still and not pending:
        words = "pods waited for a node of this pool in vain; it is tried again soon"
    if not nodes and seen.pool.spec.node_selector:
        labels = in_words(seen.pool.spec.node_selector)
        words += f"; no node has the labels of spec.nodeSelector ({labels}): if some should, label them"
    none = bool(pending) or still
    exhausted = ("Exhausted", none, Reason("NoNodes", words) if none else Reason("NodesAvailable", ""))
    before = {condition.type: condition for condition in seen.pool.status.conditions}
    kept = [each for kind, each in before.items() if kind not in {"Ready", "Exhausted"}]
    generation = seen.pool.metadata.generation
    ours = (
        Condition.after(before.get(kind), kind, holds, *why, generation=generation, now=seen.now)
        for kind, holds, why in (ready, exhausted)
    )
    return (*ours, *kept)
