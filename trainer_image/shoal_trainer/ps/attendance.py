"""Who is connected to a shard and may write to it, and who has to wait so that nobody's gradient becomes too old.

The part of the shard that knows workers and no numbers; it brings the lock that everything of the shard is under.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal_trainer.contract import Staleness
from shoal_trainer.ps.members import Members, Permits


class Attendance:
    """The base of a shard: its lock, its workers and its version."""

    def __init__(self, staleness: Staleness | None, clock: Callable[[], float]) -> None:
        self.staleness = staleness or Staleness()
        self.version = 0
        self.stopped = 0
        """See `AnswerMeta.stopped`; the coordinator sets it."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._clock = clock
        self._members = Members()
        self._permits = Permits()

    @property
    def live_workers(self) -> int:
        """Workers with a connection, or as many as `set_live_workers` said; at least 1."""
        return self._members.live

    def set_live_workers(self, count: int | None) -> None:
        """Let the coordinator say how many workers there are; None: count connections."""
        with self.lock:
            self._members.said = count
            self.changed.notify_all()

    def connect(self, slot: int, incarnation: int) -> None:
        """A proven worker opened a connection; `Fenced` if a newer incarnation of its slot has been here."""
        with self.lock:
            self._members.connect(slot, incarnation)

    def disconnect(self, slot: int) -> None:
        """A worker's connection ended."""
        with self.lock:
            if not self._members.disconnect(slot):
                self._permits.forget(slot)
                self._gone(slot)
            self.changed.notify_all()

    def fence(self, slot: int, minimum_incarnation: int) -> None:
        """Refuse all older incarnations of a slot from now on; nobody waits for their gradients any more."""
        with self.lock:
            if self._members.fence(slot, minimum_incarnation):
                self._permits.forget(slot)
                self.changed.notify_all()

    def leave(self, slot: int, incarnation: int) -> None:
        """A worker has said goodbye: what comes over its connection after that is refused."""
        with self.lock:
            self._members.leave(slot, incarnation)
            self._permits.forget(slot)
            self.changed.notify_all()

    def wait_admitted(self, slot: int, base: int, timeout: float) -> None:
        """Bounded staleness: wait while applying this push would leave a live worker's gradient too old."""
        if self.staleness.max is None:
            return
        with self.changed:
            deadline = self._clock() + timeout
            self._permits.arrive(slot, base)
            try:
                while not self._permits.admits(slot, base, self.version, self.staleness.max):
                    if (left := deadline - self._clock()) <= 0:
                        # Who held this one up so long does not hold up the next ones, too.
                        self._permits.give_up(slot, self.version, self.staleness.max)
                        return
                    self.changed.wait(left)
            finally:
                self._permits.leave(slot)

    def _gone(self, slot: int) -> None:
        """Inside the lock: a worker's last connection has ended."""
        raise NotImplementedError
