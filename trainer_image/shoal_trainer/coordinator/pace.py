"""The job's rate over the last seconds and its smoothed loss, from the pushes."""

from __future__ import annotations

import math
from collections import deque

RATE_SECONDS = 20.0
LOSS_WEIGHT = 0.05


class Pace:
    """`loss` is a moving average over the pushes; None before the first finite one."""

    def __init__(self) -> None:
        self.loss: float | None = None
        self.begun = False
        self._recent: deque[tuple[float, int]] = deque()

    def pushed(self, now: float, samples: int, loss: float) -> None:
        """Record an applied push."""
        self.begun = True
        if math.isfinite(loss):
            self.loss = loss if self.loss is None else self.loss + LOSS_WEIGHT * (loss - self.loss)
        self._recent.append((now, samples))
        self._forget(now)

    def samples_per_second(self, now: float) -> float | None:
        """The rate over the last `RATE_SECONDS`; None with fewer than two pushes."""
        self._forget(now)
        if len(self._recent) < 2:
            return None
        return sum(samples for _, samples in self._recent) / max(now - self._recent[0][0], 1e-3)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
