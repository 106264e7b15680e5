"""The work of a shard: cumulative counters over the life of its process, from which its capacity follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Load:
    """See `ShardReport`. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.busy_seconds = 0.0
        self.updates = self.batches = 0
        self.bytes_received = 0
        self.busy_answers = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._at_work = 0
        self._since = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """A thread applies and answers a piece. A moment in which several do so counts once."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        """A thread begins or ends. What has passed is added at once: a busy server may never have an idle moment."""
        with self._lock:
            now = self._clock()
            if self._at_work:
                self.busy_seconds += now - self._since
            self._at_work, self._since = self._at_work + change, now

    def busy(self) -> None:
        """Count an answer to a request that there is no memory yet."""
        with self._lock:
            self.busy_answers += 1

    def applied(self, nbytes: int, batches: int) -> None:
        """Count a push of so many bytes that was applied as a whole, and the batches that it is of."""
        with self._lock:
            self.updates += 1
            self.batches += batches
            self.bytes_received += nbytes
