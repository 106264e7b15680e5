"""How fast the job is and how its loss goes, from the pushes of the last seconds."""

from __future__ import annotations

import math
from collections import deque

RATE_SECONDS = 20.0
LOSS_WEIGHT = 0.05


class Pace:
    """`loss`: a moving average over the pushes; None before the first one that has a finite loss."""

    def __init__(self) -> None:
        self.loss: float | None = None
        self.begun = False
        self._recent: deque[tuple[float, int]] = deque()

    def pushed(self, now: float, samples: int, loss: float) -> None:
        """A push was applied."""
        self.begun = True
        if math.isfinite(loss):
            self.loss = loss if self.loss is None else self.loss + LOSS_WEIGHT * (loss - self.loss)
        self._recent.append((now, samples))
        self._forget(now)

    def samples_per_second(self, now: float) -> float | None:
        """Over the last `RATE_SECONDS`; None where too little was pushed."""
        self._forget(now)
        if len(self._recent) < 2:
            return None
        return sum(samples for _, samples in self._recent) / max(now - self._recent[0][0], 1e-3)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
