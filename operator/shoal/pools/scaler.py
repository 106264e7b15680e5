"""Sizes one CapacityPool: reads its target, decides by the rules, remembers, resizes, and says so.

The memory is `status.scaling` of the pool, which with two conditions is all that this process writes of it, by
server-side apply. What is sized is released before something else is: its size is given back, and with mode Scale and
Cloud a finalizer makes a deleted pool wait for that, though not for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from shoal.api.base import Condition, Reason
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_scaling import Subject
from shoal.api.capacity_pool_status import ScalingStatus, Sized
from shoal.api.events import Event
from shoal.cluster.cache import Cache
from shoal.errors import Busy, LeaseLost, ScalingError, ShoalError, SizedByOther
from shoal.pools.metrics import PoolMetrics
from shoal.pools.ownership import MANAGER
from shoal.pools.rules import GIVE_UP_AFTER, Decision, decide, release
from shoal.pools.subject import Drivers, identity, keeps_paid_nodes, subject_of
from shoal.pools.wish import wish_of
from shoal.runtime.controller import Key
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter

FINALIZER = "shoal.dev/node-pool"
EVERY_SECONDS = 30.0
SOON_SECONDS = 5.0
CONDITIONS = ("Scaled", "FieldConflict")


class _Step(NamedTuple):
    decision: Decision
    stored: CapacityPool | None
    """None: it has changed meanwhile, and is looked at anew."""
    error: Exception | None = None


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
        step = await self._step(pool, subject, None)
        if step.error is not None and not isinstance(step.error, ScalingError):
            raise step.error
        soon = step.stored is None or step.decision.resize is not None or isinstance(step.error, Busy)
        return SOON_SECONDS if soon else _wait(step.decision)

    async def _release(self, pool: CapacityPool, held: ScalingStatus) -> float | None:
        now, what = self._wall(), identity(pool, held.subject)
        since = min(held.releasing_since or now, now)  # a clock may have been ahead
        decision, stored, error = await self._step(pool, held.subject, since)
        why = decision.why.message
        if stored is None or decision.resize is not None:
            return SOON_SECONDS
        if decision.ended:
            return await self._released(stored, Event("Normal", "Released", f"{what}: {why}"))
        if isinstance(error, ScalingError) and error.reason == "TargetNotFound":
            return await self._released(stored, Event("Normal", "Released", f"{what} is gone"))
        if now - since >= GIVE_UP_AFTER:
            words = f"{what} keeps its size, set it yourself ({held.original_nodes} nodes before): {why}"
            return await self._released(stored, Event("Warning", "NotReleased", words))
        if error is not None and not isinstance(error, ShoalError):
            raise error
        return min(SOON_SECONDS if decision.wait is None else _wait(decision), EVERY_SECONDS)

    async def _step(self, pool: CapacityPool, subject: Subject, since: datetime | None) -> _Step:
        """Read, decide, remember, resize, and say so. `since`: since when it is released."""
        memory = pool.status.scaling
        sent = decision = Decision(memory)
        stored = None
        try:
            driver = self._drivers(pool, subject)
            target = await driver.read()
            now = self._wall()
            if (newest := self._newest(pool)) is None:
                return _Step(decision, None)
            pool = newest
            if memory is None or since is None:
                wish = wish_of(pool, subject, now, self._pools.all())
                decision = decide(wish, memory, target, now, driver.pace)
            else:
                decision = release(memory, target, now, driver.pace)
            if decision.ended:
                await driver.let_go()
                return _Step(decision, self._newest(pool))
            stored = await self._tell(pool, subject, decision, since)
            if stored is not None and decision.resize is not None:
                sent = decision  # what fails before changes nothing of what is remembered
                await driver.resize(decision.resize, target)
                self._resized(stored, "done")
                why = pool.status.recommended.reason if since is None else "it is released"
                self._recorder.record(stored, [Event("Normal", "Resized", f"{decision.why.message}: {why}")])
            return _Step(decision, stored)
        except LeaseLost:
            raise
        except Exception as error:  # broad: whatever a cloud's library raises is to hold no finalizer
            if sent.resize is not None:
                self._resized(pool, error.reason if isinstance(error, ScalingError) else "Unavailable")
            failed, newest = _failed(memory, sent, error), self._newest(stored or pool)
            told = newest and await self._tell(newest, subject, failed, since)
            return _Step(failed, told, error)

    def _newest(self, pool: CapacityPool) -> CapacityPool | None:
        """The pool as it is now; None: what is sized may be another.

        A cloud takes seconds to answer, and operators write the status of a pool in use meanwhile: decided by what it
        was before, nothing could be written to it, and it would never grow, nor say that its cloud does not answer.
        """
        now = self._pools.get(pool.metadata.name)
        return now if now is not None and _sized(now) == _sized(pool) else None

    def _resized(self, pool: CapacityPool, result: str) -> None:
        self._metrics.resizes.labels(pool.spec.scaling.mode, result).inc()

    async def _released(self, pool: CapacityPool, event: Event) -> float | None:
        """Forget what was sized; the next reconcile goes on from there."""
        stored = await self._writer.remove(pool, "scaling")
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

    async def _tell(
        self, pool: CapacityPool, subject: Subject, decision: Decision, since: datetime | None = None
    ) -> CapacityPool | None:
        """Write what is remembered and the conditions, where they changed; the pool as stored, or None."""
        generation, now = pool.metadata.generation, self._wall()
        before = {each.type: each for each in pool.status.conditions}
        conflict = decision.conflict or Reason("NoConflict", "")
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
        scaling = decision.memory and ScalingStatus(
            **{**dict(decision.memory), "subject": subject, "releasing_since": since}
        )
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


def _sized(pool: CapacityPool) -> tuple[object, ...]:
    """What says what of a pool is sized, and how."""
    meta = pool.metadata
    return meta.uid, meta.deletion_timestamp, meta.finalizers, pool.spec, pool.status.scaling


def _failed(memory: Sized | None, sent: Decision, error: Exception) -> Decision:
    """What was sent is forgotten only if it surely was not set."""
    if not isinstance(error, ScalingError):
        words = str(error) if isinstance(error, ShoalError) else repr(error)
        return Decision(sent.memory, unsure=True, why=Reason("Unavailable", words))
    why = Reason(error.reason, str(error))
    return Decision(memory, conflict=why if isinstance(error, SizedByOther) else None, why=why)


def _wait(decision: Decision) -> float:
    wait = timedelta(seconds=EVERY_SECONDS) if decision.wait is None else decision.wait
    return min(EVERY_SECONDS, wait.total_seconds() + 0.1)
