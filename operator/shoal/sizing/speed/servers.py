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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Model
from shoal.sizing.speed.posterior import MOST_ROUNDS, looseness

__all__ = ["Cluster", "Load", "PsModel", "ServerModel", "busy", "soft_min"]

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


@dataclass(frozen=True)
class PsModel:
    """The cost of one update (a push and a pull) of one model at a parameter server.

    `update_seconds`: time of one server for the whole model, so n servers do at most n^scaling / update_seconds
    updates per second; 0: no contention. `sharpness` >= 1: how sharply the speed bends from the sum of the workers to
    that cap (infinite: minimum of both). `scaling`: 1 if the parameters are spread evenly, else less.
    """

    update_seconds: float
    sharpness: float = 4.0
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.update_seconds) and self.update_seconds >= 0):
            raise UsageError(f"update_seconds must be a finite number >= 0, not {self.update_seconds}")
        if not self.sharpness >= 1:
            raise UsageError(f"sharpness must be at least 1, not {self.sharpness}")
        if not 0 <= self.scaling <= 1:
            raise UsageError(f"scaling must be between 0 and 1, not {self.scaling}")

    def limited(self, alone: Floats, servers: int, factor: Floats | float = 1.0) -> Floats:
        """The speed of workers that make `alone` steps/s behind so many servers, of `factor` times the capacity."""
        if self.update_seconds <= 0:
            return alone
        return soft_min(alone, servers**self.scaling / self.update_seconds * factor, self.sharpness)


class _Term(NamedTuple):
    """The logarithm of a speed: of which model, measured less predicted, derivatives, and weight (1 / variance)."""

    name: str
    error: float
    slope: Floats
    weight: float


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
        self._series = Counter(cluster.series for cluster in self._clusters)
        everything: list[Load | Cluster] = [*self._loads, *self._clusters]
        self.names = sorted({each.model.key for each in everything})
        self._mean = np.concatenate([priors.SERVER_MEAN, np.zeros(len(self.names))])
        spread = np.concatenate([priors.SERVER_SIGMA, np.full(len(self.names), priors.SERVER_MODEL)])
        self._precision = np.diag(1 / spread**2)
        self.theta, self.covariance = self._mean.copy(), np.diag(spread**2)
        self.measured = {
            name: max(each.servers for each in everything if each.model.key == name) for name in self.names
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
        if model.key not in self.names:
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
        if model.key in self.names:
            at = len(priors.SERVER_MEAN) + self.names.index(model.key)
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
        """The maximum of the posterior; models that the others do not explain are ones of a kind (`looseness`)."""
        usual = np.diag(self._precision)[-len(self.names) :].copy()
        loose = self._loosened(self._mean, None)
        for number in range(MOST_ROUNDS):
            self._precision[-len(self.names) :, -len(self.names) :] = np.diag(usual / loose**2)
            self._maximize()
            found = self._loosened(self.theta, loose)
            if number:  # as in `WorkerModel`
                found = np.maximum(found, loose)
            if np.array_equal(found > 1, loose > 1):
                break
            loose = found

    def _loosened(self, theta: Floats, loose: Floats | None) -> Floats:
        """(names,) how many times larger than usual a model's deviation is taken to be: from its errors without it.

        `loose`: what was taken for the present fit; None: there is none, and errors are those of the prior.
        """
        terms, size = self._terms(theta), len(priors.SERVER_MEAN)
        found = np.ones(len(self.names))
        for number, name in enumerate(self.names):
            mine = [term for term in terms if term.name == name]
            slopes = np.array([term.slope for term in mine])
            errors, weights = (
                np.array([getattr(term, part) for term in mine]) for part in ("error", "weight")
            )
            if loose is None:
                covariance = np.linalg.inv(self._precision)
            else:
                covariance = np.linalg.inv(self._hessian - (slopes.T * weights) @ slopes)
                errors = errors + slopes @ covariance @ (slopes.T @ (weights * errors))
            variances = 1 / weights + np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
            if loose is not None:
                own = priors.SERVER_MODEL * slopes[:, size + number]
                variances = variances - own**2 * (loose[number] ** 2 - 1)
            found[number] = looseness(errors, variances, priors.SERVER_MODEL)
        return found

    def _maximize(self) -> None:
        theta, damping, best = self._mean.copy(), 1e-2, math.inf
        H = self._precision
        for _ in range(priors.MOST_ITERATIONS):
            gradient, hessian, loss = self._normal(theta)
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
        self.theta, self._hessian, self.covariance = kept, H, np.linalg.inv(H)

    def _normal(self, theta: Floats) -> tuple[Floats, Floats, float]:
        """Gradient (downhill), Gauss-Newton matrix and value of half the negative log posterior."""
        away = theta - self._mean
        gradient, H = -self._precision @ away, self._precision.copy()
        loss = float(away @ self._precision @ away) / 2
        for term in self._terms(theta):
            gradient = gradient + term.weight * term.error * term.slope
            H = H + term.weight * np.outer(term.slope, term.slope)
            loss += term.weight * term.error**2 / 2
        return gradient, H, loss

    def _terms(self, theta: Floats) -> list[_Term]:
        """What was measured, beside what the parameters say of it."""
        terms = []
        for load in self._loads:
            mean, slope = self._log_capacity(load.model, load.servers, theta)
            weight = 1 / (priors.LOAD_NOISE**2 + 1 / max(load.updates, 1.0))
            terms.append(_Term(load.model.key, -math.log(load.seconds) - mean, slope, weight))
        for cluster in self._clusters:
            mean, slope, hangs = self._log_speed(cluster, theta)
            noise = priors.CLUSTER_NOISE**2 + ((1 - hangs) * cluster.alone_sigma) ** 2
            weight = 1 / (noise * self._series[cluster.series] ** priors.SERIES)
            terms.append(_Term(cluster.model.key, math.log(cluster.speed) - mean, slope, weight))
        return terms
