"""The steps of a push, as one update."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shoal_trainer.ps import kernels
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import MAX_MARKS, MetricSum, Push
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.layout import Average
from shoal_trainer.worker.on_device import OnDevice
from shoal_trainer.worker.on_host import Mean


@dataclass(frozen=True)
class Send:
    """A push and its update. The servers must apply pushes in order."""

    update: Any
    """An array, or `OnDevice`."""
    push: Push
    local: bool = False
    """A difference of local steps (to be divided by the number of workers), not a gradient."""
    overlapped: bool = False
    """It was computed while the push before it was in flight."""
    hurry: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set when the answer is waited for."""


MAX_AVERAGE_STEP = 0.1
"""The largest share of the distance to the observed value by which one push may move a moving average. With larger
shares, the sum of the pushes in flight could make a variance negative."""


class Taken(NamedTuple):
    """A step that is not pushed yet; its update is in the sum of the pile."""

    ready: Ready
    loss: float
    skipped: bool
    metrics: tuple[MetricSum, ...]
    left_out: bool


class Pile:
    """The steps of the next push, whose updates are added up as they come."""

    def __init__(self, mean: Mean) -> None:
        self._mean = mean
        self._first: Any = None
        self.steps: list[Taken] = []

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: Step, ready: Ready) -> None:
        """Add a step. One that was skipped has no gradient, but its samples count, and its statistics as in Keras."""
        if not self.steps:
            self._first = step.update
        else:
            if len(self.steps) == 1:
                self._mean.add(self._first, self.samples)
            self._mean.add(step.update, ready.batch.samples)
        self.steps.append(Taken(ready, step.loss, step.skipped, step.metrics, step.left_out))

    def clear(self) -> None:
        """Drop all steps."""
        self._mean.clear()
        self._first, self.steps = None, []

    def full(self, limit: int) -> bool:
        """Whether to push: there are `limit` steps, or another one might exceed the marks of a push.

        Assumes one mark per lease, although adjacent leases share one.
        """
        if len(self.steps) >= limit:
            return True
        changes = sum(a.ready.work.token != b.ready.work.token for a, b in pairwise(self.steps))
        return changes + 1 >= MAX_MARKS

    @property
    def samples(self) -> int:
        """The samples of all steps."""
        return sum(step.ready.batch.samples for step in self.steps)

    @property
    def left_out(self) -> int:
        """Those whose batches were left out (`on_nan`)."""
        return sum(step.ready.batch.samples for step in self.steps if step.left_out)

    @property
    def skipped(self) -> bool:
        """Whether all steps were."""
        return all(step.skipped for step in self.steps)

    @property
    def loss(self) -> float:
        """The mean loss of the samples."""
        return sum(step.loss * step.ready.batch.samples for step in self.steps) / self.samples

    @property
    def metrics(self) -> tuple[MetricSum, ...]:
        """The metrics of the steps, added up."""
        sums: dict[str, MetricSum] = {}
        for step in self.steps:
            for name, total, weight in step.metrics:
                _, before, weighed = sums.get(name, (name, 0.0, 0.0))
                sums[name] = MetricSum(name, before + total, weighed + weight)
        return tuple(sums.values())

    def update(self, averages: Sequence[Average] = (), staleness: int = 1) -> Any:
        """The mean update of the steps, weighted by samples.

        All steps started with the same statistics, so their mean is one step's change. `averages` are scaled to the
        change of consecutive steps, and by `staleness` (pushes between pull and push, of the previous push), by which
        the servers divide changes of statistics; both together are limited by `MAX_AVERAGE_STEP`.
        """
        update = self._first if len(self.steps) == 1 else self._mean.result(self.samples)
        factors = [np.float32(_average_factor(each, len(self.steps), staleness)) for each in averages]
        if all(factor == 1 for factor in factors):
            return update
        first = min(average.low for average in averages)
        statistics = update.statistics(first) if isinstance(update, OnDevice) else update[first:]
        for average, factor in zip(averages, factors, strict=True):
            part = statistics[average.low - first : average.high - first]
            values = aligned(part.size)
            kernels.decode(part, values)
            values *= factor
            kernels.encode(values, part)
        return update


def length(update: Any, trainable: int) -> float:
    """The Euclidean length of the gradient in an update."""
    if isinstance(update, OnDevice):
        return update.length
    sums = np.zeros(3)
    kernels.squares(update[:trainable], sums)
    return math.sqrt(sums[0])


def _average_factor(average: Average, steps: int, staleness: int) -> float:
    """The factor by which a push scales one step's change of a moving average."""
    one_step = 1 - average.momentum
    return min(staleness * (1 - average.momentum**steps), max(one_step, MAX_AVERAGE_STEP)) / one_step
