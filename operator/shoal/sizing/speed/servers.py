"""What the parameter servers can do: the cost of an update, from their busy seconds or from measured clusters.

    u = alpha * tensors + beta * parameters       seconds that one update keeps one server busy
    C = servers^s / u                             updates a second of all servers
    V = (A^-p + C^-p)^(-1/p)                      the cluster's updates a second, A: of the workers alone

Busy seconds and updates of the shards give u and C directly, at any number of workers. Where there are none, or less
is seen to come through (`exchange.py`), clusters that are slower than the sum of their workers do: one row is
information. Both update the same posterior (Gauss-Newton around a prior),
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
from shoal.sizing.speed.posterior import MOST_ROUNDS, Floats, looseness

__all__ = ["Cluster", "Load", "PsModel", "ServerModel", "busy", "soft_min"]


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
    """A measured cluster: `workers` that make `alone` updates/s together without contention made `speed` updates/s.

    `alone_sigma` is the standard deviation of ln(alone); clusters of one `series` share their deviations. `weight`:
    what it still counts at its age, 0 to 1. `speed_sigma`: the standard deviation of ln(speed) as few steps make it,
    beside that of any cluster.
    """

    model: Model
    workers: float
    servers: int
    alone: float
    speed: float
    alone_sigma: float = 0.0
    series: str = ""
    weight: float = 1.0
    speed_sigma: float = 0.0

    @property
    def noise(self) -> float:
        """The standard deviation of ln(speed)."""
        return math.hypot(priors.CLUSTER_NOISE, self.speed_sigma)


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


class _Terms(NamedTuple):
    """The logarithms of n measured speeds: (n,) of which model, measured less predicted, and weight (1 / variance).

    `slope` (n, 4) are the derivatives by what all models share, `own` (n,) that by the deviation of the model.
    """

    model: NDArray[np.intp]
    error: Floats
    weight: Floats
    slope: Floats
    own: Floats

    def by_model(self, values: Floats, models: int) -> Floats:
        """(models, ...) the sums of values (n, ...) over the terms of each model."""
        sums = np.zeros((models, *values.shape[1:]))
        np.add.at(sums, self.model, values)
        return sums


class _Normal(NamedTuple):
    """A Gauss-Newton matrix: of what is shared (4, 4), with each model's deviation (models, 4), and these (models,).

    No two deviations have a term in common, so that it is solved in as many steps as there are models.
    """

    shared: Floats
    mixed: Floats
    own: Floats

    def damped(self, by: float) -> _Normal:
        """With its diagonal larger by this part."""
        return _Normal(self.shared + by * np.diag(np.diag(self.shared)), self.mixed, self.own * (1 + by))

    @property
    def reduced(self) -> Floats:
        """(4, 4) the inverse of the covariance of what is shared (Schur's complement)."""
        return np.asarray(self.shared - (self.mixed.T / self.own) @ self.mixed)

    def solve(self, shared: Floats, own: Floats) -> tuple[Floats, Floats]:
        """The step for a gradient."""
        first = np.asarray(
            np.linalg.solve(self.reduced, shared - (self.mixed.T / self.own) @ own), dtype=np.float64
        )
        return first, (own - self.mixed @ first) / self.own


class ServerModel:
    """The posterior of (ln alpha, ln beta, ln(p - 1), s) and of each model's deviation from the form."""

    def __init__(self, loads: Sequence[Load] = (), clusters: Sequence[Cluster] = ()) -> None:
        self._loads, self._clusters = list(loads), list(clusters)
        everything: list[Load | Cluster] = [*self._loads, *self._clusters]
        self.names = sorted({each.model.key for each in everything})
        self._at = {name: at for at, name in enumerate(self.names)}
        self.measured = dict[str, int]()
        for each in everything:
            self.measured[each.model.key] = max(self.measured.get(each.model.key, 0), each.servers)
        self._series = Counter(cluster.series for cluster in self._clusters)
        self._model = np.array([self._at[each.model.key] for each in everything], dtype=np.intp)
        self._prior = np.array(priors.SERVER_MEAN)
        self._precision = np.array(priors.SERVER_SIGMA) ** -2.0
        owners = {each.model.key: each.model.owner for each in everything}
        self._voice = _voices([owners[name] for name in self.names])
        self._own_precision = self._voice * priors.SERVER_MODEL**-2.0
        self.theta, self._own = self._prior.copy(), np.zeros(len(self.names))
        self._normal = _Normal(np.diag(self._precision), np.zeros((len(self.names), 4)), self._own_precision)
        if everything:
            self._fit()
        self._covariance = np.linalg.inv(self._normal.reduced)

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
        load = Load(model, servers, 1.0, 1.0)
        (mean,), (slope,) = _log_capacity([load], self.theta)
        at = self._at.get(model.key)
        if at is None:
            variance = float(slope @ self._covariance @ slope) + priors.SERVER_MODEL**2
            return math.exp(mean), math.sqrt(variance)
        # The model's own deviation is known with what is shared: what is too much of one is too little of the other.
        slope = slope + self._normal.mixed[at] / self._normal.own[at]
        variance = float(slope @ self._covariance @ slope) + float(self._voice[at] / self._normal.own[at])
        return math.exp(mean - self._own[at]), math.sqrt(variance)

    def update_seconds(self, model: Model) -> float:
        """Seconds that one update keeps a single server busy."""
        return 1 / self.capacity(model, 1)[0]

    def speed(self, cluster: Cluster) -> tuple[float, float]:
        """Updates/s of a cluster, and the standard deviation of its logarithm without noise.

        Over the whole distribution of the capacity, by quadrature: where it is uncertain, servers that do not limit the
        cluster by the best guess still may, and the tangent there says nothing of it.
        """
        capacity, sigma = self.capacity(cluster.model, cluster.servers)
        _, by_p, hangs = _log_speed(np.log([cluster.alone]), np.log([capacity]), self.theta)
        caps = capacity * np.exp(sigma * _NODES)
        logs = np.log(soft_min(np.full(len(caps), cluster.alone), caps, self.sharpness))
        mean = float(_WEIGHTS @ logs)
        variance = float(_WEIGHTS @ (logs - mean) ** 2)
        variance += float((1 - hangs[0]) * cluster.alone_sigma) ** 2
        return math.exp(mean), math.sqrt(variance + float(by_p[0]) ** 2 * float(self._covariance[2, 2]))

    # -- fitting ------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """The maximum of the posterior; models that the others do not explain are ones of a kind (`looseness`)."""
        loose = self._loosened(None)
        for number in range(MOST_ROUNDS):
            self._own_precision = self._voice * (priors.SERVER_MODEL * loose) ** -2.0
            self._maximize()
            found = self._loosened(loose)
            if number:  # as in `WorkerModel`
                found = np.maximum(found, loose)
            if np.array_equal(found > 1, loose > 1):
                break
            loose = found

    def _loosened(self, loose: Floats | None) -> Floats:
        """(models,) how many times larger than usual a model's deviation is taken to be: from its errors without it.

        `loose`: what was taken for the present fit; None: there is none, and errors are those of the prior.
        """
        terms, count = self._terms(self.theta, self._own), len(self.names)
        errors = terms.error
        covariance = np.broadcast_to(np.diag(1 / self._precision), (count, 4, 4))
        if loose is not None:
            mixed, own = self._normal.mixed, self._normal.own
            mine = np.einsum("n,ni,nj->nij", terms.weight, terms.slope, terms.slope)
            mine = terms.by_model(mine, count) - np.einsum("mi,mj,m->mij", mixed, mixed, 1 / own)
            covariance = np.linalg.inv(self._normal.reduced - mine)
            pull = (terms.weight * errors)[:, None] * np.column_stack([terms.slope, terms.own])
            pull = terms.by_model(pull, count)
            shared = np.einsum("mij,mj->mi", covariance, pull[:, :4])[terms.model]
            errors = errors + (terms.slope * shared).sum(axis=1)
            errors = errors + terms.own * (pull[:, 4] / self._own_precision)[terms.model]
        variances = np.einsum("ni,nij,nj->n", terms.slope, covariance[terms.model], terms.slope)
        variances += self._voice[terms.model] / terms.weight + (priors.SERVER_MODEL * terms.own) ** 2
        number = terms.by_model(np.ones(len(errors)), count)
        error, variance = (terms.by_model(each, count) / number for each in (errors, variances))
        return np.array([looseness(e, v, priors.SERVER_MODEL) for e, v in zip(error, variance, strict=True)])

    def _maximize(self) -> None:
        theta, own, damping, best = self._prior.copy(), np.zeros(len(self.names)), 1e-2, math.inf
        for _ in range(priors.MOST_ITERATIONS):
            gradient, normal, loss = self._downhill(theta, own)
            if loss < best:
                kept, downhill, self._normal, gain = (theta, own), gradient, normal, best - loss
                best, damping = loss, max(damping / 10, 1e-9)
                if gain < 1e-9 * (1 + loss):
                    break
            else:
                damping *= 10
                if damping > 1e9:
                    break
            step = self._normal.damped(damping).solve(*downhill)
            theta, own = kept[0] + step[0], kept[1] + step[1]
        self.theta, self._own = kept

    def _downhill(self, theta: Floats, own: Floats) -> tuple[tuple[Floats, Floats], _Normal, float]:
        """Gradient (downhill), Gauss-Newton matrix and value of half the negative log posterior."""
        terms, count = self._terms(theta, own), len(self.names)
        away, pull = theta - self._prior, terms.weight * terms.error
        loss = self._precision @ away**2 + self._own_precision @ own**2 + terms.weight @ terms.error**2
        gradient = (
            pull @ terms.slope - self._precision * away,
            terms.by_model(pull * terms.own, count) - self._own_precision * own,
        )
        weighted = terms.weight[:, None] * terms.slope
        normal = _Normal(
            terms.slope.T @ weighted + np.diag(self._precision),
            terms.by_model(weighted * terms.own[:, None], count),
            terms.by_model(terms.weight * terms.own**2, count) + self._own_precision,
        )
        return gradient, normal, float(loss) / 2

    def _terms(self, theta: Floats, own: Floats) -> _Terms:
        """What was measured, beside what the parameters say of it."""
        loads, clusters = self._loads, self._clusters
        cap, slope = _log_capacity([*loads, *clusters], theta)
        cap, n = cap - own[self._model], len(loads)
        alone = np.log([each.alone for each in clusters])
        speed, by_p, hangs = _log_speed(alone, cap[n:], theta)
        slope[n:] *= hangs[:, None]
        slope[n:, 2] = by_p
        error = np.log([*(1 / each.seconds for each in loads), *(each.speed for each in clusters)])
        noise = [priors.LOAD_NOISE**2 + 1 / max(each.updates, 1.0) for each in loads]
        differ = np.array([each.noise for each in clusters]) ** 2
        doubt = ((1 - hangs) * np.array([each.alone_sigma for each in clusters])) ** 2
        series = np.array([float(self._series[each.series]) for each in clusters]) ** priors.SERIES
        still = np.array([*(1.0 for _ in loads), *(each.weight for each in clusters)])
        return _Terms(
            self._model,
            error - np.concatenate([cap[:n], speed]),
            still * self._voice[self._model] / np.concatenate([noise, (differ + doubt) * series]),
            slope,
            -np.concatenate([np.ones(n), hangs]),
        )


def _voices(owners: Sequence[str]) -> Floats:
    """(models,) what each model counts in what all share, by its owner: anybody may make hundreds, right or wrong.

    In what is said of itself it counts whole. Models without an owner are those of one table.
    """
    number = Counter(owners)
    alone = len(number) == 1
    return np.array([1.0 if alone or not each else min(1.0, priors.VOICES / number[each]) for each in owners])


def _log_capacity(every: Sequence[Load | Cluster], theta: Floats) -> tuple[Floats, Floats]:
    """(n,) ln C by the form, and its derivatives (n, 4)."""
    tensors, parameters, servers = (
        np.array(
            [[each.model.tensors, each.model.parameters, each.servers] for each in every], dtype=np.float64
        )
        .reshape(-1, 3)
        .T
    )
    tensors, parameters = math.exp(theta[0]) * tensors, math.exp(theta[1]) * parameters
    whole = tensors + parameters
    slope = np.column_stack([-tensors / whole, -parameters / whole, np.zeros(len(every)), np.log(servers)])
    return theta[3] * np.log(servers) - np.log(whole), slope


def _log_speed(alone: Floats, cap: Floats, theta: Floats) -> tuple[Floats, Floats, Floats]:
    """(n,) ln V, its derivative by ln(p - 1), and how much V hangs on C: d ln V / d ln C."""
    p = 1 + math.exp(min(theta[2], 4.0))
    mixed = np.logaddexp(-p * alone, -p * cap)
    hangs = np.exp(-p * cap - mixed)
    # d/dp of -1/p ln(A^-p + C^-p)
    by_p = mixed / p**2 + ((1 - hangs) * alone + hangs * cap) / p
    return -mixed / p, by_p * (p - 1), hangs
