"""A work queue as in client-go, with priorities, on asyncio.

A key is never processed twice concurrently. Additions of a waiting key coalesce; an addition of a key in process queues
it again afterwards. Failures back off with jitter; disruptions precede resyncs, but no key waits for ever: now and then
it is the turn of the one that waited for longest. Each key has at most one timer: a newer delay replaces the earlier.

A key whose processing is long may `rest` afterwards: what changes meanwhile is answered together, and the events of one
large object do not keep the loop from those of the others. Urgent changes wait for a small part of it only, in which a
wave of them gathers, and timers not at all.

A change that nobody waits for, as that a pod gets on, brings others: it waits `GATHER_SECONDS` for them, unless the key
is processed before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from enum import IntEnum
from typing import Generic, TypeVar

from shoal.cluster.clock import loop_time
from shoal.errors import ShoalError
from shoal.runtime.backoff import pause

K = TypeVar("K", bound=Hashable)

logger = logging.getLogger(__name__)

LONGEST_RETRY = 60.0
TURNS = 2
"""Of the event loop between two keys: a request is begun in the first, and aiohttp writes it in the second."""
URGENT_SHARE = 0.1
"""Of a rest, for urgent changes: as long as the processing took, so that a wave of them has half of the loop."""
GATHER_SECONDS = 0.1
"""For which a change waits that nobody waits for. A scheduler writes of the pods of a small job within that time."""


class Priority(IntEnum):
    """Lower values go first."""

    URGENT = 0  # a pod or its node is terminating
    NORMAL = 1  # something changed
    CALM = 2  # something changed that nobody waits for
    ROUTINE = 3  # a timer, a relist, telemetry


TURN_OF_THE_OLDEST = 4
"""Of so many keys, one is that which has waited for longest, whatever its priority: what changes all the time does not
keep it, and what is urgent waits for it only, also behind all the jobs of a leader that begins."""


class WorkQueue(Generic[K]):
    """Keys to process. Times are of the running loop's clock; `on_taken` is told how long each key waited."""

    def __init__(self, on_taken: Callable[[float], None] = lambda _seconds: None) -> None:
        self._on_taken = on_taken
        self._since: dict[K, float] = {}
        """When each was queued that waits, the oldest first; also of keys in process that are queued again."""
        self._waited: dict[K, float] = {}
        self._taken = 0
        self._lanes: dict[Priority, dict[K, None]] = {priority: {} for priority in Priority}
        """The waiting keys of each priority, in order."""
        self._waiting: dict[K, Priority] = {}
        self._busy: set[K] = set()
        self._again: dict[K, Priority] = {}
        self._failures: dict[K, int] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._rests: dict[K, asyncio.TimerHandle] = {}
        self._deep: set[K] = set()
        """Keys in the part of their rest for which urgent changes wait, too."""
        self._after_rest: dict[K, Priority] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """Number of waiting keys."""
        return len(self._waiting)

    def oldest_seconds(self) -> float:
        """How long the key has waited that waits for longest; 0: none waits."""
        return max((loop_time() - since for since in self._since.values()), default=0.0)

    def add(self, key: K, priority: Priority = Priority.NORMAL) -> None:
        """Queue the key once, however often it is added."""
        if key in self._deep or (key in self._rests and priority is not Priority.URGENT):
            self._after_rest[key] = min(priority, self._after_rest.get(key, priority))
        elif priority is Priority.CALM and key not in self._busy:
            self._gather(key)
        else:
            self._queue(key, priority)

    def _gather(self, key: K) -> None:
        timer = self._timers.get(key)
        if key not in self._waiting and (timer is None or timer.when() > loop_time() + GATHER_SECONDS):
            self._begin_timer(key, GATHER_SECONDS, Priority.CALM)

    def rest(self, key: K, seconds: float) -> None:
        """From now on, changes wait for so long; urgent ones for a part of it."""
        if (earlier := self._rests.pop(key, None)) is not None:
            earlier.cancel()
        self._deep.add(key)
        loop, deep = asyncio.get_running_loop(), URGENT_SHARE * seconds
        self._rests[key] = loop.call_later(deep, self._half_rested, key, seconds - deep)

    def _half_rested(self, key: K, left: float) -> None:
        self._deep.remove(key)
        self._rests[key] = asyncio.get_running_loop().call_later(left, self._rested, key)
        if self._after_rest.get(key) is Priority.URGENT:
            self._queue(key, self._after_rest.pop(key))

    def _rested(self, key: K) -> None:
        del self._rests[key]
        if (priority := self._after_rest.pop(key, None)) is not None:
            self._queue(key, priority)

    def _queue(self, key: K, priority: Priority) -> None:
        known = self._again if key in self._busy else self._waiting
        before = known.get(key)
        if before is not None and before <= priority:
            return
        known[key] = priority
        self._since.setdefault(key, loop_time())
        if known is self._waiting:
            if before is not None:
                del self._lanes[before][key]
            self._lanes[priority][key] = None
            self._filled.set()

    def waited(self, key: K) -> float:
        """How long the key that is being processed had waited."""
        return self._waited.get(key, 0.0)

    def add_after(self, key: K, delay: float) -> None:
        """Queue the key in `delay` seconds; replaces an earlier delay."""
        self._begin_timer(key, delay, Priority.ROUTINE)

    def _begin_timer(self, key: K, delay: float, priority: Priority) -> None:
        self._cancel_timer(key)
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(max(0.0, delay), self._timer, key, priority)

    async def work(self, reconcile: Callable[[K], Awaitable[float | None]]) -> None:
        """Process keys until cancelled. What a key sets off is sent before the next one is processed.

        `reconcile` returns the seconds until the key is queued again, or None.
        """
        while True:
            key = await self._take()
            self._cancel_timer(key)
            self._after_rest.pop(key, None)
            try:
                delay = await reconcile(key)
            except Exception as error:  # broad: an error of one job must not stop the queue
                self._fail(key, error)
            else:
                self._failures.pop(key, None)
                if delay is not None:
                    self.add_after(key, delay)
            finally:
                self._busy.discard(key)
                self._waited.pop(key, None)
                if (priority := self._again.pop(key, None)) is not None:
                    self.add(key, priority)
            for _ in range(TURNS):
                await asyncio.sleep(0)

    def _fail(self, key: K, error: Exception) -> None:
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay = pause(count, error, LONGEST_RETRY)
        expected = isinstance(error, ShoalError)
        logger.warning(
            "%s: %s; retrying in %.2f s",
            key,
            error or repr(error),
            delay,
            exc_info=None if expected else error,
        )
        self.add_after(key, delay)

    async def _take(self) -> K:
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        self._taken += 1
        oldest = self._taken % TURN_OF_THE_OLDEST == 0
        lane = self._since if oldest else next(filter(None, self._lanes.values()))
        key = next(key for key in lane if key in self._waiting)
        del self._lanes[self._waiting.pop(key)][key]
        self._busy.add(key)
        self._waited[key] = loop_time() - self._since.pop(key)
        self._on_taken(self._waited[key])
        return key

    def _timer(self, key: K, priority: Priority) -> None:
        del self._timers[key]
        self._queue(key, priority)

    def _cancel_timer(self, key: K) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
