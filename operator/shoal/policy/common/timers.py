"""When the next plan is due if nothing changes before."""

from __future__ import annotations

from datetime import datetime

SOONEST = 0.01
"""Seconds. Less is what is left of a sum of fractions: now and so little more may be the same time."""


class Timers:
    """Collects the times at which something becomes due; only the earliest matters."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self._next: float | None = None

    def after(self, seconds: float) -> None:
        """Plan again in this many seconds; 0: at once, after what was decided."""
        seconds = max(seconds, SOONEST) if seconds else seconds
        self._next = seconds if self._next is None else min(self._next, seconds)

    def pending(self, due: datetime) -> bool:
        """Whether `due` is still ahead. If so, plan again then."""
        left = (due - self._now).total_seconds()
        if left > 0:
            self.after(left)
        return left > 0

    @property
    def next_seconds(self) -> float | None:
        """Seconds until the earliest; None: nothing becomes due."""
        return self._next
