"""The workers of a shard: connections, fencing, and the waits of bounded staleness and of rounds.

It shares the shard's lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shoal_trainer.errors import Fenced
from shoal_trainer.ps.admission import Permits
from shoal_trainer.ps.contents import Worker
from shoal_trainer.ps.rounds import Rounds

log = logging.getLogger(__name__)


class Workers:
    """Who may push to a shard, and when. Thread-safe.

    `bound`: of the staleness, in versions; None: no push waits. `version`: that of the shard. `changed`: over the
    shard's lock; notified when a push that waits may be admitted; `released`: over the same lock, for rounds.
    """

    def __init__(
        self,
        bound: int | None,
        version: Callable[[], int],
        changed: threading.Condition,
        released: threading.Condition,
        clock: Callable[[], float],
    ) -> None:
        self._bound = bound
        self._version = version
        self._changed = changed
        self._released = released
        self._clock = clock
        self._permits = Permits()
        self._held_up, self._seen_at = 0.0, clock()
        """For how long workers that computed have held up the others' pushes, as of when this was last looked at."""
        self.rounds = Rounds()
        self._reported_live: int | None = None
        self._newest: dict[int, int] = {}
        """The oldest incarnation of each slot that may push."""
        self._left: dict[int, int] = {}
        """The incarnation of each slot that has left."""
        self._connections: dict[int, int] = {}
        self._non_finite: dict[int, int] = {}
        """The newest incarnation of each slot for which non-finite values were logged."""

    @property
    def live(self) -> int:
        """The count passed to `set_live`, or else the number of connected workers; at least 1."""
        return max(1, len(self._connections) if self._reported_live is None else self._reported_live)

    def set_live(self, count: int | None) -> None:
        """Set the number of live workers, as the coordinator does; None: count connections."""
        with self._changed:
            self._reported_live = count
            self._changed.notify_all()

    def connected(self, slot: int) -> bool:
        """Whether a worker of this slot is connected."""
        return slot in self._connections

    def connect(self, slot: int, incarnation: int) -> None:
        """Register a connection of an authenticated worker; `Fenced` as in `check`.

        Older incarnations of the slot are fenced.
        """
        with self._changed:
            self.check(slot, incarnation)
            self._newest[slot] = incarnation
            self._connections[slot] = self._connections.get(slot, 0) + 1

    def disconnect(self, slot: int) -> bool:
        """Unregister a connection; returns whether it was the slot's last one."""
        with self._changed:
            remaining = self._connections.pop(slot, 0) - 1
            if remaining > 0:
                self._connections[slot] = remaining
                return False
            self.expect_no_push(slot)
            return True

    def check(self, slot: int, incarnation: int) -> None:
        """`Fenced` if the slot has a newer incarnation, or if this worker has left."""
        if incarnation == self._left.get(slot):
            raise Fenced(f"worker {slot}-{incarnation} has left: its leases are reassigned")
        if incarnation < (newest := self._newest.get(slot, 0)):
            raise Fenced(
                f"slot {slot} has incarnation {newest}; incarnation {incarnation} may no longer write"
            )

    def fence(self, slot: int, minimum_incarnation: int) -> None:
        """Refuse older incarnations of a slot from now on, and stop waiting for their gradients."""
        with self._changed:
            before = self._newest.get(slot, 0)
            self._newest[slot] = max(minimum_incarnation, before)
            if minimum_incarnation > before:
                self.expect_no_push(slot)

    def leave(self, slot: int, incarnation: int) -> None:
        """Refuse a worker that has left: it never comes back."""
        with self._changed:
            if self._left.get(slot) != incarnation:
                self._left[slot] = incarnation
                self.expect_no_push(slot)

    def refuses(self, worker: Worker) -> bool:
        """Whether `check` would raise."""
        slot, incarnation = worker
        return incarnation == self._left.get(slot) or incarnation < self._newest.get(slot, 0)

    def refused(self) -> tuple[tuple[Worker, ...], tuple[Worker, ...]]:
        """Whom `fence` and `leave` refuse: the oldest incarnation of each slot that may push, and those that left."""
        with self._changed:
            return tuple(self._newest.items()), tuple(self._left.items())

    # --- bounded staleness ----------------------------------------------------------------------------------------

    def wait_admitted(self, slot: int, base: int, timeout: float) -> float:
        """Wait, at most `timeout` seconds, while this push would make another gradient too stale.

        `base`: the version on which the gradient was computed. Until the push is applied, or `push_ended` is called,
        it counts as applied: several pushes that are received at once must not together exceed the bound.

        Returns the seconds of the wait in which a slower worker computed. The rest is a wait for the servers, or their
        link: where these are full, pushes queue here.
        """
        if (bound := self._bound) is None:
            return 0.0
        with self._changed:
            before = self._look()
            deadline = self._clock() + timeout
            if self._permits.arrive(slot, base):
                self._changed.notify_all()
            try:
                while self._permits.waits(slot) and not self._permits.admits(base, self._version(), bound):
                    if (remaining := deadline - self._clock()) <= 0:
                        # A worker that blocked this push until its timeout must not block the next ones as well.
                        self._look()
                        self._permits.give_up(slot, self._version(), bound)
                        break
                    self._changed.wait(remaining)
            finally:
                held_up = self._look() - before
                self._permits.leave(slot)
            return held_up

    def _look(self) -> float:
        """Count the time since the last look; called before the permits change. Returns `_held_up`.

        Not by each push that was woken and waits on: there may be hundreds, and the shard's lock is held.
        """
        now = self._clock()
        if self._permits.computed:
            self._held_up += now - self._seen_at
        self._seen_at = now
        return self._held_up

    def pulled(self, slot: int) -> None:
        """A worker has read the parameters; if it is connected, its gradients are expected.

        Two, of which it computes one while it pushes the other, unless it waits for each push.
        """
        if self._bound is not None and self.connected(slot):
            self._look()
            self._permits.pulled(slot, self._version(), 2 if self._bound else 1)

    def pushed(self, slot: int, incarnation: int, base: int, *, non_finite: bool) -> None:
        """A push computed on version `base` was applied. `non_finite`: with values that were replaced by 0."""
        if non_finite and self._non_finite.get(slot, -1) < incarnation:
            self._non_finite[slot] = incarnation
            log.warning("worker %d-%d pushed non-finite values: they were replaced by 0", slot, incarnation)
        self._look()
        self._permits.pushed(slot, base)

    def push_ended(self, slot: int) -> None:
        """The admitted push was answered or refused, or its connection broke."""
        if self._bound is not None:
            with self._changed:
                self._look()
                self._permits.ended(slot)
                self._changed.notify_all()

    def expect_no_push(self, slot: int) -> None:
        """Stop waiting for a worker's gradient, under the lock: other pushes may be admitted now."""
        self._look()
        self._permits.forget(slot)
        self._changed.notify_all()
        self.rounds.forget(slot)
        self._release()

    def expect_no_pushes(self) -> None:
        """Stop waiting for any gradient: a rollback restarts the versions at an older one."""
        self._look()
        self._permits.clear()

    # --- rounds ---------------------------------------------------------------------------------------------------

    def wait_round(self, slot: int, timeout: float) -> None:
        """Wait for other workers, at most `timeout` seconds: a push of this one was applied (see `rounds`)."""
        with self._changed:
            self.arrive(slot, timeout)
            while (remaining := self.waits(slot)) > 0:
                self._released.wait(remaining)

    def arrive(self, slot: int, longest: float) -> None:
        """A worker waits for others from now on, at most `longest` seconds: a push of it was applied."""
        with self._changed:
            self._look()
            self._permits.forget(slot)  # until it pulls, no gradient of it is in flight
            self._changed.notify_all()
            self.rounds.arrive(slot, self._clock(), longest)
            self._release()

    def waits(self, slot: int) -> float:
        """For how many seconds a worker that has arrived still waits at most; 0: it may go on."""
        with self._changed:
            return self.rounds.remaining(slot, self._release())

    def _release(self) -> float:
        """Let those go on whose wait is over; returns the time."""
        now = self._clock()
        if self.rounds.release(now):
            self._released.notify_all()
        return now
