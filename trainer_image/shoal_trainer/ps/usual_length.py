"""How long gradients usually are, so that one which is too long can be told (`damping`).

Lengths fall as a model learns, and grow where asynchrony begins to oscillate: so the usual length falls as they do, and
grows slowly whatever comes. That keeps it below the mean of lengths that vary, which is part of what makes high rates
stable. Alone it would sink to the short ones where more than 1 in 11 is short (a hinge that most samples satisfy, a
rare class), and the batches with something to learn would count for nothing. So it is never less than a share of the
root mean square.
"""

from __future__ import annotations

import math
from statistics import fmean, median_low

FIRST = 11
"""It begins as the median of so many, or the share below, without the longest: the first gradient may be one of the
short ones, and one that is far too long is to be shortened among them, too."""
SMOOTHING = 0.02
"""The share of the newest length, and of its square, in the means."""
GROWTH = 1.002
"""At most by this factor per push."""
SHARE = 0.6
"""Of the root mean square. It counts where lengths vary by more than half, which is what they do on digits."""
OUTLIER = 10.0
"""A length counts as at most so many root mean squares in it."""


class UsualLength:
    """Learned from the lengths of gradients, finite and above 0, as they come."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._first: list[float] = []
        self._square = 0.0

    def load(self, value: float | None) -> None:
        """Take over that of a snapshot; None: the snapshot does not tell it, so what is known stays."""
        if value is not None:
            self._begin([value] * FIRST)

    def meets(self, length: float) -> float:
        """What is usual as a gradient of this length arrives, of which it is then learned."""
        if self.value is None or len(self._first) < FIRST:
            return self._begin([*self._first, length])
        usual, square = self.value, length * length
        self._square += SMOOTHING * (min(square, OUTLIER**2 * self._square) - self._square)
        follows = max(usual + SMOOTHING * (length - usual), SHARE * math.sqrt(self._square))
        self.value = min(GROWTH * usual, follows)
        return usual

    def _begin(self, first: list[float]) -> float:
        self._first, usual = first, sorted(first)[:-1] or first
        self._square = fmean(length * length for length in usual)
        self.value = max(median_low(first), SHARE * math.sqrt(self._square))
        return self.value
