"""The buffers of requests in flight: they bound a server's memory apart from its parameters.

A request without a buffer waits, and TCP makes its worker wait. A buffer is held from the first byte of the payload to
the last byte of the answer, so a worker on a slow link holds one for seconds. If all buffers are held that long, the
pool adds one, up to `MOST`, and drops it when it is no longer needed: otherwise two slow links slow down all workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.wire.header import Codec

log = logging.getLogger(__name__)

POOL_BYTES = 16 << 20
SLOW_SECONDS = 1.0
"""A link of 1 Gb/s carries 100 MB in this time."""
KEEP_SECONDS = 60.0
MOST = 8


class BufferPool:
    """At least two buffers, as many as fit into `limit` bytes, made when first needed; more for slow links."""

    def __init__(self, limit: int = POOL_BYTES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._size = -1
        self._free: list[NDArray[np.uint8]] = []
        self._made = 0
        self._lent: dict[int, float] = {}
        self._needed = clock()
        """When all buffers were last lent at once."""
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lend(
        self, values: int, codec: Codec, largest: int, *, deadline: float = math.inf
    ) -> Iterator[NDArray[Any]]:
        """A buffer for `values` in `codec`. `largest`: bytes that any request of this shard needs.

        Waits for a free one; `Unreachable` if there is none by `deadline` (on the pool's clock).
        """
        with self._changed:
            while (buffer := self._take(largest)) is None:
                left = deadline - self._clock()
                if left <= 0:
                    raise Unreachable("no buffer is free: slow links hold all of them")
                # No notification comes when a holder becomes slow, so look again.
                pause = min(left, SLOW_SECONDS if self._made < MOST else math.inf)
                self._changed.wait(None if pause == math.inf else pause)
            self._lent[id(buffer)] = self._clock()
        try:
            yield buffer[: values * codec.itemsize].view(codec.dtype)
        finally:
            with self._changed:
                self._give_back(buffer)
                self._changed.notify()

    def _take(self, largest: int) -> NDArray[np.uint8] | None:
        if self._size != largest:  # checked after each wait: the codec of another request may differ
            self._size, self._made = largest, 0
            self._free.clear()
            self._lent.clear()
        if len(self._free) < 2:
            self._needed = self._clock()
        if self._free:
            return self._free.pop()
        if self._made >= self._usual():
            newest = max(self._lent.values(), default=-math.inf)
            if self._made >= MOST or self._clock() - newest < SLOW_SECONDS:
                return None
            log.info("workers on slow links hold all %d buffers: one more is made", self._made)
        self._made += 1
        return aligned(largest, np.uint8)

    def _give_back(self, buffer: NDArray[np.uint8]) -> None:
        if self._lent.pop(id(buffer), None) is None or buffer.nbytes != self._size:
            return
        if self._made > self._usual() and self._clock() - self._needed > KEEP_SECONDS:
            self._made -= 1
        else:
            self._free.append(buffer)

    def _usual(self) -> int:
        return max(2, self._limit // max(1, self._size))
