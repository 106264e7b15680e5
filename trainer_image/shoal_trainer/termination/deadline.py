"""Ends a process in time, even if Python waits for one of its threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

EXIT_SECONDS = 10.0


def end_soon(code: int) -> None:
    """End this process after `EXIT_SECONDS`, even if a thread does not: of the user's code, or in a long request."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, [code])
    timer.daemon = True
    timer.start()
    with contextlib.suppress(Exception):  # the user's code may have replaced it
        sys.stdout.flush()
