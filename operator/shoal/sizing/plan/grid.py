"""All combinations of workers, in blocks that fit into the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.sizing.availability import Floats

__all__ = ["Grid"]

BLOCK = 1 << 13


class Grid:
    """The combinations 0..limit of each of k pools, numbered with the last pool running fastest."""

    def __init__(self, limits: Sequence[int]) -> None:
        self.limits = tuple(limits)
        self.size = math.prod(limit + 1 for limit in limits)

    def __len__(self) -> int:
        return math.ceil(self.size / BLOCK)

    def __getitem__(self, number: int) -> Floats:
        """Block `number` as counts (k, m) with m <= `BLOCK`."""
        start = number * BLOCK
        # Division by a constant is several times faster with 32 bits, and exact grids are far smaller than that.
        left = np.arange(start, min(start + BLOCK, self.size), dtype=np.int64)
        if self.size < 2**31:
            left = left.astype(np.int32)
        counts = np.empty((len(self.limits), len(left)))
        for row in range(len(self.limits) - 1, -1, -1):
            base = self.limits[row] + 1
            up = left // base
            counts[row] = left - up * base
            left = up
        return counts
