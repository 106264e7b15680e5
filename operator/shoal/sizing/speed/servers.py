"""What the parameter servers can do: the cost of an update, from their busy seconds or from measured clusters.

    u = alpha * tensors + beta * parameters       seconds that one update keeps one server busy
    C = servers^s / u                             updates a second of all servers
    V = (A^-p + C^-p)^(-1/p)                      the cluster's steps a second, A: the workers alone

Busy seconds and updates of the shards give u and C directly, at any number of workers. Else clusters that are slower
than the sum of their workers do: one row is information. Both update the same posterior (Gauss-Newton around a prior),
so what is not measured keeps the prior's width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Model

__all__ = ["Cluster", "Load", "ServerModel", "busy", "soft_min"]

Floats = NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@dataclass(frozen=True)
class Load:
    """Measured busy seconds of a shard for one update of a model that `servers` share."""

    model: Model
    servers: int
    seconds: float
    updates: float


@dataclass(frozen=True)
class Cluster:
    """A measured cluster: `workers` that make `alone` steps/s together without contention made `speed` steps/s.

    `alone_sigma` is the standard deviation of ln(alone); clusters of one `series` share their deviations.
    """

    model: Model
    workers: float
    servers: int
    alone: float
    speed: float
    alone_sigma: float = 0.0
    series: str = ""


def soft_min(demand: Floats, cap: Floats | float, sharpness: float) -> Floats:
    """A smooth minimum (demand^-p + cap^-p)^(-1/p) of two speeds: 0 where demand is 0, at most either one."""
    if np.isinf(sharpness):
        return np.asarray(np.minimum(demand, cap))
    ratio = np.asarray(demand / cap)
    # Factoring out the smaller one keeps powers from overflowing.
    worst = np.where(ratio <= 1.0, np.minimum(ratio, 1.0), np.minimum(1.0, 1.0 / np.maximum(ratio, 1.0)))
    return np.asarray(np.minimum(demand, cap) * (1.0 + worst**sharpness) ** (-1.0 / sharpness))


def busy(speed: Floats, alone: Floats, sharpness: float) -> Floats:
    """How much the servers' capacity determines the speed, d ln(speed) / d ln(capacity): 0 far below it, 1 at it."""
    if np.isinf(sharpness):
        return np.asarray(np.where(speed < alone, 1.0, 0.0))
    return np.asarray(1.0 - np.minimum(speed / alone, 1.0) ** sharpness)


class ServerModel:
    """The posterior of (ln alpha, ln beta, ln(p - 1), s) and of each model's deviation from the form."""

    def __init__(self, loads: Sequence[Load] = (), clusters: Sequence[Cluster] = ()) -> None:
        self._loads, self._clusters = list(loads), list(clusters)
        everything: list[Load | Cluster] = [*self._loads, *self._clusters]
        self.names = sorted({each.model.fingerprint for each in everything})
        self._mean = np.concatenate([priors.SERVER_MEAN, np.zeros(len(self.names))])
        spread = np.concatenate([priors.SERVER_SIGMA, np.full(len(self.names), priors.SERVER_MODEL)])
        self._precision = np.diag(1 / spread**2)
        self.theta, self.covariance = self._mean.copy(), np.diag(spread**2)
        self.measured = {
            name: max(each.servers for each in everything if each.model.fingerprint == name)
            for name in self.names
        }
        if everything:
            self._fit()

    @property
    def sharpness(self) -> float:
        """How sharply the speed bends to the capacity."""
        return float(1 + math.exp(min(self.theta[2], 4.0)))

    @property
    def scaling(self) -> float:
        """The exponent of the number of servers."""
        return float(np.clip(self.theta[3], 0.0, 1.0))

    def capacity(self, model: Model, servers: int) -> tuple[float, float]:
        """Updates a second of so many servers, and the standard deviation of its logarithm."""
        mean, slope = self._log_capacity(model, servers, self.theta)
        variance = float(slope @ self.covariance @ slope)
        if model.fingerprint not in self.names:
            variance += priors.SERVER_MODEL**2
        return math.exp(mean), math.sqrt(variance)

    def update_seconds(self, model: Model) -> float:
        """Seconds that one update keeps a single server busy."""
        return 1 / self.capacity(model, 1)[0]

    def speed(self, cluster: Cluster) -> tuple[float, float]:
        """Steps/s of a cluster, and the standard deviation of its logarithm without noise.

        Over the whole distribution of the capacity, by quadrature: where it is uncertain, servers that do not limit the
        cluster by the best guess still may, and the tangent there says nothing of it.
        """
        capacity, sigma = self.capacity(cluster.model, cluster.servers)
        _, slope, hangs = self._log_speed(cluster, self.theta)
        caps = capacity * np.exp(sigma * _NODES)
        logs = np.log(soft_min(np.full(len(caps), cluster.alone), caps, self.sharpness))
        mean = float(_WEIGHTS @ logs)
        variance = float(_WEIGHTS @ (logs - mean) ** 2)
        variance += ((1 - hangs) * cluster.alone_sigma) ** 2 + slope[2] ** 2 * self.covariance[2, 2]
        return math.exp(mean), math.sqrt(variance)

    # -- fitting ------------------------------------------------------------------------------------------------

    def _log_capacity(self, model: Model, servers: int, theta: Floats) -> tuple[float, Floats]:
        """Ln C and its derivatives."""
        tensors = math.exp(theta[0]) * model.tensors
        parameters = math.exp(theta[1]) * model.parameters
        slope = np.zeros(len(theta))
        slope[0], slope[1] = -tensors / (tensors + parameters), -parameters / (tensors + parameters)
        slope[3] = math.log(servers)
        mean = theta[3] * math.log(servers) - math.log(tensors + parameters)
        if model.fingerprint in self.names:
            at = len(priors.SERVER_MEAN) + self.names.index(model.fingerprint)
            slope[at] = -1.0
            mean -= theta[at]
        return mean, slope

    def _log_speed(self, cluster: Cluster, theta: Floats) -> tuple[float, Floats, float]:
        """Ln V, its derivatives, and how much V hangs on C: d ln V / d ln C."""
        cap, slope = self._log_capacity(cluster.model, cluster.servers, theta)
        alone, p = math.log(cluster.alone), 1 + math.exp(min(theta[2], 4.0))
        low, high = -p * alone, -p * cap
        top = max(low, high)
        mixed = top + math.log(math.exp(low - top) + math.exp(high - top))
        hangs = math.exp(high - mixed)
        slope = slope * hangs
        # d/dp of -1/p ln(A^-p + C^-p)
        by_p = mixed / p**2 + ((1 - hangs) * alone + hangs * cap) / p
        slope[2] = by_p * (p - 1)
        return -mixed / p, slope, hangs

    def _fit(self) -> None:
        series: dict[str, int] = {}
        for cluster in self._clusters:
            series[cluster.series] = series.get(cluster.series, 0) + 1
        theta, damping, best = self._mean.copy(), 1e-2, math.inf
        H = self._precision
        for _ in range(priors.MOST_ITERATIONS):
            gradient, hessian, loss = self._normal(theta, series)
            if loss < best:
                kept, best_gradient, H, gain = theta, gradient, hessian, best - loss
                best, damping = loss, max(damping / 10, 1e-9)
                if gain < 1e-9 * (1 + loss):
                    break
            else:
                damping *= 10
                if damping > 1e9:
                    break
            theta = kept + np.linalg.solve(H + damping * np.diag(np.diag(H)), best_gradient)
        self.theta, self.covariance = kept, np.linalg.inv(H)

    def _normal(self, theta: Floats, series: dict[str, int]) -> tuple[Floats, Floats, float]:
        """Gradient (downhill), Gauss-Newton matrix and value of half the negative log posterior."""
        away = theta - self._mean
        gradient, H = -self._precision @ away, self._precision.copy()
        loss = float(away @ self._precision @ away) / 2
        for load in self._loads:
            mean, slope = self._log_capacity(load.model, load.servers, theta)
            weight = 1 / (priors.LOAD_NOISE**2 + 1 / max(load.updates, 1.0))
            r = -math.log(load.seconds) - mean
            gradient, H, loss = (
                gradient + weight * r * slope,
                H + weight * np.outer(slope, slope),
                loss + weight * r * r / 2,
            )
        for cluster in self._clusters:
            mean, slope, hangs = self._log_speed(cluster, theta)
            noise = priors.CLUSTER_NOISE**2 + ((1 - hangs) * cluster.alone_sigma) ** 2
            weight = 1 / (noise * series[cluster.series] ** priors.SERIES)
            r = math.log(cluster.speed) - mean
            gradient, H, loss = (
                gradient + weight * r * slope,
                H + weight * np.outer(slope, slope),
                loss + weight * r * r / 2,
            )
        return gradient, H, loss
