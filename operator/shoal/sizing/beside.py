"""What a job does beside its training steps: evaluation, callbacks, and the waits for them.

It is measured in samples that would have been trained meanwhile, so that it is work like any other, of which a slow
worker does less in a second. With N workers and E epochs left it is

    E (t + (N - 1) w) + (N - 1) max(t - w, 0)   samples

for t samples of tasks in an epoch, and w of waits of each worker that has no task: w is 0 where the others train on,
and t where they wait. After the last epoch all wait: the last term. How much epochs differ makes it uncertain: in the
mean over those that were seen, and over those that are left. Nothing here needs numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Beside"]

ENDLESS = 1e18


@dataclass(frozen=True)
class Beside:
    """Samples of `tasks` and `waits` in an epoch of `per_epoch` samples; `behind`: epochs that ended without theirs.

    `sigma`: relative standard deviation of an epoch's tasks and waits, seen in so many epochs (`seen`).
    """

    per_epoch: float
    tasks: float
    waits: float = 0.0
    behind: int = 0
    sigma: float = 0.0
    seen: float = 1.0

    @property
    def at_the_end(self) -> Beside:
        """Where nothing is left to train: what is behind is to be done, and no epoch ends any more."""
        return replace(self, per_epoch=ENDLESS)

    def share_of_steps(self, workers: float) -> float:
        """The part of an epoch's time in which so many workers train."""
        return self.per_epoch / (self.per_epoch + self.tasks + (workers - 1) * self.waits)

    def samples(self, left: Any, workers: Any) -> Any:
        """What so many workers do not train because of it while `left` samples are trained; numbers or arrays."""
        epochs, others = self._epochs(left), workers - 1
        return epochs * (self.tasks + others * self.waits) + others * max(self.tasks - self.waits, 0.0)

    def spread(self, left: Any, workers: Any) -> Any:
        """Standard deviation of the logarithm of the work because of it, while `left` samples are trained."""
        more = self.samples(left, workers)
        variance = 1 / self.seen + 1 / (self._epochs(left) + 1e-6)  # of no epoch left, nothing is uncertain
        return more / (left + more) * self.sigma * variance**0.5

    def _epochs(self, left: Any) -> Any:
        """Epochs whose tasks are to be done."""
        return -((1e-6 - left / self.per_epoch) // 1) + self.behind
