"""Child processes of `shoal-trainer run` end with their parent, even if it is killed with SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_ENV = "SHOAL_PARENT_PID"
PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Let the kernel kill this process when `$SHOAL_PARENT_PID` ends (prctl(2), Linux only)."""
    parent = os.environ.get(PARENT_ENV)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)
