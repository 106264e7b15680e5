"""Lifetimes of spot workers in a pool, including simultaneous losses.

Revocations are not a Poisson process: many happen in the first hour, and a capacity shortage takes many nodes of a
pool together. So the base is the empirical survival curve (Kaplan and Meier 1958), censored at nodes still alive.
Simultaneous losses give the rate of shared shocks. A Weibull curve is used if it fits within the noise of the
empirical one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize

from shoal.errors import NotEnoughData, UsageError

__all__ = ["Lifetimes", "kaplan_meier"]

Floats = NDArray[np.float64]

LEAST_LOST = 5  # fewer losses do not show the shape of a curve
WEIBULL_LOST = 20


def kaplan_meier(seconds: Floats, lost: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Give the times of losses (k,) and the survival right after each (k,)."""
    times = np.unique(seconds[lost])
    at_risk = np.array([(seconds >= t).sum() for t in times], dtype=np.float64)
    deaths = np.array([((seconds == t) & lost).sum() for t in times], dtype=np.float64)
    return times, np.asarray(np.cumprod(1 - deaths / at_risk), dtype=np.float64)


@dataclass
class Lifetimes:
    """Survival of one pool's nodes, from observed lifetimes.

    Args:
        prior_per_hour: prior revocations per node and hour (`interruptionsPerHour`).
        prior_weight: weight of the prior in node-hours.

    """

    prior_per_hour: float = 0.05
    prior_weight: float = 20.0
    notes: list[str] = field(default_factory=list, init=False)
    shock_per_hour: float = field(default=0.0, init=False)
    shock_share: float = field(default=0.0, init=False)
    weibull: tuple[float, float] | None = field(default=None, init=False)  # (shape, scale in s)
    _times: Floats = field(default_factory=lambda: np.empty(0), init=False, repr=False)
    _survival: Floats = field(default_factory=lambda: np.empty(0), init=False, repr=False)

    def fit(
        self, seconds: ArrayLike, lost: ArrayLike, ended_at: ArrayLike | None = None, together: float = 300.0
    ) -> Self:
        """Fit to lifetimes (n,) in s; `lost` (n,) is whether the node was revoked, or still alive at the end.

        `ended_at` (n,), the wall-clock time in s of each end, identifies shocks: losses within `together` s of each
        other.
        """
        t, d = np.asarray(seconds, dtype=np.float64), np.asarray(lost, dtype=bool)
        if t.shape != d.shape or t.ndim != 1 or len(t) == 0:
            raise NotEnoughData("no lifetime is known: give at least one, and as many `lost` as lifetimes")
        if not np.all(np.isfinite(t) & (t > 0)):
            raise UsageError(
                "every lifetime must be a positive number of seconds: remove or correct the others"
            )
        self.notes = []
        self._times, self._survival = kaplan_meier(t, d)
        hours = t.sum() / 3600
        self._rate = (d.sum() + self.prior_per_hour * self.prior_weight) / (hours + self.prior_weight)
        self._few = bool(d.sum() < LEAST_LOST)
        if self._few:
            self.notes.append(
                f"{int(d.sum())} revocations were seen in {hours:.0f} node-hours: too few for a curve, "
                f"a constant {self._rate:.3g} an hour is assumed"
            )
        self._end = float(t.max())
        self.weibull = None
        if d.sum() >= WEIBULL_LOST:
            self._try_weibull(t, d)
        if ended_at is not None:
            self._shocks(np.asarray(ended_at, dtype=np.float64), t, d, together)
        return self

    def survival(self, seconds: ArrayLike, age: float = 0.0) -> Floats:
        """Probability that a node of this age (s) lives for `seconds` more."""
        s = np.asarray(seconds, dtype=np.float64)
        return np.asarray(self._beyond(s + age) / np.maximum(self._beyond(np.asarray(age)), 1e-12))

    def sample(self, nodes: int, runs: int, seed: int = 0) -> Floats:
        """Draw (runs, nodes) lifetimes in s (inf: beyond the observed range), with shared shocks within a run."""
        rng = np.random.default_rng(seed)
        own = self._quantile(rng.random((runs, nodes)))
        if self.shock_per_hour > 0:
            at = rng.exponential(3600 / self.shock_per_hour, size=(runs, 1))
            own = np.where(rng.random((runs, nodes)) < self.shock_share, np.minimum(own, at), own)
        return own

    def _beyond(self, s: Floats) -> Floats:
        if self.weibull is not None:
            shape, scale = self.weibull
            return np.asarray(np.exp(-((s / scale) ** shape)))
        if self._few:
            return np.asarray(np.exp(-self._rate * s / 3600))
        index = np.searchsorted(self._times, s, side="right")
        curve = np.concatenate([[1.0], self._survival])[index]
        # Beyond the longest observed lifetime, the mean rate is assumed.
        return np.asarray(curve * np.exp(-self._rate * np.maximum(s - self._end, 0.0) / 3600))

    def _quantile(self, u: Floats) -> Floats:
        """Lifetimes for survival probabilities u."""
        if self.weibull is not None:
            shape, scale = self.weibull
            return np.asarray(scale * (-np.log(u)) ** (1 / shape))
        tail = -np.log(u) * 3600 / max(self._rate, 1e-12)
        if self._few:
            return np.asarray(tail)
        # The first time at which the curve is at or below u.
        index = np.searchsorted(-self._survival, -u, side="left")
        last = max(self._survival[-1], 1e-300)  # 0 if the longest lifetime ended: then all are inside
        beyond = self._end - np.log(np.maximum(u / last, 1e-300)) * 3600 / max(self._rate, 1e-12)
        inside = np.append(self._times, np.inf)[index]
        return np.asarray(np.where(index < len(self._times), inside, beyond))

    def _try_weibull(self, t: Floats, d: NDArray[np.bool_]) -> None:
        def negative_log_likelihood(z: Floats) -> float:
            shape, scale = np.exp(z)
            x = t / scale
            return float(-(d * (np.log(shape / scale) + (shape - 1) * np.log(x))).sum() + (x**shape).sum())

        found = minimize(negative_log_likelihood, [0.0, np.log(t.mean())], method="Nelder-Mead")
        shape, scale = np.exp(found.x)
        fitted = np.exp(-((self._times / scale) ** shape))
        before = np.concatenate([[1.0], self._survival[:-1]])
        # Kolmogorov's distance with the 5 % bound, lowered for two fitted parameters (Lilliefors).
        distance = float(np.max(np.maximum(np.abs(fitted - self._survival), np.abs(fitted - before))))
        if distance <= 0.9 / np.sqrt(d.sum()):
            self.weibull = (float(shape), float(scale))
        else:
            self.notes.append(
                f"a Weibull curve misses the lifetimes by {distance:.2f}: the empirical curve is used"
            )

    def _shocks(self, ended: Floats, t: Floats, d: NDArray[np.bool_], together: float) -> None:
        """A shock: 3 or more losses within `together` s that take at least a third of the nodes then alive."""
        ends = np.sort(ended[d])
        if len(ends) < 3:
            return
        started = ended - t
        clusters = np.split(ends, np.nonzero(np.diff(ends) > together)[0] + 1)
        hits, shares = 0, []
        for cluster in clusters:
            alive = int(((started < cluster[0]) & (ended >= cluster[0])).sum())
            if len(cluster) >= 3 and len(cluster) * 3 >= alive:
                hits += 1
                shares.append(len(cluster) / max(alive, len(cluster)))
        watched = (ended.max() - started.min()) / 3600
        if hits and watched > 0:
            self.shock_per_hour, self.shock_share = hits / watched, float(np.mean(shares))
            self.notes.append(
                f"{hits} time{'s' if hits > 1 else ''} in {watched:.0f} hours {100 * self.shock_share:.0f} % of the "
                "pool's nodes were lost together"
            )
            # Losses in shocks are not single losses: the nodes count as alive at that time.
            single = d.copy()
            for cluster in clusters:
                alive = int(((started < cluster[0]) & (ended >= cluster[0])).sum())
                if len(cluster) >= 3 and len(cluster) * 3 >= alive:
                    single &= ~np.isin(ended, cluster)
            self._times, self._survival = kaplan_meier(t, single)
            self._few = bool(single.sum() < LEAST_LOST)
            self._rate = (single.sum() + self.prior_per_hour * self.prior_weight) / (
                t.sum() / 3600 + self.prior_weight
            )
            self.weibull = None
