"""The Pareto front of time and cost: plans that no other plan beats in both."""

from __future__ import annotations

import numpy as np

from shoal.sizing.availability import Floats

__all__ = ["Front"]

SAMPLE = 256
"""Points of the first block, which are sorted first."""


class Front:
    """Points (seconds, cost) with the counts (k,) behind each; grows by blocks of evaluated combinations."""

    def __init__(self, pools: int) -> None:
        self.seconds: Floats = np.empty(0)
        self.cost: Floats = np.empty(0)
        self.counts: Floats = np.empty((pools, 0))
        self.variant = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.seconds)

    def add(self, seconds: Floats, cost: Floats, counts: Floats, variant: int) -> None:
        """Add a block (m,), (m,), (k, m); infinite points are not plans."""
        if len(self) == 0 and len(seconds) > SAMPLE:
            every = slice(None, None, -(-len(seconds) // SAMPLE))
            self.add(seconds[every], cost[every], counts[:, every], variant)
        if len(self):
            # The front dominates most points: drop them before sorting.
            best = np.concatenate([[np.inf], self.cost])  # of all points at most as slow
            candidates = np.flatnonzero(cost < best[np.searchsorted(self.seconds, seconds, side="right")])
        else:
            candidates = np.flatnonzero(np.isfinite(seconds))
        if len(candidates) == 0:
            return
        self._merge(
            seconds[candidates],
            cost[candidates],
            counts[:, candidates],
            np.full(len(candidates), variant, dtype=np.int64),
        )

    def merge(self, other: Front) -> None:
        """Add another front."""
        self._merge(other.seconds, other.cost, other.counts, other.variant)

    def _merge(self, seconds: Floats, cost: Floats, counts: Floats, variant: np.ndarray) -> None:
        seconds = np.concatenate([self.seconds, seconds])
        cost = np.concatenate([self.cost, cost])
        order = np.lexsort((cost, seconds))
        falling = cost[order]
        lowest_before = np.concatenate([[np.inf], np.minimum.accumulate(falling)[:-1]])
        kept = order[falling < lowest_before]
        self.seconds, self.cost = seconds[kept], cost[kept]
        self.counts = np.concatenate([self.counts, counts], axis=1)[:, kept]
        self.variant = np.concatenate([self.variant, variant])[kept]
