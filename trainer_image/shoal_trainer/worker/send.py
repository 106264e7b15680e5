"""Combines steps into a push."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.ps import kernels
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import MAX_MARKS, MetricSum, Push
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.layout import Average


@dataclass(frozen=True)
class Send:
    """A push and its update. The servers must apply pushes in order."""

    update: npt.NDArray[Any]
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


def full(pending: Sequence[tuple[Step, Ready]], limit: int) -> bool:
    """Whether to push: there are `limit` steps, or another one might exceed the marks of a push.

    Assumes one mark per lease, although adjacent leases share one.
    """
    if len(pending) >= limit:
        return True
    changes = sum(a.work.token != b.work.token for (_, a), (_, b) in pairwise(pending))
    return changes + 1 >= MAX_MARKS


def combined(
    pending: list[tuple[Step, Ready]], averages: Sequence[Average] = (), staleness: int = 1
) -> tuple[npt.NDArray[Any], int, float]:
    """The mean update of the steps (weighted by samples), their number of samples, and their mean loss.

    All steps started with the same statistics, so their mean is one step's change. `averages` are scaled to the change
    of consecutive steps, and by `staleness` (pushes between pull and push, of the previous push), by which the servers
    divide changes of statistics; both together are limited by `MAX_AVERAGE_STEP`.
    """
    samples = sum(ready.batch.samples for _, ready in pending)
    loss = sum(step.loss * ready.batch.samples for step, ready in pending) / samples
    update = pending[0][0].update if len(pending) == 1 else _mean(pending, samples)
    for average in averages:
        factor = np.float32(_average_factor(average, len(pending), staleness))
        if factor != 1:
            if not update.flags.writeable:  # memory of TensorFlow
                update = update.copy()
            part = update[average.low : average.high]
            values = aligned(part.size)
            kernels.decode(part, values)
            values *= factor
            kernels.encode(values, part)
    return update, samples, loss


def length(gradient: npt.NDArray[Any]) -> float:
    """The Euclidean length of a gradient in the encoding of the wire."""
    sums = np.zeros(3)
    kernels.squares(gradient, sums)
    return math.sqrt(sums[0])


def added(pending: Sequence[tuple[Step, Ready]]) -> tuple[MetricSum, ...]:
    """The metrics of the steps, added up."""
    sums: dict[str, MetricSum] = {}
    for step, _ in pending:
        for name, total, weight in step.metrics:
            _, before, weighed = sums.get(name, (name, 0.0, 0.0))
            sums[name] = MetricSum(name, before + total, weighed + weight)
    return tuple(sums.values())


def _mean(pending: list[tuple[Step, Ready]], samples: int) -> npt.NDArray[Any]:
    first = pending[0][0].update
    total = aligned(first.size)
    scratch = aligned(first.size, first.dtype)
    for step, ready in pending:
        scratch[:] = step.update
        kernels.add(total, scratch, np.float32(ready.batch.samples / samples))
    kernels.encode(total, scratch)
    return scratch


def _average_factor(average: Average, steps: int, staleness: int) -> float:
    """The factor by which a push scales one step's change of a moving average."""
    one_step = 1 - average.momentum
    return min(staleness * (1 - average.momentum**steps), max(one_step, MAX_AVERAGE_STEP)) / one_step
