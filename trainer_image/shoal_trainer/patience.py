"""To try again until what is away answers: an outage is nobody's failure, and to end would help nobody."""

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
"""The first pause before another try; the pauses double, up to the longest."""
LONGEST_PAUSE = 30.0


def patiently(
    call: Callable[[], T], stop: threading.Event, what: str, *, longest: float = LONGEST_PAUSE
) -> T:
    """The call's result, as soon as `what` answers; each reason is told once. Told to stop, the process ends (143)."""
    said, pause = "", RETRY_SECONDS
    while True:
        try:
            return call()
        except Unreachable as error:
            if str(error) != said:
                log.warning("waiting for %s: %s; trying again until it answers", what, error)
            said = str(error)
        if stop.wait(pause):
            sys.exit(EXIT_DRAINED)
        pause = min(2 * pause, longest)
