"""The buffers of requests in flight: what bounds a server's memory beside its parameters.

Who finds none waits, and TCP makes the worker wait. A buffer is held while its payload comes and its answer goes, so a
worker behind a slow link holds one for seconds. Where all of them are held for so long the pool makes one more, up to
`MOST`, and gives it up again when it is no longer needed: two slow links would otherwise slow down everybody.
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

from shoal_trainer.ps.buffers import aligned
from shoal_trainer.wire.header import Codec

log = logging.getLogger(__name__)

POOL_BYTES = 16 << 20
SLOW_SECONDS = 1.0
"""A link of 1 Gb/s carries 100 MB in this time."""
KEEP_SECONDS = 60.0
MOST = 8


class BufferPool:
    """At least two buffers, as many as fit into `limit` bytes, made when first needed; more behind slow links."""

    def __init__(self, limit: int = POOL_BYTES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._size = -1
        self._free: list[NDArray[np.uint8]] = []
        self._made = 0
        self._lent: dict[int, float] = {}
        self._needed = clock()
        """When all of them were lent for the last time."""
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lend(self, values: int, codec: Codec, largest: int) -> Iterator[NDArray[Any]]:
        """A buffer for `values` in `codec`; waits for one. `largest`: bytes that any request of this shard needs."""
        with self._changed:
            while (buffer := self._take(largest)) is None:
                # Nobody tells when a holder becomes slow.
                self._changed.wait(SLOW_SECONDS if self._made < MOST else None)
            self._lent[id(buffer)] = self._clock()
        try:
            yield buffer[: values * codec.itemsize].view(codec.dtype)
        finally:
            with self._changed:
                self._give_back(buffer)
                self._changed.notify()

    def _take(self, largest: int) -> NDArray[np.uint8] | None:
        if self._size != largest:  # again after each wait: others may need buffers of another size
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
            log.info("workers behind slow links hold all %d buffers: one more", self._made)
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
