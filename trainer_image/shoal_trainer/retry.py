"""Retries with growing pauses until a peer or the storage is reachable again."""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from shoal_trainer.contract import EXIT_DRAINED
from shoal_trainer.errors import Unreachable

log = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0


class Backoff:
    """Pauses between attempts: `first` seconds, doubled up to `longest`, each varied by a share of up to `jitter`."""

    def __init__(
        self,
        first: float = FIRST_PAUSE,
        longest: float = LONGEST_PAUSE,
        jitter: float = 0.0,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.longest = longest
        self._first = self._pause = first
        self._jitter = jitter
        self._random = rng or random.Random()
        self._reason = ""

    def wait(self, event: threading.Event) -> bool:
        """Wait for the next pause; returns whether `event` was set."""
        pause = min(self._pause, self.longest)
        self._pause = 2 * pause
        return event.wait(pause * self._random.uniform(1 - self._jitter, 1 + self._jitter))

    def is_new(self, error: Exception) -> bool:
        """Whether the last attempt failed for another reason: log each reason once."""
        new, self._reason = str(error) != self._reason, str(error)
        return new

    def reset(self) -> None:
        """Start again after a success."""
        self._pause, self._reason = self._first, ""


def until_reachable(
    call: Callable[[], T],
    target: str,
    stop: threading.Event | None = None,
    *,
    longest: float = LONGEST_PAUSE,
) -> T:
    """Return the result of `call` once it does not raise `Unreachable`; log each new reason once.

    `stop`, if there is one, ends the process with exit code 143.
    """
    stop = stop or threading.Event()
    backoff = Backoff(FIRST_PAUSE, longest)
    while True:
        try:
            return call()
        except Unreachable as error:
            if backoff.is_new(error):
                log.warning("waiting for %s: %s; retrying", target, error)
        if backoff.wait(stop):
            sys.exit(EXIT_DRAINED)
