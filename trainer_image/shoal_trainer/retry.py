"""Retries a call until a peer or the storage is reachable again."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from shoal_trainer.contract import EXIT_DRAINED
from shoal_trainer.errors import Unreachable

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_SECONDS = 0.25
"""The first pause between two attempts; the pauses double up to `LONGEST_PAUSE`."""
LONGEST_PAUSE = 30.0


def until_reachable(
    call: Callable[[], T], stop: threading.Event, target: str, *, longest: float = LONGEST_PAUSE
) -> T:
    """Return the result of `call` once it does not raise `Unreachable`; log each new reason once.

    `stop` ends the process with exit code 143.
    """
    logged, pause = "", RETRY_SECONDS
    while True:
        try:
            return call()
        except Unreachable as error:
            if str(error) != logged:
                log.warning("waiting for %s: %s; retrying", target, error)
            logged = str(error)
        if stop.wait(pause):
            sys.exit(EXIT_DRAINED)
        pause = min(2 * pause, longest)
