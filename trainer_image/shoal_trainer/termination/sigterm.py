"""SIGTERM without locks: its handler may interrupt the main thread while that holds the lock of an event or a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue


def in_thread(call: Callable[[float], None]) -> Callable[[], None]:
    """A function for a signal handler: the first time, a thread runs `call` with the time of it (`time.monotonic`)."""
    times: SimpleQueue[float] = SimpleQueue()
    threading.Thread(target=lambda: call(times.get()), name="sigterm", daemon=True).start()
    return lambda: times.put(time.monotonic())  # `put` is reentrant
