"""What is measured of a job's speed, as sums: a reader that takes differences loses nothing with a missed report."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import AfterValidator, Field

from shoal_trainer.contract.figures import MOST_LOG, Difference, Number
from shoal_trainer.contract.message import Message


class Sums(Message):
    """Sums that one process adds to: a reader that takes differences loses nothing with a report that it missed."""

    def since(self, earlier: Self) -> Self:
        """What was added after `earlier`, a report of the same sums."""
        fields = type(self).model_fields
        return type(self)(**{name: getattr(self, name) - getattr(earlier, name) for name in fields})

    def plus(self, **more: float) -> Self:
        """These sums with more in some of them."""
        return self.model_copy(update={name: getattr(self, name) + value for name, value in more.items()})


class LogSums(Sums):
    """Count, sum and sum of squares of ln(seconds) of one part of a step, and the sum of the seconds.

    Step times are skewed and their spread is a ratio, so their logarithms are summed: they say how sure a mean is. What
    many steps take together is the plain mean: where one step in six waits 80 ms for its share of a core, no mean of
    logarithms tells it.
    """

    count: Difference = 0
    total: Number = 0.0
    squares: Number = 0.0
    seconds: Number = 0.0

    @property
    def mean(self) -> float:
        """The mean of ln(seconds); 0 for none."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """The population variance of ln(seconds), at least 0."""
        return max(0.0, self.squares / self.count - self.mean**2) if self.count else 0.0

    @property
    def possible(self) -> bool:
        """Whether measured times can have these sums: none is longer than 10^7 s, or shorter than 10^-7."""
        longest = MOST_LOG * self.count
        return (
            abs(self.total) <= longest
            and 0 <= self.squares <= MOST_LOG * longest
            and 0 <= self.seconds <= math.exp(MOST_LOG) * self.count
        )


def _measured(sums: LogSums) -> LogSums:
    if not sums.possible:
        raise ValueError(f"no times between 1e-7 and 1e7 s have these sums: {sums}")
    return sums


MeasuredSums = Annotated[LogSums, AfterValidator(_measured)]


class SpeedSums(Message):
    """The measured steps of all workers in one configuration, which the first six fields identify.

    Only steps while the members were unchanged for a settling time count, and none right after a task or an outage.
    """

    device: str = Field(max_length=128)
    """The accelerator by its name in the operator's catalogue ("T4"); "CPU" without one."""
    devices: int = Field(ge=1, le=1024)
    """Accelerators of one worker; 1 for "CPU"."""
    cores: float = Field(ge=0, le=1e6, allow_inf_nan=False)
    """CPU cores that one worker may use, 0.5 for half of one; 0: unknown."""
    batch_size: int = Field(ge=1, le=10**9)
    """Samples in one step of one worker."""
    workers: int = Field(ge=1, le=10**6)
    """Workers that were active, of all devices."""
    servers: int = Field(ge=1, le=10**6)
    """Parameter servers."""
    compute: MeasuredSums = LogSums()
    """Computing a step and waiting for its input."""
    pull: MeasuredSums = LogSums()
    """Waiting for the servers' answer and reading it, but not for slower workers."""
    push: MeasuredSums = LogSums()
    """Sending the update, but not waiting for slower workers."""
    step: MeasuredSums = LogSums()
    """From push to push: of the exchange only what is not beside the computation, and waits for others, too."""

    @property
    def key(self) -> tuple[str, int, float, int, int, int]:
        """The configuration."""
        return self.device, self.devices, self.cores, self.batch_size, self.workers, self.servers


class BesideSums(Sums):
    """What passes beside training steps: evaluation, callbacks, and the waits for them. Not the last of a job.

    Workers differ in speed, and each does its tasks about as much faster as its steps. So time counts as the samples
    that this worker would have trained in it.
    """

    epochs: Difference = 0
    """Epochs that ended."""
    others: Difference = 0
    """Workers but one at the end of each of these, summed."""
    tasks: Number = 0.0
    """Samples that were not trained because of tasks."""
    waits: Number = 0.0
    """Samples that were not trained because workers had nothing to do."""


def _passed(sums: BesideSums) -> BesideSums:
    """Sums of what has passed: nothing of it is negative."""
    if min(sums.epochs, sums.others, sums.tasks, sums.waits) < 0:
        raise ValueError(f"what passed beside steps is not negative: {sums}")
    return sums


PassedSums = Annotated[BesideSums, AfterValidator(_passed)]
MAX_SPEEDS = 64
"""Configurations in a report; beyond that, the one that was measured longest ago is dropped."""
