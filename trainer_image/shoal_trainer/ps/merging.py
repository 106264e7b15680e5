"""Combines the local updates of several workers after an outage with Adasum (Maleki et al., arXiv 2006.02924).

Parallel parts of two updates are averaged, orthogonal parts are added. Each new update replaces the combination so far
in the parameters by the combination that includes it.
"""

from __future__ import annotations

import math

import numpy as np

from shoal_trainer.ps import kernels
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.kernels import Vector
from shoal_trainer.ps.pieces import Payload, parts

SAME_OUTAGE_SECONDS = 30.0
"""Updates that arrive within this time of each other belong to the same outage."""


class Merger:
    """The combined update of one outage; it starts again from zero with the next one."""

    def __init__(self) -> None:
        self._combined: Vector = aligned(0)
        self._merged_at = -math.inf

    def merge(self, w: Vector, io: Payload, now: float) -> bool:
        """Merge the update in `io` into `w`, and write the new parameters to `io`.

        `now`: seconds. Returns whether `io` had non-finite values (replaced by 0).
        """
        if self._combined.size != w.size or now - self._merged_at > SAME_OUTAGE_SECONDS:
            self._combined = aligned(w.size)
        self._merged_at = now
        combined = self._combined
        sums = np.zeros(3)
        for part, values in parts(io):
            kernels.products(combined[part], values, sums)
        aa, ad, dd = sums.tolist()
        weight_a = 1 - ad / (2 * aa) if aa > 0 else 1.0
        weight_d = 1 - ad / (2 * dd) if dd > 0 else 1.0
        weights = np.float32(weight_a), np.float32(weight_d)
        non_finite = False
        for part, values in parts(io):
            non_finite |= kernels.merge(w[part], combined[part], values, *weights)
        return non_finite
