"""How a push moves the statistics: the values after the trainable ones, which layers update while they train.

A moving average of BatchNormalization goes to momentum x + (1 - momentum) b in each step, where b is what the batch
shows. So a push has b itself, and moves the average by 1 - momentum^k of the way to the mean b of its k steps. That is
Keras' rule, whatever the pushes of other workers have made of x since the worker read it: averages move as far per
sample with any number of workers, in any order, in rounds or not, and stay between the values that were seen. (A
difference (1 - momentum) (b - x) would be added to another x than it was made from: N workers would add N of them.)

Of other statistics, whose rule nobody knows, a push has the difference that its steps made. A stale one is divided by
the pushes in between, which may have made the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal_trainer.ps import kernels
from shoal_trainer.ps.kernels import Vector
from shoal_trainer.ps.pieces import Payload, parts
from shoal_trainer.ps.spans import cut
from shoal_trainer.wire.messages import Average


class Statistics:
    """The statistics [low, high) of a vector whose first value is that of the flat vector at `offset`."""

    def __init__(self, averages: Sequence[Average], low: int, high: int, offset: int = 0) -> None:
        self._averages: list[tuple[int, int, float]] = []
        self.differences: list[tuple[int, int]] = []
        """The ranges of which a push has differences."""
        spans = ((each.low - offset, each.high - offset, each.momentum) for each in averages)
        for start, stop, momentum in cut(spans, low, high):
            if momentum is None:
                self.differences.append((start, stop))
            else:
                self._averages.append((start, stop, momentum))

    def apply(self, w: Vector, io: Payload, steps: int, scale: float) -> bool:
        """Move `w` by a push of so many steps, of which `io` may have a part, and write the new values to `io`.

        `scale`: of differences. Returns whether there were non-finite values, which move nothing.
        """
        non_finite = False
        for low, high, momentum in self._averages:
            share = np.float32(1 - momentum**steps)
            for part, values in parts(io, low, high):
                non_finite |= kernels.average(w[part], values, share)
        for low, high in self.differences:
            for part, values in parts(io, low, high):
                non_finite |= kernels.add(w[part], values, np.float32(scale))
        return non_finite
