"""A pool of buffers for requests in flight, which bounds a server's memory.

A request without a free buffer waits, and TCP back-pressure stops its worker. A request holds a buffer from the first
byte of its payload to the last byte of the answer: seconds on a slow link. If all buffers are held that long, the pool
grows, up to `MAX_BUFFERS`, and shrinks later; otherwise two slow links would slow down all workers.
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
"""The usual size of the pool."""
SLOW_SECONDS = 1.0
"""A request that holds a buffer for longer is slow: a 1 Gb/s link transfers 100 MB in this time."""
KEEP_SECONDS = 60.0
"""How long an additional buffer is kept after the pool was last exhausted."""
MAX_BUFFERS = 8


class BufferPool:
    """As many buffers as fit into `limit` bytes, at least two, allocated on demand; more while links are slow."""

    def __init__(self, limit: int = POOL_BYTES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._size = -1
        self._free: list[NDArray[np.uint8]] = []
        self._made = 0
        self._lent: dict[int, float] = {}
        self._needed = clock()
        """When all buffers were last in use at the same time."""
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lend(
        self, values: int, codec: Codec, largest: int, *, deadline: float = math.inf
    ) -> Iterator[NDArray[Any]]:
        """A buffer for `values` elements in `codec`. `largest`: the bytes that any request of this shard may need.

        Waits for a free buffer; `Unreachable` if none is free by `deadline` (on the pool's clock).
        """
        with self._changed:
            while (buffer := self._take(largest)) is None:
                remaining = deadline - self._clock()
                if remaining <= 0:
                    raise Unreachable("no buffer is free: workers on slow links hold all of them")
                # A request that becomes slow sends no notification, so check again after a pause.
                pause = min(remaining, SLOW_SECONDS if self._made < MAX_BUFFERS else math.inf)
                self._changed.wait(None if pause == math.inf else pause)
            self._lent[id(buffer)] = self._clock()
        try:
            yield buffer[: values * codec.itemsize].view(codec.dtype)
        finally:
            with self._changed:
                self._give_back(buffer)
                self._changed.notify()

    def _take(self, largest: int) -> NDArray[np.uint8] | None:
        if self._size != largest:  # checked after each wait: another request may use another codec
            self._size, self._made = largest, 0
            self._free.clear()
            self._lent.clear()
        if len(self._free) < 2:
            self._needed = self._clock()
        if self._free:
            return self._free.pop()
        if self._made >= self._usual():
            newest = max(self._lent.values(), default=-math.inf)
            if self._made >= MAX_BUFFERS or self._clock() - newest < SLOW_SECONDS:
                return None
            log.info("workers on slow links hold all %d buffers: adding one", self._made)
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
