"""Sizes one CapacityPool: reads its target, decides by the rules, remembers, resizes, and says so.

The memory is `status.scaling` of the pool, which with two conditions is all that this process writes of it, by
server-side apply. What is sized is released before something else is: its size is given back, and with mode Scale and
Cloud a finalizer makes a deleted pool wait for that, though not for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from shoal.api.base import Condition
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_scaling import Subject
from shoal.api.capacity_pool_status import ScalingStatus
from shoal.api.events import Event
from shoal.cluster.cache import Cache
from shoal.errors import Busy, ScalingError, SizedByOther, Unavailable
from shoal.pools.metrics import PoolMetrics
from shoal.pools.ownership import MANAGER
from shoal.pools.record import memory_of, scaling_of
from shoal.pools.rules import GIVE_UP_AFTER, Decision, Finding, Memory, Wish, decide, release
from shoal.pools.subject import Drivers, identity, keeps_paid_nodes, subject_of
from shoal.pools.wish import other_holder, wish_of
from shoal.runtime.controller import Key
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter

FINALIZER = "shoal.dev/node-pool"
EVERY_SECONDS = 30.0
SOON_SECONDS = 5.0
CONDITIONS = ("Scaled", "FieldConflict")


class PoolScaler:
    """Called with the key of a pool; returns the seconds until the next time."""

    def __init__(
        self,
        pools: Cache[CapacityPool],
        drivers: Drivers,
        writer: StatusWriter[CapacityPool],
        recorder: Recorder,
        metrics: PoolMetrics,
        *,
        wall: Callable[[], datetime],
    ) -> None:
        self._pools = pools
        self._drivers = drivers
        self._writer = writer
        self._recorder = recorder
        self._metrics = metrics
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
        if keeps_paid_nodes(wanted) and FINALIZER not in (known := pool.metadata.finalizers):
            if (stored := await self._writer.write_finalizers(pool, [*known, FINALIZER])) is None:
                return SOON_SECONDS
            pool = stored
        return await self._size(pool, wanted)

    async def _size(self, pool: CapacityPool, subject: Subject) -> float:
        driver = self._drivers(pool, subject)
        before = None if pool.status.scaling is None else memory_of(pool.status.scaling)
        try:
            target = await driver.read()
        except ScalingError as error:
            await self._tell(pool, subject, _failed(before, error))
            return EVERY_SECONDS
        except Unavailable as error:
            why = Finding("Unavailable", str(error))
            await self._tell(pool, subject, Decision(before, unsure=True, why=why))
            raise
        now = self._wall()
        wish = wish_of(pool, subject, now)
        if (other := other_holder(pool, subject, self._pools.all())) is not None:
            words = (
                f"CapacityPool {other} sizes {identity(pool, subject)}: give each pool a target of its own"
            )
            wish = Wish(wish.nodes, wish.limit, Finding("SharedTarget", words))
        decision = decide(wish, before, target, now, driver.pace)
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
        memory = memory_of(held)
        decision = Decision(memory)
        try:
            driver = self._drivers(pool, held.subject)
            target = await driver.read()
            decision = release(memory, target, now, driver.pace)
            if decision.ended:
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
            decision = replace(decision, unsure=True, why=Finding("Unavailable", str(error)))
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
        if any(each.type in CONDITIONS for each in pool.status.conditions):
            if (stored := await self._writer.apply(pool, {}, MANAGER)) is None:
                return SOON_SECONDS
            pool = stored
        if FINALIZER in (known := pool.metadata.finalizers):
            others = [each for each in known if each != FINALIZER]
            if await self._writer.write_finalizers(pool, others) is None:
                return SOON_SECONDS
        return None

    def _resized(self, pool: CapacityPool, words: str) -> None:
        self._metrics.resizes.labels(pool.spec.scaling.mode, "done").inc()
        self._recorder.record(pool, [Event("Normal", "Resized", words)])

    async def _tell(
        self, pool: CapacityPool, subject: Subject, decision: Decision, since: datetime | None = None
    ) -> CapacityPool | None:
        """Write what is remembered and the conditions, where they changed; the pool as stored, or None."""
        generation, now = pool.metadata.generation, self._wall()
        before = {each.type: each for each in pool.status.conditions}
        conflict = decision.conflict or Finding("NoConflict", "")
        conditions = [
            Condition.after(
                before.get(kind), kind, holds, why.reason, why.message, generation=generation, now=now
            )
            for kind, holds, why in (
                ("Scaled", decision.scaled, decision.why),
                ("FieldConflict", decision.conflict is not None, conflict),
            )
        ]
        if decision.unsure and (known := before.get("FieldConflict")) is not None:
            conditions[1] = known
        scaling = scaling_of(subject, decision.memory, since)
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


def _failed(memory: Memory | None, error: ScalingError) -> Decision:
    """Nothing was done: what was about to be set is forgotten."""
    why = Finding(error.reason, str(error))
    return Decision(memory, conflict=why if isinstance(error, SizedByOther) else None, why=why)


def _wait(decision: Decision) -> float:
    wait = timedelta(seconds=EVERY_SECONDS) if decision.wait is None else decision.wait
    return min(EVERY_SECONDS, wait.total_seconds() + 0.1)
