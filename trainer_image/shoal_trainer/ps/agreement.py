"""How far gradients of different workers agree, by a sample of them: for momentum, whose state does not tell it.

A gradient is a signal that all batches share, and the noise of its own; the cosine of two of them is the signal's share
of their squares. What arrives together and agrees goes too far, also where steps that are too long overshoot together.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shoal_trainer.ps.kernels import Buffer
from shoal_trainer.ps.pieces import Payload, parts

SAMPLE = 4096
"""So many values, evenly spread, tell how far gradients agree."""
SMOOTHING = 0.05
"""The share of the newest cosine in the mean."""

Doubles = npt.NDArray[np.float64]


class Agreement:
    """The mean cosine of a gradient of `size` values with the one before it, if that is of another worker.

    Threads may `meet` different pieces at the same time; the rest is called under the shard's lock.
    """

    def __init__(self, size: int, mean: float = 0.0) -> None:
        self.mean = mean
        self._size, self._stride = size, max(1, -(-size // SAMPLE))
        self._last: dict[int, tuple[int, Doubles]] = {}
        """The worker and the sample of the last gradient, by the position of the sample's first value."""

    def meet(self, worker: int, io: Payload) -> Doubles:
        """What a gradient, or what `io` has of it, and the last one of another worker add to `learn`."""
        sums = np.zeros(3)
        for part, values in parts(io, 0, self._size):
            first = -(-part.start // self._stride) * self._stride
            sample = _wide(values[first - part.start :: self._stride])
            other, before = self._last.get(first, (worker, sample))
            if other != worker and before.size == sample.size:
                with np.errstate(all="ignore"):  # a run that diverges is answered, too
                    sums += sample @ before, sample @ sample, before @ before
            self._last[first] = worker, sample
        return sums

    def learn(self, sums: Doubles) -> None:
        """A gradient was met as a whole: the scalar product with the one before, and the squares of both."""
        product, *squares = map(float, sums)
        if all(square > 0 and math.isfinite(square) for square in squares):
            cosine = product / math.sqrt(squares[0]) / math.sqrt(squares[1])
            self.mean += SMOOTHING * (cosine - self.mean)


def _wide(values: Buffer) -> Doubles:
    """A copy of values in fp32 or bf16."""
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)
