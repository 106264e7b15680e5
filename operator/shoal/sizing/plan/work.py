"""How much is to be trained: a number of steps or samples, or until a loss is reached. Validated frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.beside import Beside
from shoal.sizing.speed.efficiency import Efficiency


@dataclass(frozen=True)
class StepWork:
    """A number of steps (mini-batches of one worker) or of samples; with both, the first to be reached.

    `sigma`: standard deviation of the logarithm of the samples. `efficiency`: how the samples depend on the number of
    workers, where the job ends by a loss or metric; None: they do not. `beside`: what is to be done beside them.
    """

    steps: float | None = None
    samples: float | None = None
    sigma: float = 0.0
    efficiency: Efficiency | None = None
    beside: Beside | None = None

    def __post_init__(self) -> None:
        amounts = [amount for amount in (self.steps, self.samples) if amount is not None]
        if not amounts:
            raise UsageError("the work must be given as steps or as samples")
        for amount in amounts:
            if not (math.isfinite(amount) and amount >= 1):
                raise UsageError(f"there must be at least 1 step or sample of work left, not {amount}")

    def iterations(self, batch: Floats, workers: Floats) -> Floats:
        """(m,) steps for weighted batch sizes (m,) and numbers of workers (m,)."""
        steps = np.full(np.shape(workers), math.inf if self.steps is None else float(self.steps))
        if self.beside is not None and self.steps is not None:
            steps = steps + self.beside.samples(steps * batch, workers) / batch
        return steps if self.samples is None else np.minimum(steps, self.samples_of(workers) / batch)

    def samples_of(self, workers: Floats | float, z: Floats | float = 0.0) -> Any:
        """The samples that so many workers need, `z` standard deviations of the efficiency from the median.

        With those that they could train in the time of what is to be done beside.
        """
        if self.samples is None:
            return None
        needed = (
            self.samples if self.efficiency is None else self.samples * self.efficiency.factor(workers, z)
        )
        return needed if self.beside is None else needed + self.beside.samples(needed, workers)

    def spread(self, workers: Floats) -> Floats:
        """(m,) standard deviation of the logarithm of the work."""
        own = np.full(np.shape(workers), self.sigma)
        if self.efficiency is not None:
            own = np.hypot(own, self.efficiency.spread(workers))
        return np.asarray(np.hypot(own, self.beside_spread(workers)))

    def beside_spread(self, workers: Floats) -> Floats:
        """(m,) the part of it that what is beside has; of steps, as if it were for one epoch."""
        if self.beside is None:
            return np.zeros(np.shape(workers))
        left = self.beside.per_epoch if self.samples is None else self.samples
        return np.asarray(self.beside.spread(left, workers))

    @property
    def is_random(self) -> bool:
        """Whether the amount of work is uncertain."""
        parts = (self.efficiency, self.beside)
        return self.sigma > 0 or any(part is not None and part.sigma > 0 for part in parts)

    def counts_samples(self, batch: float) -> bool:
        """Whether the samples, rather than the steps, end the work for this batch size."""
        if self.samples is None:
            return False
        return self.steps is None or self.samples / batch <= self.steps


@dataclass(frozen=True)
class LossWork:
    """Train until the loss is `target`, along spotDNN's curve.

    loss(j) = (r2 b + r3) sqrt(N) / (j + r1) + r4 for N workers and the weighted batch size b. `batch_range` is the
    range of the fit: outside it the answer is nan. `done` is the loss reached so far.
    """

    target: float
    r1: float
    r2: float
    r3: float
    r4: float
    batch_range: tuple[float, float] | None = None
    done: float | None = None

    def __post_init__(self) -> None:
        for name in ("target", "r1", "r2", "r3", "r4"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise UsageError(f"{name} of the loss curve must be a finite number, not {value}")
        if self.target <= self.r4:
            raise UsageError(
                f"a loss of {self.target:g} is out of reach: the loss curve levels off at {self.r4:g}; "
                f"ask for a loss above {self.r4:g}"
            )
        if self.done is not None and self.done <= self.target:
            raise UsageError(
                f"a loss of {self.target:g} is reached already ({self.done:g}): nothing is left to plan"
            )

    def iterations(self, batch: Floats, workers: Floats) -> Floats:
        """(m,) steps; `nan` for fewer than one step, or outside the fitted range."""
        amplitude = self.r2 * batch + self.r3
        amplitude *= np.sqrt(workers)
        steps = amplitude / (self.target - self.r4)
        if self.done is not None:
            steps -= amplitude / (self.done - self.r4)
        else:
            steps -= self.r1
        bad = ~(steps >= 1.0)
        if self.batch_range is not None:
            low, high = self.batch_range
            bad |= (batch < low * (1 - 1e-9)) | (batch > high * (1 + 1e-9))
        steps[bad] = np.nan
        return np.asarray(steps)

    def spread(self, workers: Floats) -> Floats:
        """(m,) zero: the curve counts as exact."""
        return np.zeros(np.shape(workers))

    @property
    def is_random(self) -> bool:
        """The curve counts as exact."""
        return False


Work = StepWork | LossWork
