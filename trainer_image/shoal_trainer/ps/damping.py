"""How gradients that were computed on older parameters are applied, so that asynchrony stays stable.

With W workers a gradient normally arrives W - 1 updates after its parameters were read (one more if the worker overlaps
its push with the next step), in `rounds` half as many. A delay lowers the rate up to which training is stable, and
momentum lowers it further. So both are set by the *pace*, the normal staleness of the shard, and never by who is
connected:

- momentum lasts longer: SGD's mu becomes 1 - (1 - mu) / pace**1.25, with a learning rate that is lower by as much, so a
  gradient does as much as before, over more steps; Adam's beta_1 becomes 1 - (1 - beta_1) / pace**0.75;
- the learning rate is divided by (1 + 2 pace agreement)**p (below a pace of 1.5 by less, at 1 by nothing): gradients
  that arrive together and agree go as far as one that is longer, and noise does not. How far they agree Adam's moments
  tell, by which Adam itself would divide had it seen their mean; of momentum's a sample is compared (`agreement`);
- it is divided by (pace / free)**p if that is more, from a pace that is `free` on, and for a gradient that is staler
  than normal by staleness / pace as well. The velocity tells where gradients will be applied: without one, free is
  less, and 1 for SGD without momentum and for the differences that a worker's SGD makes;
- a gradient that is longer than usual is shortened to the usual length (`usual_length`), and one whose squares are too
  large for fp32 to nothing. Where asynchrony begins to oscillate, gradients grow; this stops it at any learning rate
  that one worker takes.

A gradient of the worker itself that was in flight does not count: the worker has added it to its parameters. With one
worker nothing is changed, and with two that wait for their answers only long gradients, and none with Adam, which
divides by the size of gradients itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal_trainer.ps.usual_length import UsualLength

SMOOTHING = 0.1
"""The share of the newest push in the mean staleness."""
STALENESS_GROWTH = 4.0
"""The mean staleness follows one push at most to this multiple of the pace, so it grows by 30 % per push at most."""


class Damped(NamedTuple):
    """What to apply of a gradient: a factor of the learning rate, and the pace for the momentum."""

    factor: float
    pace: float


class Damping:
    """The pace of a shard and the usual length of its gradients, learned from its pushes.

    `exponent`: p above. `free`: the pace up to which gradients that are noise need no lower rate. `divides`: whether
    the optimizer divides by the size of gradients, so that long ones do no harm to two that wait for their answers.
    """

    def __init__(self, exponent: float = 0.5, free: float = 1.0, *, divides: bool = False) -> None:
        self.exponent = exponent
        self.free, self.divides = free, divides
        self.agreement = 0.0
        """How far gradients agree, from 0 (noise) to 1, as far as the model tells."""
        self.length = UsualLength()
        """Of its gradients."""
        self._staleness: float | None = None

    @property
    def staleness(self) -> float:
        """The mean staleness; 0 before the first push."""
        return self._staleness or 0.0

    def pace(self, live_workers: int) -> float:
        """The normal staleness, at least 1. The number of workers counts where it rises faster than the mean.

        In rounds a gradient meets on average half of the others' in the parameters.
        """
        return max(1.0, (live_workers - 1) / 2, self.staleness)

    def rate(self, pace: float) -> float:
        """The factor of the learning rate at a normal staleness of `pace`."""
        # In rounds there are 1 + 2 pace workers. The mean staleness of three swings about 1: no rate jumps there.
        together = 1 + 2 * min(pace, 3 * (pace - 1)) * self.agreement
        return float(max(together, pace / self.free) ** -self.exponent)

    def apply(self, staleness: int, live_workers: int, length: float = math.nan) -> Damped:
        """How to apply a gradient of Euclidean length `length` (nan: unknown; inf: its square is none in fp32)."""
        # One worker that was paused, or met a restarted server, says nothing of the others.
        follows = min(staleness, STALENESS_GROWTH * self.pace(live_workers))
        before = follows if self._staleness is None else self._staleness
        self._staleness = before + SMOOTHING * (follows - before)
        pace = self.pace(live_workers)
        factor = self.rate(pace) * min(1.0, pace / max(1, staleness))
        if length > 0:
            usual = self.length.meets(length) if math.isfinite(length) else 0.0
            if pace > 1 or (live_workers > 1 and not self.divides):
                factor *= min(1.0, usual / length)
        return Damped(factor, pace)
