"""Notices a step or a task that does not end: a driver that hangs, an endless function, a lost connection.

Its worker still sends heartbeats, so nobody else would notice: its leases and its task would never be given to others,
and the epoch would never end. Reads are the coordinator's (`stuck`): only it knows whether others wait for them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shoal_trainer.errors import HungStep

LEAST_SECONDS = 600.0
FIRST_SECONDS = 3600.0
"""For the first step, which may compile, and for a task, which runs the user's code; an evaluation: between batches."""
FACTOR = 20.0
"""It hangs if it takes so many times as long as the longest before it, and the least time."""
CHECK_SECONDS = 5.0


class Watched(NamedTuple):
    """What runs, and since when. `least`: it hangs after so many seconds at the earliest."""

    what: str
    least: float
    began: float


class Watchdog:
    """Watches what one thread does from another one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest: dict[float, float] = {}
        """By `least`."""
        self._watched: Watched | None = None
        self._checks = math.inf, 0.0
        """When the next check is due, and for how many seconds the process was frozen so far."""
        self._stopped = threading.Event()

    @contextmanager
    def watch(self, what: str, least: float = LEAST_SECONDS) -> Iterator[None]:
        """Watch this block: a step, or with `FIRST_SECONDS` a task."""
        self._watched = Watched(what, least, self._time())
        try:
            yield
        finally:
            self.moved()
            self._watched = None

    def moved(self) -> None:
        """What is watched got on, such as to the next batch: its time begins anew."""
        if (watched := self._watched) is not None:
            now = self._time()
            self._longest[watched.least] = max(self._longest.get(watched.least, 0.0), now - watched.began)
            self._watched = watched._replace(began=now)

    def hung(self) -> HungStep | None:
        """The error of what runs, if it hangs."""
        if (watched := self._watched) is None:
            return None
        seconds, longest = self._time() - watched.began, self._longest.get(watched.least)
        limit = FIRST_SECONDS if longest is None else max(watched.least, FACTOR * longest)
        if seconds <= limit:
            return None
        before = "it is the first one" if longest is None else f"the longest before took {longest:.3g} s"
        return HungStep(
            f"{watched.what} has not ended in {seconds:.0f} s, and {before}. The accelerator, its driver or the "
            "storage hangs, or a function of the user never returns: the log has the stack of each thread."
        )

    def checked(self) -> HungStep | None:
        """As `hung`, called every `CHECK_SECONDS`. Where that comes late, nothing ran: a paused virtual machine."""
        now, ran = self._clock(), self._time()
        self._checks = now + CHECK_SECONDS, now - ran
        return self.hung()

    def _time(self) -> float:
        """The clock's, without the seconds for which the process was frozen."""
        now, (due, frozen) = self._clock(), self._checks
        return now - frozen - max(0.0, now - due - CHECK_SECONDS)

    def start(self, on_hang: Callable[[HungStep], None]) -> None:
        """Call `on_hang`, once, from a thread, when something hangs."""
        threading.Thread(target=self._run, args=(on_hang,), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _run(self, on_hang: Callable[[HungStep], None]) -> None:
        while not self._stopped.wait(CHECK_SECONDS):
            if (error := self.checked()) is not None:
                on_hang(error)
                return
