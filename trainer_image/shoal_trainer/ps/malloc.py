"""Makes glibc's malloc return the memory of large buffers to the system.

By default each thread has a heap of its own, and a freed buffer stays in it when anything lies above. A server starts a
thread per connection, and the first answer on each may be megabytes: a worker that connects again gets the journal.
"""

from __future__ import annotations

import ctypes

ARENAS = 2
LARGE = 128 << 10
"""Bytes. From this size on, a buffer has pages of its own. It is malloc's own first value, which a call fixes."""

_ARENA_MAX, _MMAP_THRESHOLD = -8, -3
"""M_ARENA_MAX and M_MMAP_THRESHOLD of mallopt(3)."""


def return_freed_memory() -> None:
    """Call it before the first thread starts. Without glibc it does nothing."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_ARENA_MAX, ARENAS)
        mallopt(_MMAP_THRESHOLD, LARGE)
