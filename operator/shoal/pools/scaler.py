"""Sizes one CapacityPool: reads its target, decides by the rules, remembers, resizes, and says so.

The memory is `status.scaling` of the pool, which with two conditions is all that this process writes of it, by
server-side apply. What is sized is released before something else is: its size is given back, and with mode Scale and
Cloud a finalizer makes a deleted pool wait for that, though not for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from shoal.api.base import Condition
from shoal.api.capacity_pool import CapacityPool, ScalingStatus, Subject
from shoal.api.events import Event
from shoal.cluster.cache import Cache
from shoal.errors import Busy, ScalingError, SizedByOther, Unavailable
from shoal.pools.metrics import PoolMetrics
from shoal.pools.ownership import MANAGER
from shoal.pools.rules import GIVE_UP_AFTER, Decision, Finding, Memory, Wish, decide, release
from shoal.pools.subject import Drivers, identity, keeps_paid_nodes, subject_of
from shoal.runtime.controller import Key
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter

FINALIZER = "shoal.dev/node-pool"
EVERY_SECONDS = 30.0
SOON_SECONDS = 5.0
CONDITIONS = ("Scaled", "FieldConflict")


class PoolScaler:
    """Called with the key of a pool; returns the seconds until the next time.

    `operator_alive`: whether the operator writes recommendations now.
    """

    def __init__(
        self,
        pools: Cache[CapacityPool],
        drivers: Drivers,
        writer: StatusWriter[CapacityPool],
        recorder: Recorder,
        metrics: PoolMetrics,
        *,
        operator_alive: Callable[[], bool],
        wall: Callable[[], datetime],
    ) -> None:
        self._pools = pools
        self._drivers = drivers
        self._writer = writer
        self._recorder = recorder
        self._metrics = metrics
        self._operator_alive = operator_alive
        self._wall = wall

    async def __call__(self, key: Key) -> float | None:
        """Reconcile one pool."""
        pool = self._pools.get(key[1])
        if pool is None:
            return None
        wanted = None if pool.metadata.deletion_timestamp else subject_of(pool.spec.scaling)
        held = pool.status.scaling
        if held is not None and (wanted is None or identity(pool, held.subject) != identity(pool, wanted)):
            return await self._release(pool, held)
        if wanted is None:
            return await self._leave(pool)
        if keeps_paid_nodes(wanted) and FINALIZER not in pool.metadata.finalizers:
            if (stored := await self._writer.apply_finalizers(pool, [FINALIZER], MANAGER)) is None:
                return SOON_SECONDS
            pool = stored
        return await self._size(pool, wanted)

    async def _size(self, pool: CapacityPool, subject: Subject) -> float:
        driver = self._drivers(pool, subject)
        before = None if pool.status.scaling is None else _memory(pool.status.scaling)
        try:
            target = await driver.read()
        except ScalingError as error:
            await self._tell(pool, subject, _failed(before, error))
            return EVERY_SECONDS
        except Unavailable as error:
            await self._tell(pool, subject, Decision(before, why=Finding("Unavailable", str(error))))
            raise
        wish = _wish(pool, subject, alive=self._operator_alive())
        if (other := _other_holder(pool, subject, self._pools.all())) is not None:
            words = (
                f"CapacityPool {other} sizes {identity(pool, subject)}: give each pool a target of its own"
            )
            wish = Wish(wish.nodes, wish.limit, Finding("SharedTarget", words))
        decision = decide(wish, before, target, self._wall(), driver.pace)
        stored = await self._tell(pool, subject, decision)
        if stored is None:
            return SOON_SECONDS
        if decision.resize is None:
            return _wait(decision)
        try:
            await driver.resize(decision.resize, target)
        except ScalingError as error:
            self._metrics.resizes.labels(pool.spec.scaling.mode, error.reason).inc()
            await self._tell(stored, subject, _failed(before, error))
            return SOON_SECONDS if isinstance(error, Busy) else EVERY_SECONDS
        self._resized(stored, f"{decision.why.message}: {pool.status.recommended.reason}")
        return SOON_SECONDS

    async def _release(self, pool: CapacityPool, held: ScalingStatus) -> float | None:
        now = self._wall()
        since = held.releasing_since or now
        what = identity(pool, held.subject)
        memory = _memory(held)
        decision = Decision(memory)
        try:
            driver = self._drivers(pool, held.subject)
            target = await driver.read()
            decision = release(memory, target, now, driver.pace)
            if decision.ended:
                if decision.conflict is None:
                    await driver.let_go()
                return await self._released(
                    pool, Event("Normal", "Released", f"{what}: {decision.why.message}")
                )
            if await self._tell(pool, held.subject, decision, since) is None:
                return SOON_SECONDS
            if decision.resize is not None:
                await driver.resize(decision.resize, target)
                self._resized(pool, f"{decision.why.message}: {what} is released")
                return SOON_SECONDS
        except ScalingError as error:  # nothing was done
            if error.reason == "TargetNotFound":
                return await self._released(pool, Event("Normal", "Released", f"{what} is gone"))
            decision = _failed(memory, error)
        except Unavailable as error:  # it may have been done
            decision = replace(decision, why=Finding("Unavailable", str(error)))
        if now - since >= GIVE_UP_AFTER:
            words = f"{what} keeps its size, set it yourself ({memory.original} nodes before): {decision.why.message}"
            return await self._released(pool, Event("Warning", "NotReleased", words))
        await self._tell(pool, held.subject, decision, since)
        return min(SOON_SECONDS if decision.wait is None else _wait(decision), EVERY_SECONDS)

    async def _released(self, pool: CapacityPool, event: Event) -> float | None:
        """Forget what was sized; the next reconcile goes on from there."""
        stored = await self._writer.apply(pool, {}, MANAGER)
        if stored is None:
            return SOON_SECONDS
        self._recorder.record(stored, [event])
        return await self._leave(stored) if stored.metadata.deletion_timestamp else 0.0

    async def _leave(self, pool: CapacityPool) -> float | None:
        """Nothing is sized: nothing of this process stays in the pool."""
        if any(condition.type in CONDITIONS for condition in pool.status.conditions):
            if (stored := await self._writer.apply(pool, {}, MANAGER)) is None:
                return SOON_SECONDS
            pool = stored
        if FINALIZER in pool.metadata.finalizers:
            await self._writer.apply_finalizers(pool, [], MANAGER)
        return None

    def _resized(self, pool: CapacityPool, words: str) -> None:
        self._metrics.resizes.labels(pool.spec.scaling.mode, "done").inc()
        self._recorder.record(pool, [Event("Normal", "Resized", words)])

    async def _tell(
        self, pool: CapacityPool, subject: Subject, decision: Decision, since: datetime | None = None
    ) -> CapacityPool | None:
        """Write what is remembered and the conditions, where they changed; the pool as stored, or None."""
        now = self._wall().replace(microsecond=0)
        before = {condition.type: condition for condition in pool.status.conditions}
        conflict = decision.conflict or Finding("NoConflict", "")
        conditions = [
            _condition(pool, before, "Scaled", decision.scaled, decision.why, now),
            _condition(pool, before, "FieldConflict", decision.conflict is not None, conflict, now),
        ]
        scaling = _status(subject, decision.memory, since)
        if scaling == pool.status.scaling and all(before.get(c.type) == c for c in conditions):
            return pool
        fields: dict[str, Any] = {
            "conditions": [c.model_dump(mode="json", by_alias=True) for c in conditions]
        }
        if scaling is not None:
            fields["scaling"] = scaling.model_dump(mode="json", by_alias=True, exclude_none=True)
        stored = await self._writer.apply(pool, fields, MANAGER)
        was = before.get("FieldConflict")
        if stored is not None and (was.status if was else "False") != conditions[1].status:
            event = Event("Normal", "ConflictResolved", "nobody else sizes it any more")
            if decision.conflict is not None:
                event = Event("Warning", "FieldConflict", conflict.message)
            self._recorder.record(stored, [event])
        return stored


def _memory(scaling: ScalingStatus) -> Memory:
    return Memory(
        original=scaling.original_nodes,
        nodes=scaling.nodes,
        setting=scaling.setting,
        resized_at=scaling.resized_at,
        lower_since=scaling.lower_since,
        highest=scaling.highest,
    )


def _status(subject: Subject, memory: Memory | None, since: datetime | None) -> ScalingStatus | None:
    if memory is None:
        return None
    return ScalingStatus(
        subject=subject,
        original_nodes=memory.original,
        nodes=memory.nodes,
        setting=memory.setting,
        resized_at=memory.resized_at,
        lower_since=memory.lower_since,
        highest=memory.highest,
        releasing_since=since,
    )


def _failed(memory: Memory | None, error: ScalingError) -> Decision:
    """Nothing was done: what was about to be set is forgotten."""
    why = Finding(error.reason, str(error))
    return Decision(memory, conflict=why if isinstance(error, SizedByOther) else None, why=why)


def _wish(pool: CapacityPool, subject: Subject, *, alive: bool) -> Wish:
    """What is recommended, and whether it can be relied on."""
    status = pool.status
    nodes, limit, problem = status.recommended.nodes, pool.spec.limits.nodes, None
    if subject.buffer is not None:
        nodes = max(0, nodes - status.used - status.waiting)
    ready = next((condition for condition in status.conditions if condition.type == "Ready"), None)
    if not alive:
        problem = Finding("Stale", "the operator does not run, so the recommendation may be an old one")
    elif status.observed_generation != pool.metadata.generation:
        problem = Finding("Stale", "the operator has not read the pool's spec yet")
    elif ready is None or ready.status != "True":
        problem = Finding("PoolNotReady", "see the condition Ready")
    return Wish(nodes, limit, problem)


def _other_holder(pool: CapacityPool, subject: Subject, pools: Iterable[CapacityPool]) -> str | None:
    """Another pool that sizes the same: the one that holds it, else the first by name."""
    mine, name = identity(pool, subject), pool.metadata.name
    for other in pools:
        theirs = other.status.scaling.subject if other.status.scaling else subject_of(other.spec.scaling)
        if other.metadata.uid == pool.metadata.uid or theirs is None or identity(other, theirs) != mine:
            continue
        held, holds = pool.status.scaling is not None, other.status.scaling is not None
        if holds > held or (holds == held and other.metadata.name < name):
            return other.metadata.name
    return None


def _condition(
    pool: CapacityPool, before: dict[str, Condition], kind: str, holds: bool, why: Finding, now: datetime
) -> Condition:
    status = "True" if holds else "False"
    was = before.get(kind)
    return Condition(
        type=kind,
        status="True" if holds else "False",
        observed_generation=pool.metadata.generation,
        last_transition_time=was.last_transition_time if was is not None and was.status == status else now,
        reason=why.reason,
        message=why.message,
    )


def _wait(decision: Decision) -> float:
    wait = timedelta(seconds=EVERY_SECONDS) if decision.wait is None else decision.wait
    return min(EVERY_SECONDS, wait.total_seconds() + 0.1)
