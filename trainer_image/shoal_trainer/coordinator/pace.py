"""The job's rate over its last pushes, and its smoothed loss.

A push brings what was trained before it. So a rate is of the pushes after one, over the time since that one. It begins
with the newest push that is `RATE_SECONDS` older than the last: where they are further apart, with the one before.
"""

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
        """Time and samples of the pushes that count, behind the one with which the time begins."""
        self._since, self._every = -math.inf, 0.0
        """When training began, or went on; and the seconds between the pushes of the worker that pushed last."""

    def pushed(self, now: float, samples: int, loss: float, every: float = 0.0) -> None:
        """Record an applied push. `every`: seconds between the pushes of its worker; 0: unknown."""
        self.begun = True
        if math.isfinite(loss):
            self.loss = loss if self.loss is None else self.loss + LOSS_WEIGHT * (loss - self.loss)
        if not self._recent or self._stands(now):
            self._since = now
        if now - self._since <= every / 2:
            self._recent.clear()  # of workers that push together, the time begins with the last one's
        self._every = every
        self._recent.append((now, samples))
        while len(self._recent) > 1 and self._recent[1][0] <= now - RATE_SECONDS:
            self._recent.popleft()

    def samples_per_second(self, now: float) -> float | None:
        """The rate; None before a worker has pushed twice, and while training stands."""
        if not self._recent or self._stands(now):
            return None
        (begin, before), (end, _) = self._recent[0], self._recent[-1]
        if end <= begin:
            return None
        return (sum(samples for _, samples in self._recent) - before) / (end - begin)

    def _stands(self, now: float) -> bool:
        """Whether the next push is overdue: an evaluation runs, or the storage or a server is away."""
        return bool(self._recent) and now - self._recent[-1][0] > max(RATE_SECONDS, 2 * self._every)
