"""Combining what several workers did apart from each other during an outage: Adasum (Maleki et al., arXiv 2006.02924).

What two differences have in common counts once, what is orthogonal is added. The combination so far is kept while more
come in, and replaced in the parameters by the one with one more.
"""

from __future__ import annotations

import math

import numpy as np

from shoal_trainer.ps import kernels
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.kernels import Buffer, Vector

SAME_OUTAGE_SECONDS = 30.0
"""Differences that come within this time of each other belong to the same outage."""


class Merger:
    """The combination of one outage; it forgets by itself when the next one comes."""

    def __init__(self) -> None:
        self._merged: Vector = aligned(0)
        self._at = -math.inf

    def merge(self, w: Vector, io: Buffer, now: float) -> bool:
        """Take the difference in `io` into `w`, and leave the new parameters in `io`; whether it had to be mended."""
        if self._merged.size != w.size or now - self._at > SAME_OUTAGE_SECONDS:
            self._merged = aligned(w.size)
        self._at = now
        aa, ad, dd = kernels.products(self._merged, io)
        of_a = 1 - ad / (2 * aa) if aa > 0 else 1.0
        of_d = 1 - ad / (2 * dd) if dd > 0 else 1.0
        return kernels.merge(w, self._merged, io, np.float32(of_a), np.float32(of_d))
