"""How many samples a job still needs to a target loss or metric, and how many more with more workers.

N asynchronous workers compute on older parameters than one, so they need more samples for the same loss, as large
batches do (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018): f(N) = 1 + k (N - 1) times those of
one. With e, the samples of a job divided by the f of the workers that made them, a curve of the metric is

    y(e) = limit + rest / (1 + e / d)^p

(p = 1: spotDNN, IWQoS 2023). The posterior of k, d and p is computed on a grid, with limit and rest by least squares in
each cell, so the fit has no start values and cannot diverge. k is learned where a job, or another one of its model, ran
with different numbers of workers; else its prior stays, and the answer says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Evaluation
from shoal.sizing.speed.posterior import Floats

__all__ = ["Efficiency", "WorkLeft", "samples_to_target"]


PENALTY, PENALTY_SIGMA = 0.17, 0.7
"""The prior of k: median, and standard deviation of its logarithm. Measured on the real shard with 4, 8 and 16 workers
in rounds: 0.17, and 0.07 to 0.43 in 90 %, of digits, MNIST, a table and words (docs/benchmarks/efficiency.md); a little
wider, since those are small."""
LEAST_POINTS = 5
MOST_POINTS = 200
MOST_WAY_LEFT = 0.25
"""Before three quarters of the way from the first value to the target, the beginning of a curve misleads."""
BEGINNING = 0.3
"""The part of the way from which a curve teaches k. From its start, that of an embedding, which is flat for a while, it
taught a k three times too large; what is left is foreseen from all of it."""
MOST_COUNTED = 8
"""Points beyond these sharpen nothing: the deviations of a real curve from the form are not independent."""
FARTHEST = 20.0
"""A target that needs more than this many times the samples so far cannot be foreseen."""
DRAWS = 20_000
"""Enough that the interval is of the curve: of 800, what few slow draws made of it changed fourfold with the seed."""
MISFIT = 0.15
"""Standard deviation of the logarithm of what is left, since no real curve is of the form: of exponential ones, the
90 % interval at 0.8 of the way held 95 % of the ends with it, and 8 % without it and with p up to 4."""
NOISE = 0.005
"""Least deviation of a value from the curve, as a part of the range of values."""

_PENALTIES = np.geomspace(0.01, 3.0, 25)
_DELAYS = np.geomspace(2e-2, 100.0, 56)
"""d, as parts of the e seen so far: with steps twice as wide, what is left leapt as a curve grew past them."""
_POWERS = np.array([0.5, 1.0, 2.0, 4.0, 8.0])
"""p; the largest ones are close to an exponential."""


@dataclass(frozen=True)
class Efficiency:
    """How many samples N asynchronous workers need for the same loss: 1 + penalty (N - 1) times those of one.

    `sigma`: standard deviation of ln(penalty). `reference`: the number of workers for which the work is counted.
    """

    penalty: float
    sigma: float = 0.0
    reference: float = 1.0

    def __post_init__(self) -> None:
        if not (
            self.penalty >= 0 and self.sigma >= 0 and self.reference >= 1 and math.isfinite(self.penalty)
        ):
            raise UsageError(
                f"an efficiency needs a penalty and a sigma >= 0 and a reference of 1 worker or more, not {self}"
            )

    def factor(self, workers: float | NDArray[np.float64], z: float | NDArray[np.float64] = 0.0) -> Any:
        """Samples with so many workers, relative to the reference; `z` standard deviations from the median."""
        penalty = self.penalty * np.exp(self.sigma * np.asarray(z))
        return (1 + penalty * np.maximum(np.asarray(workers) - 1, 0.0)) / (1 + penalty * (self.reference - 1))

    def spread(self, workers: NDArray[np.float64]) -> NDArray[np.float64]:
        """The standard deviation of ln(factor)."""

        def slope(number: Any) -> Any:
            extra = self.penalty * np.maximum(number - 1, 0.0)
            return extra / (1 + extra)

        return np.asarray(self.sigma * np.abs(slope(workers) - slope(self.reference)))


@dataclass(frozen=True)
class WorkLeft:
    """What is left to the target: `samples` of the reference number of workers; `sigma` is that of their logarithm.

    Both are of the curves that get there: where it never does, no workers help, and a plan that is to hold then, too,
    buys all in vain. `sigma` is that of the upper side, which a deadline asks for.
    `samples` None: it cannot be known yet; `why` says why. `learned`: whether the efficiency was measured.
    """

    samples: float | None
    sigma: float
    efficiency: Efficiency
    learned: bool
    why: str


@dataclass(frozen=True)
class _Fit:
    """A posterior over cells (k, d, p), each (cells,), with limit and rest and their covariance."""

    weight: Floats
    penalty: Floats
    delay: Floats
    power: Floats
    best: Floats
    """(cells, 2)"""
    root: Floats
    """(cells, 2, 2) of the covariance"""
    now: Floats


def samples_to_target(
    points: Sequence[Evaluation],
    target: float,
    *,
    rises: bool,
    workers: float = 1.0,
    others: Sequence[Sequence[Evaluation]] = (),
    seed: int = 0,
) -> WorkLeft:
    """The samples from the last point to the target.

    Args:
        points: of this job, by samples.
        target: the value at which it ends.
        rises: whether the metric rises to it.
        workers: the reference: `samples` are those of so many workers.
        others: the points of other jobs of the same model: what they say of k.
        seed: of the draws from the posterior.

    """
    prior = _prior()
    shared = _shared(prior, [_lesson(tuple(each), rises) for each in others])
    x, y, n = _series(points)
    if len(x) < LEAST_POINTS:
        known = f"{LEAST_POINTS} evaluations are needed to foresee when it ends, and there were {len(x)}"
        return WorkLeft(None, 0.0, _efficiency(shared, workers), _narrowed(shared, prior), known)
    fit = _fitted(x, y, n, shared, rises)
    penalty = _taught(x, y, n, shared, rises)
    efficiency, learned = _efficiency(penalty, workers), _narrowed(penalty, prior)
    reached = (y[-1] >= target) if rises else (y[-1] <= target)
    if reached:
        return WorkLeft(1.0, 0.0, efficiency, learned, "the target was reached")
    way = abs(y[0] - y[-1]) / max(abs(y[0] - target), 1e-300) if (y[-1] > y[0]) == rises else 0.0
    if way < 1 - MOST_WAY_LEFT:
        why = f"it has come {way:.0%} of the way: from {1 - MOST_WAY_LEFT:.0%} on its end can be foreseen"
        return WorkLeft(None, 0.0, efficiency, learned, why)
    drawn, limits = _draws(fit, target, rises, workers, seed)
    ends = drawn < FARTHEST * x[-1]
    if np.mean(ends) < 0.5:
        level = float(np.median(limits))
        why = (
            f"its curve seems to level off at {level:.4g}, before {target:g}"
            if np.mean(~np.isfinite(drawn)) > 0.5
            else f"the target is more than {FARTHEST:.0f} times as far as it has come"
        )
        return WorkLeft(None, 0.0, efficiency, learned, why)
    # It ends with an evaluation, so at the next one at the earliest.
    low, middle, high = np.maximum(np.quantile(drawn[ends], (0.05, 0.5, 0.95)), np.diff(x).min())
    why = f"from {len(x)} evaluations: {middle:,.0f} samples are left ({low:,.0f} to {high:,.0f} in 90 %)"
    if (part := f"{np.mean(ends):.0%}") != "100%":
        why += f", if it gets there at all ({part})"
    sigma = max(math.log(high / middle) / priors.Z90, MISFIT)
    return WorkLeft(max(float(middle), 1.0), sigma, efficiency, learned, why)


@lru_cache(maxsize=4096)
def _lesson(points: tuple[Evaluation, ...], rises: bool) -> Floats:
    """(k,) what the points of a job say of k. All other jobs of its model ask, and it changes once in an epoch."""
    x, y, n = _series(points)
    equal = np.ones(len(_PENALTIES))
    return _taught(x, y, n, equal, rises) if len(x) >= LEAST_POINTS else equal


def _shared(prior: Floats, lessons: Sequence[Floats]) -> Floats:
    """(k,) the prior with what other jobs say of k. They are of one model, and err together: n weigh as n^0.5.

    The one that says most counts whole, so what teaches nothing takes nothing from the others.
    """
    logs = sorted((np.log(np.maximum(each, 1e-300)) for each in lessons), key=np.ptp, reverse=True)
    total = np.log(prior)
    for number, log in enumerate(logs):
        total = total + ((number + 1) ** 0.5 - number**0.5) * log
    weight = np.exp(total - total.max())
    return np.asarray(weight / weight.sum())


def _prior() -> Floats:
    away = np.log(_PENALTIES / PENALTY) / PENALTY_SIGMA
    weight = np.exp(-(away**2) / 2)
    return np.asarray(weight / weight.sum())


def _series(points: Sequence[Evaluation]) -> tuple[Floats, Floats, Floats]:
    """Samples (increasing), values and workers; outliers replaced by the median of their neighbours."""
    good = sorted(
        (p for p in points if math.isfinite(p.value) and p.samples > 0 and p.workers > 0),
        key=lambda p: p.samples,
    )
    good = [p for p, after in zip_longest(good, good[1:]) if after is None or after.samples > p.samples]
    good = good[:: -max(1, math.ceil(len(good) / MOST_POINTS))][::-1]  # the last one counts
    x, y, n = (
        np.array([getattr(p, name) for p in good], dtype=np.float64)
        for name in ("samples", "value", "workers")
    )
    if len(y) >= LEAST_POINTS:
        padded = np.concatenate([y[2:0:-1], y, y[-2:-4:-1]])
        smooth = np.median(np.stack([padded[i : i + len(y)] for i in range(5)]), axis=0)
        away = np.abs(y - smooth)
        y = np.where(away > 6 * 1.4826 * np.median(away) + 1e-12 + 0.5 * np.abs(smooth), smooth, y)
    return x, y, n


def _fitted(x: Floats, y: Floats, n: Floats, weight: Floats, rises: bool) -> _Fit:
    """The posterior of the curve, `weight` (k,) the prior of the penalty."""
    factor = 1 + _PENALTIES[:, None] * np.maximum(n - 1, 0.0)
    e = np.cumsum(np.diff(x, prepend=0.0) / factor, axis=1)
    k, d, p = (
        axis.ravel() for axis in np.meshgrid(np.arange(len(_PENALTIES)), _DELAYS, _POWERS, indexing="ij")
    )
    delay = d * e[k, -1]
    shape = (1 + e[k] / delay[:, None]) ** -p[:, None]
    design = np.stack([np.ones_like(shape), shape], axis=2)
    normal = np.einsum("cni,cnj->cij", design, design) + 1e-9 * np.eye(2)
    best = np.linalg.solve(normal, np.einsum("cni,n->ci", design, y)[..., None])[..., 0]
    # A metric does not go below 0, or beyond 1 where all its values are parts of one.
    bound = 1.0 if rises and y.max() <= 1 and y.min() >= 0 else (0.0 if not rises and y.min() >= 0 else None)
    if bound is not None:
        beyond = (best[:, 0] > bound) if rises else (best[:, 0] < bound)
        alone = ((y - bound) * shape).sum(axis=1) / (shape**2).sum(axis=1)
        best = np.where(beyond[:, None], np.column_stack([np.full(len(alone), bound), alone]), best)
    off = y - np.einsum("cni,ci->cn", design, best)
    least = len(y) * (NOISE * max(float(np.ptp(y)), 1e-12)) ** 2
    sse = (off**2).sum(axis=1) + least
    wrong = (best[:, 1] > 0) if rises else (best[:, 1] < 0)
    counted = min(len(y), MOST_COUNTED)
    log = (
        np.log(np.maximum(weight[k], 1e-300)) - (counted - 2) / 2 * np.log(sse) + np.where(wrong, -50.0, 0.0)
    )
    chance = np.exp(log - log.max())
    variance = sse / max(len(y) - 3, 1) * len(y) / counted
    root = np.linalg.cholesky(np.linalg.inv(normal) * variance[:, None, None])
    return _Fit(chance / chance.sum(), _PENALTIES[k], delay, p, best, root, e[k, -1])


def _taught(x: Floats, y: Floats, n: Floats, weight: Floats, rises: bool) -> Floats:
    """(k,) what a curve teaches of the penalty, `weight` its prior: from where it has begun."""
    moved = np.abs(y - y[0]) >= BEGINNING * float(np.ptp(y))
    first = min(int(np.argmax(moved)), len(y) - LEAST_POINTS)
    before = x[first - 1] if first else 0.0
    return _marginal(_fitted(x[first:] - before, y[first:], n[first:], weight, rises))


def _marginal(fit: _Fit) -> Floats:
    """(k,) the posterior of the penalty."""
    return np.asarray(fit.weight.reshape(len(_PENALTIES), -1).sum(axis=1))


def _draws(fit: _Fit, target: float, rises: bool, workers: float, seed: int) -> tuple[Floats, Floats]:
    """(draws,) samples of the reference workers from now to the target (infinite: never), and limits of the curve."""
    rng = np.random.default_rng(seed)
    cell = rng.choice(len(fit.weight), DRAWS, p=fit.weight)
    limit, rest = (
        fit.best[cell] + np.einsum("cij,cj->ci", fit.root[cell], rng.standard_normal((DRAWS, 2)))
    ).T
    with np.errstate(all="ignore"):
        part = (target - limit) / rest
        there = fit.delay[cell] * (part ** (-1 / fit.power[cell]) - 1)
    there = np.where((part > 0) & (rest < 0 if rises else rest > 0), there, np.inf)
    left = np.maximum(there - fit.now[cell], 0.0) * np.exp(MISFIT * rng.standard_normal(DRAWS))
    return np.asarray(left * (1 + fit.penalty[cell] * max(workers - 1, 0.0))), limit


def _efficiency(weight: Floats, workers: float) -> Efficiency:
    logs = np.log(_PENALTIES)
    mean = float(weight @ logs)
    cell = float(logs[1] - logs[0]) / 2
    return Efficiency(
        math.exp(mean), math.hypot(math.sqrt(float(weight @ (logs - mean) ** 2)), cell), max(workers, 1.0)
    )


def _narrowed(weight: Floats, prior: Floats) -> bool:
    """Whether the penalty is known clearly better than before."""
    return _efficiency(weight, 1.0).sigma < 0.7 * _efficiency(prior, 1.0).sigma
