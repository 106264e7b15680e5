"""What spot will do until the deadline, from the rest of the trace: a lower quantile, given how many there are now.

A run must not know its own future: the windows that overlap with its own eighth of the trace are left out.
"""

from __future__ import annotations

import numpy as np

from shoal.sizing.availability import Floats
from shoal.sizing.simulate.replay import Supply

__all__ = ["Forecast"]

BLOCKS = 8
LEVELS = 5  # kinds of beginnings: by the part of the wanted nodes that is there
LENGTHS = 24
ENOUGH = 40  # windows of a kind, else all of them


class Forecast:
    """Quantiles of the mean number of spot workers, at most `most`, over times up to `horizon` steps of the replay."""

    def __init__(self, source: Supply, most: int, horizon: int, quantile: float) -> None:
        self._lengths = np.unique(np.geomspace(1, max(horizon, 2), LENGTHS).astype(int))
        self._trace, self._most = source.trace, max(most, 1)
        self._block = source.offset * BLOCKS // source.lengths[source.trace]
        self._table = np.empty((len(source.there), BLOCKS, len(self._lengths), LEVELS))
        for number, size in enumerate(source.lengths):
            nodes = np.minimum(source.there[number, :size], most).astype(np.float64)
            for block in range(BLOCKS):
                outside = _outside(int(size), block, horizon)
                for row, length in enumerate(self._lengths):
                    self._table[number, block, row] = self._quantiles(nodes, outside, int(length), quantile)

    def low(self, steps: int, present: Floats) -> Floats:
        """(r,) mean spot workers over the next `steps` that are there at least with the confidence."""
        row = min(int(np.searchsorted(self._lengths, max(steps, 1))), len(self._lengths) - 1)
        return np.asarray(self._table[self._trace, self._block, row, self._level(present)])

    def _level(self, present: Floats) -> np.ndarray:
        return np.asarray(np.minimum((present / self._most * (LEVELS - 1)).astype(int), LEVELS - 1))

    def _quantiles(self, nodes: Floats, outside: np.ndarray, length: int, quantile: float) -> Floats:
        twice = np.concatenate([[0.0], np.cumsum(np.concatenate([nodes, nodes]))])
        times = max(min(length, len(nodes)), 1)
        means = (twice[times : times + len(nodes)] - twice[: len(nodes)]) / times
        known, level = means[outside], self._level(nodes)[outside]
        found = np.empty(LEVELS)
        for kind in range(LEVELS):
            alike = known[level == kind]
            found[kind] = np.quantile(alike if len(alike) >= ENOUGH else known, quantile)
        return found


def _outside(size: int, block: int, horizon: int) -> np.ndarray:
    """(size,) whether a window of `horizon` that begins there stays clear of runs that begin in the block."""
    first, last = block * size // BLOCKS, (block + 1) * size // BLOCKS + horizon
    at = np.arange(size)
    inside = ((at - first + horizon) % size) < (last - first + horizon)
    return ~inside if (~inside).sum() >= size // 8 else ((at - first) % size) >= (last - first - horizon)
