"""Processes of a run on one machine end with the process that started them, even where that is killed outright."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_ENV = "SHOAL_PARENT_PID"
PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Where `$SHOAL_PARENT_PID` names a parent, be killed when it is gone (prctl(2); on Linux only)."""
    parent = os.environ.get(PARENT_ENV)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it was gone before the kernel knew of our wish
        os.kill(os.getpid(), signal.SIGKILL)
