"""The number of steps to a target loss, from the loss curve so far.

spotDNN ("spotDNN: Provisioning Spot Instances for Predictable Distributed DNN Training in the Cloud",
IWQoS 2023) describes the loss of asynchronous SGD with N workers and a weighted batch b after j steps as

    loss(j) = (g2 b + g3) sqrt(N) / (j + g1) + g5

For one running job b and N are known, so the curve is `k sqrt(N) / (j + d) + floor` with three unknowns. They are
fitted with a robust loss and bounds; the interval comes from refits with residual signs redrawn in blocks (a wild
bootstrap, since early losses are noisier and neighbors are correlated).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import median_filter
from scipy.optimize import least_squares

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.types import Interval

__all__ = ["LossCurve", "StepsToTarget"]

Floats = NDArray[np.float64]

LEAST_POINTS = 8
FARTHEST = 20.0  # the farthest prediction, as a multiple of the steps so far
REFITS = 60


@dataclass(frozen=True)
class StepsToTarget:
    """Steps from now to the target, or why there is none."""

    steps: Interval | None
    reachable: bool
    note: str


@dataclass
class LossCurve:
    """The loss as a function of the steps, for one job.

    After `fit`: `amplitude`, `delay`, `floor` of `loss(j) = amplitude sqrt(N) / (j + delay) + floor`.
    """

    seed: int = 0
    amplitude: float = math.nan
    delay: float = math.nan
    floor: float = math.nan

    def fit(self, steps: ArrayLike, losses: ArrayLike, workers: ArrayLike = 1) -> Self:
        """Fit to losses (n,) at steps (n,) taken with `workers` (n,) or one number."""
        j, y = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)
        root = np.sqrt(np.broadcast_to(np.asarray(workers, dtype=np.float64), j.shape))
        if j.shape != y.shape or j.ndim != 1:
            raise UsageError(f"give as many losses as steps, not {y.shape} and {j.shape}")
        good = np.isfinite(j) & np.isfinite(y) & (j >= 0) & np.isfinite(root) & (root > 0)
        j, y, root = j[good], y[good], root[good]
        if len(np.unique(j)) < LEAST_POINTS:
            raise NotEnoughData(
                f"the loss is known at {len(np.unique(j))} steps: wait until it is known at {LEAST_POINTS} or more"
            )
        order = np.argsort(j)
        j, y, root = j[order], y[order], root[order]
        if len(j) > 400:  # a long curve is reduced to medians of equal parts, for speed
            parts = np.array_split(np.arange(len(j)), 400)
            j, y, root = (np.array([np.median(v[p]) for p in parts]) for v in (j, y, root))
        y = _without_spikes(y)
        self._j, self._root, self._last = j, root, float(j[-1])
        theta = _solve(j, y, root, None)
        self._set(theta)
        fitted = self.loss(j, root**2)
        rest = (y - fitted) / (
            1 - self._leverage()
        )  # HC3: a fit is pulled towards its most influential points
        rng = np.random.default_rng(self.seed)
        block = max(1, round(len(j) ** (1 / 3)))
        self._refits = []
        for _ in range(REFITS):
            signs = np.repeat(rng.choice([-1.0, 1.0], size=math.ceil(len(j) / block)), block)[: len(j)]
            drawn = rest * signs
            self._refits.append(_solve(j, fitted + drawn, root, theta))
        return self

    def _leverage(self) -> Floats:
        """(n,) leverage: how much each loss determines its own fitted value, 0 to below 1."""
        over = self._root / (self._j + self.delay)
        jacobian = np.column_stack(
            [over, -self.amplitude * over / (self._j + self.delay), np.ones(len(over))]
        )
        q, _ = np.linalg.qr(jacobian / np.maximum(np.linalg.norm(jacobian, axis=0), 1e-300))
        return np.asarray(np.minimum((q**2).sum(axis=1), 0.9))

    def _set(self, theta: Floats) -> None:
        self.amplitude, self.delay, self.floor = (float(v) for v in theta)

    def loss(self, steps: ArrayLike, workers: ArrayLike = 1) -> Floats:
        """The fitted loss after `steps` with `workers`."""
        root = np.sqrt(np.asarray(workers, dtype=np.float64))
        return np.asarray(
            self.amplitude * root / (np.asarray(steps, dtype=np.float64) + self.delay) + self.floor
        )

    def steps_to(self, target: float, workers: float = 1, done: float | None = None) -> StepsToTarget:
        """Steps from `done` (the last step fitted, if not given) to the target loss with `workers`."""
        if not math.isfinite(target):
            raise UsageError(f"the target loss must be a number, not {target}")
        if not hasattr(self, "_refits"):
            raise NotEnoughData("the loss curve was not fitted: call fit first")
        now = self._last if done is None else done
        root = math.sqrt(workers)
        floors = np.array([t[2] for t in self._refits])
        if target <= self.floor:
            return StepsToTarget(
                None,
                False,
                f"a loss of {target:g} is out of reach: the curve levels off at {self.floor:.4g} "
                f"(90 %: {np.quantile(floors, 0.05):.4g} to {np.quantile(floors, 0.95):.4g}): choose a higher target",
            )
        if float(self.loss(now, workers)) <= target:
            return StepsToTarget(Interval(0.0, 0.0, 0.0), True, "the target loss is reached already")
        limit = FARTHEST * max(self._last - float(self._j[0]), 1.0)
        draws = np.array([_needed(t, target, root, now, limit) for t in self._refits])
        mean = _needed((self.amplitude, self.delay, self.floor), target, root, now, limit)
        low, high = float(np.quantile(draws, 0.05)), float(np.quantile(draws, 0.95))
        far = high >= limit
        note = (
            f"the target lies more than {FARTHEST:.0f} times as far ahead as the steps seen: this is a bound, not a "
            "prediction; ask again after more steps"
            if far
            else f"from {len(self._j)} losses up to step {self._last:.0f}"
        )
        return StepsToTarget(Interval(min(low, mean), mean, max(high, mean)), True, note)


def _without_spikes(y: Floats) -> Floats:
    """Replace outliers by the median of their neighbors (Hampel's identifier)."""
    smooth = median_filter(y, size=5, mode="reflect")
    away = np.abs(y - smooth)
    return np.where(away > 6 * 1.4826 * np.median(away) + 1e-12, smooth, y)


def _solve(j: Floats, y: Floats, root: Floats, start: Floats | None) -> Floats:
    """Robust least squares for amplitude > 0, delay > 0, floor >= 0 (a loss below zero if one was seen)."""
    lowest = float(y.min())
    floor = 0.0 if lowest >= 0 else lowest - abs(lowest)
    span = max(float(np.ptp(j)), 1.0)
    # Noise from the second differences, so that neither the slope nor a spike counts (Var = 6 sigma²).
    jumps = np.abs(np.diff(y, 2))
    scale = max(float(np.median(jumps)) * 1.4826 / np.sqrt(6), abs(float(np.median(y))) * 1e-3, 1e-12)

    def residuals(z: Floats) -> Floats:
        return np.asarray((np.exp(z[0]) * root / (j + np.exp(z[1])) + z[2] - y) / scale)

    low, high = [-40.0, math.log(span * 1e-4), floor], [60.0, math.log(span * 1e3), float(np.max(y))]
    bounds = (np.array(low), np.maximum(high, np.array(low) + 1e-6))

    def solve(guess: Floats, loss: str) -> Any:
        z0 = np.array([math.log(max(guess[0], 1e-12)), math.log(max(guess[1], 1e-12)), guess[2]])
        inside = np.clip(z0, bounds[0] + 1e-9, np.maximum(bounds[1] - 1e-9, bounds[0] + 2e-9))
        return least_squares(residuals, inside, bounds=bounds, loss=loss, f_scale=2.0, max_nfev=100)

    def curve(found: Any) -> Floats:
        return np.array([math.exp(found.x[0]), math.exp(found.x[1]), found.x[2]])

    if start is None:  # a convex-like loss finds the region, then the redescending loss ignores spikes
        height = float(np.median(y[: max(len(y) // 10, 3)]) - lowest)
        guesses = [np.array([height * d, d, 0.9 * lowest]) for d in (span / 30, span / 5, span)]
        start = curve(min((solve(guess, "soft_l1") for guess in guesses), key=lambda found: found.cost))
    return curve(solve(start, "cauchy"))


def _needed(
    theta: tuple[float, float, float] | Floats, target: float, root: float, now: float, limit: float
) -> float:
    amplitude, delay, floor = (float(v) for v in theta)
    if target <= floor:
        return limit
    return float(np.clip(amplitude * root / (target - floor) - delay - now, 0.0, limit))
