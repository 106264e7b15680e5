"""The workers of a shard: connections, fencing, and the waits of bounded staleness."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal_trainer.contract import Staleness
from shoal_trainer.ps.members import Members, Permits


class WorkerRegistry:
    """The base class of a shard. It holds the shard's lock, its version, and the workers that may push."""

    def __init__(self, staleness: Staleness | None, clock: Callable[[], float]) -> None:
        self.staleness = staleness or Staleness()
        self.version = 0
        self.stopped = 0
        """See `AnswerMeta.stopped`; set by the coordinator."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._clock = clock
        self._members = Members()
        self._permits = Permits()

    @property
    def live_workers(self) -> int:
        """The count passed to `set_live_workers`, or else the number of connected workers; at least 1."""
        return self._members.live

    def connected(self, slot: int) -> bool:
        """Whether a worker of this slot is connected."""
        return self._members.has(slot)

    def set_live_workers(self, count: int | None) -> None:
        """Set the number of live workers, as the coordinator does; None: count connections."""
        with self.lock:
            self._members.reported_live = count
            self.changed.notify_all()

    def connect(self, slot: int, incarnation: int) -> None:
        """Register a connection of an authenticated worker; `Fenced` if its slot has a newer incarnation."""
        with self.lock:
            self._members.connect(slot, incarnation)

    def disconnect(self, slot: int) -> None:
        """Unregister a connection."""
        with self.lock:
            if not self._members.disconnect(slot):
                self._disconnected(slot)
                self._expect_no_push(slot)

    def fence(self, slot: int, minimum_incarnation: int) -> None:
        """Refuse older incarnations of a slot from now on, and stop waiting for their gradients."""
        with self.lock:
            if self._members.fence(slot, minimum_incarnation):
                self._expect_no_push(slot)

    def leave(self, slot: int, incarnation: int) -> None:
        """Refuse pushes of a worker that has left, until it connects again."""
        with self.lock:
            self._members.leave(slot, incarnation)
            self._expect_no_push(slot)

    def wait_admitted(self, slot: int, base: int, timeout: float) -> None:
        """Bounded staleness: wait, at most `timeout` seconds, while this push would make another gradient too stale.

        `base`: the version on which the gradient was computed. Until the push is applied, or `push_ended` is called,
        it counts as applied: several pushes that are received at once must not together exceed the bound.
        """
        if (bound := self.staleness.max) is None:
            return
        with self.changed:
            deadline = self._clock() + timeout
            if self._permits.arrive(slot, base):
                self.changed.notify_all()
            try:
                while self._permits.waits(slot) and not self._permits.admits(base, self.version, bound):
                    if (remaining := deadline - self._clock()) <= 0:
                        # A worker that blocked this push until its timeout must not block the next ones as well.
                        self._permits.give_up(slot, self.version, bound)
                        return
                    self.changed.wait(remaining)
            finally:
                self._permits.leave(slot)

    def push_ended(self, slot: int) -> None:
        """The admitted push was applied or refused, or its connection broke."""
        if self.staleness.max is not None:
            with self.changed:
                self._permits.ended(slot)
                self.changed.notify_all()

    def _expect_no_push(self, slot: int) -> None:
        """Stop waiting for a worker's gradient, under the lock: other pushes may be admitted now."""
        self._permits.forget(slot)
        self.changed.notify_all()

    def _disconnected(self, slot: int) -> None:
        """Called under the lock when a worker's last connection has ended."""
        raise NotImplementedError
