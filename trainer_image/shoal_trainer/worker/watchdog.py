"""Notices a training step that does not end: a driver that hangs, an endless function of the user.

Its worker still sends heartbeats, so nobody else would notice: its leases would never be given to others, and the epoch
would never end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal_trainer.errors import HungStep

LEAST_SECONDS = 600.0
FIRST_SECONDS = 3600.0
"""For the first step, which may compile."""
FACTOR = 20.0
"""A step hangs if it takes so many times as long as the longest before it, and `LEAST_SECONDS`."""
CHECK_SECONDS = 5.0


class Watchdog:
    """Watches the steps of one thread from another one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest: float | None = None
        self._step: tuple[str, float] | None = None
        """What runs, and since when."""
        self._stopped = threading.Event()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watch the step in this block."""
        began = self._clock()
        self._step = what, began
        try:
            yield
        finally:
            self._step = None
            self._longest = max(self._longest or 0.0, self._clock() - began)

    def hung(self) -> HungStep | None:
        """The error of the step that runs, if it hangs."""
        if (step := self._step) is None:
            return None
        what, began = step
        seconds, longest = self._clock() - began, self._longest
        limit = FIRST_SECONDS if longest is None else max(LEAST_SECONDS, FACTOR * longest)
        if seconds <= limit:
            return None
        before = "it is the first one" if longest is None else f"the longest before took {longest:.3g} s"
        return HungStep(
            f"{what} has not ended in {seconds:.0f} s, and {before}. The accelerator or its driver hangs, or a "
            "function of the model never returns: the log has the stack of each thread."
        )

    def start(self, on_hang: Callable[[HungStep], None]) -> None:
        """Call `on_hang`, once, from a thread, when a step hangs."""
        threading.Thread(target=self._run, args=(on_hang,), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _run(self, on_hang: Callable[[HungStep], None]) -> None:
        while not self._stopped.wait(CHECK_SECONDS):
            if (error := self.hung()) is not None:
                on_hang(error)
                return
