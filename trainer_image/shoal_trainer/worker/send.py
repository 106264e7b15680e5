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
from shoal_trainer.wire.messages import LOSS, MAX_MARKS, MetricSum, Push
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.on_device import OnDevice
from shoal_trainer.worker.vector import Mean


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
        """The mean loss of the samples that were not left out; NaN if all were."""
        kept = [(step.loss, step.ready.batch.samples) for step in self.steps if not step.left_out]
        return sum(loss * samples for loss, samples in kept) / sum(n for _, n in kept) if kept else math.nan

    @property
    def metrics(self) -> tuple[MetricSum, ...]:
        """The metrics of the steps that were not left out, added up; of several epochs as `PushMeta` has them."""
        epochs = dict.fromkeys(step.ready.work.epoch for step in self.steps)
        if len(epochs) == 1:
            return _added_up(self.steps)
        each = ([step for step in self.steps if step.ready.work.epoch == epoch] for epoch in epochs)
        return tuple(metric for steps in each for metric in (_loss_of(steps), *_added_up(steps)))

    def update(self) -> Any:
        """The mean update of the steps, weighted by samples."""
        if len(self.steps) == 1:
            if not self._mean.clips:
                return self._first
            self._mean.add(self._first, self.samples)
        return self._mean.result(self.samples)


def _added_up(steps: Sequence[Taken]) -> tuple[MetricSum, ...]:
    sums: dict[str, MetricSum] = {}
    for step in steps:
        for name, total, weight in () if step.left_out else step.metrics:
            _, before, weighed = sums.get(name, (name, 0.0, 0.0))
            sums[name] = MetricSum(name, before + total, weighed + weight)
    return tuple(sums.values())


def _loss_of(steps: Sequence[Taken]) -> MetricSum:
    known = [
        (step.loss, step.ready.batch.samples)
        for step in steps
        if not step.left_out and math.isfinite(step.loss)
    ]
    return MetricSum(LOSS, sum(loss * samples for loss, samples in known), float(sum(n for _, n in known)))


def length(update: Any, trainable: int) -> float:
    """The Euclidean length of the gradient in an update."""
    if isinstance(update, OnDevice):
        return update.length
    sums = np.zeros(3)
    kernels.squares(update[:trainable], sums)
    return math.sqrt(sums[0])
