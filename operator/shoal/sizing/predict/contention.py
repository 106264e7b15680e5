"""Fit the cost of an update at the parameter servers to measured clusters, and predict other clusters.

Every update costs a server `seconds_per_tensor * tensors + seconds_per_byte * bytes`. Both costs, the sharpness of
the bend and the gain from a second server are fitted on the logarithm of the speed. A few models do not separate the
two costs (large models also have many tensors), so a weak prior makes them equal in an average model: without it, a
fit to small models can be wrong by a factor for a large one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shoal.errors import NotEnoughData
from shoal.sizing.accelerators import Catalogue, catalogue
from shoal.sizing.predict.cluster_speed import cluster_throughput
from shoal.sizing.predict.conformal import (
    FEW_GROUPS,
    group_folds,
    group_quantile,
    group_weights,
    least_spread,
    little_data_factor,
)
from shoal.sizing.predict.worker_speed import Z90, WorkerSpeed
from shoal.sizing.speed.servers import busy
from shoal.sizing.types import ModelFeatures, PsModel

__all__ = ["ClusterSpeed", "Contention", "alone_speeds"]

Floats = NDArray[np.float64]

NOISE = 0.1  # relative deviation of a series of measurements from the form, for the weight of the priors
BYTES = (
    4.0  # bytes of a parameter in one direction; only the product with the cost of a byte matters to a fit
)
UNSATURATED = 0.9  # a worker above this part of the best speed per worker counts as not slowed down
CAP_SIGMA = 0.4  # relative standard deviation of the servers' capacity if no measured cluster was near it
INNER_FOLDS = 8


@dataclass(frozen=True)
class Contention:
    """The cost of an update at one parameter server, and how the speed approaches its capacity."""

    seconds_per_tensor: float
    seconds_per_byte: float
    sharpness: float
    scaling: float

    def of(self, features: ModelFeatures) -> PsModel:
        """The cost of one update of this model."""
        seconds = (
            self.seconds_per_tensor * features.tensors
            + self.seconds_per_byte * 2 * BYTES * features.parameters
        )
        return PsModel(seconds, self.sharpness, self.scaling)

    def speed(self, rows: pd.DataFrame, alone: Floats) -> Floats:
        """(n,) steps/s of clusters whose workers make `alone` (n,) steps/s each without contention."""
        out = np.empty(len(rows))
        for i, (_, row) in enumerate(rows.iterrows()):
            ps = self.of(ModelFeatures(row["flops"], row["params"], row["num_tensors"]))
            out[i] = cluster_throughput([[row["num_workers"]]], [1.0 / alone[i]], [1], ps, row["num_ps"])[0]
        return out

    def busy(self, rows: pd.DataFrame, alone: Floats) -> Floats:
        """(n,) how much the servers' capacity determines these speeds, see `cluster_speed.busy`."""
        return busy(self.speed(rows, alone), rows["num_workers"].to_numpy(float) * alone, self.sharpness)

    def capacity_sigma(self, rows: pd.DataFrame, alone: Floats) -> float:
        """Relative standard deviation of the servers' capacity, fitted to these clusters.

        Series near the capacity determine it; without any, it is the prior.
        """
        keys = [rows["model"].to_numpy(), rows["accelerator"].to_numpy()]
        series = float(pd.Series(self.busy(rows, alone)).groupby(keys).max().sum())
        return float(1 / np.sqrt(1 / CAP_SIGMA**2 + series / NOISE**2))

    @classmethod
    def fit(cls, rows: pd.DataFrame, alone: Floats) -> Contention:
        """Fit to measured clusters; `alone` (n,) is the speed in steps/s of one such worker without contention."""
        tensors, moved = rows["num_tensors"].to_numpy(float), 2 * BYTES * rows["params"].to_numpy(float)
        sum_of_workers = rows["num_workers"].to_numpy(float) * alone
        servers, speed = rows["num_ps"].to_numpy(float), rows["measured"].to_numpy(float)
        series = rows.groupby(["model", "accelerator"], sort=False)["model"].transform("size").to_numpy(float)
        root = np.sqrt(1.0 / series)  # the rows of a series are correlated: a series weighs 1
        several = bool(np.ptp(servers) > 0)
        # Start, and prior: half of the smallest cost that explains the fastest cluster, for each part.
        per_update = float(np.median(servers / speed))
        start = np.log(
            [per_update / 2 / np.median(tensors), per_update / 2 / np.median(moved), 3.0, np.exp(2.0)]
        )

        def parameters(z: Floats) -> tuple[Floats, float, float]:
            z = np.clip(z, -60, 20)
            update = np.exp(z[0]) * tensors + np.exp(z[1]) * moved
            return update, 1 + min(np.exp(z[2]), 60.0), 1 / (1 + np.exp(-z[3])) if several else 1.0

        def residuals(z: Floats) -> Floats:
            update, sharpness, scaling = parameters(z)
            cap = servers**scaling / update
            small, large = np.minimum(sum_of_workers, cap), np.maximum(sum_of_workers, cap)
            predicted = small * (1 + (small / large) ** sharpness) ** (-1 / sharpness)
            balance = (z[0] - start[0]) - (z[1] - start[1])
            priors = [NOISE * balance, NOISE * (z[2] - start[2]), NOISE * (z[3] - 2) / 2]
            # Below the cap the data do not determine the costs: keep them from drifting to zero.
            priors.append(NOISE * (z[0] + z[1] - start[0] - start[1]) / 8)
            return np.concatenate([root * np.log(predicted / speed), priors])

        z = least_squares(residuals, start).x
        _, sharpness, scaling = parameters(z)
        return cls(float(np.exp(z[0])), float(np.exp(z[1])), float(sharpness), float(scaling))


@dataclass
class ClusterSpeed:
    """Predict a cluster's steps/s from the fits of its workers and of the parameter servers' contention.

    Rows are tables as `tables.load` gives them. After `fit`: `workers` (the fitted `WorkerSpeed`), `contention`,
    `notes`.
    """

    catalogue: Catalogue = field(default_factory=catalogue)
    notes: list[str] = field(default_factory=list, init=False)
    workers: WorkerSpeed = field(init=False)
    contention: Contention = field(init=False)
    _errors: Floats = field(init=False, repr=False)
    _weights: Floats = field(init=False, repr=False)
    _groups: int = field(init=False)
    _cap_sigma: float = field(init=False)

    def fit(self, clusters: pd.DataFrame, workers: pd.DataFrame | None = None) -> Self:
        """Fit to measured clusters, and to additional single workers."""
        if len(clusters) == 0:
            raise NotEnoughData("no measurement of a cluster's speed is known: give at least one")
        self._fit_both(clusters, workers)
        models = clusters["model"].to_numpy()
        self._groups = len(set(models))
        errors, whose = [], []
        folds = group_folds(models, INNER_FOLDS)
        known = set(models) if self._groups > 1 else set()
        for fold in sorted(set(folds)) if known else []:
            out = folds == fold
            gone = set(models[out])
            inner = ClusterSpeed(self.catalogue)
            rest = None if workers is None else workers[~workers["model"].isin(gone)]
            inner._fit_both(clusters[~out], rest)
            held = clusters[out]
            measured = held["measured"].to_numpy(float)
            given = np.log(measured / inner.contention.speed(held, _series_alone(held)))
            scratch = np.log(measured / inner.contention.speed(held, inner._alone(held)))
            errors.append(np.column_stack([given, scratch]))
            whose.append(models[out])
        self._cap_sigma = self.contention.capacity_sigma(clusters, _series_alone(clusters))
        self._errors = np.concatenate(errors) if errors else np.full((1, 2), np.log(1.5))
        self._weights = group_weights(np.concatenate(whose) if whose else np.zeros(1))
        if self._groups < 10:
            self.notes.append(
                f"clusters were measured with {self._groups} models only: the interval is widened; measure more models"
            )
        return self

    def predict(self, rows: pd.DataFrame, alone: Floats | None = None) -> Floats:
        """Give (n, 3) low, predicted, high steps/s; `alone` (n,) is a worker's own speed where it was measured."""
        one = 1.0 / self.workers.predict(rows)[:, ::-1]
        single = one[:, 1] if alone is None else alone
        mean = self.contention.speed(rows, single)
        errors = np.abs(self._errors[:, 1 if alone is None else 0])
        wide = group_quantile(errors, 0.9, self._groups, self._weights) * little_data_factor(self._groups)
        half = np.full(len(rows), wide)
        if self._groups < FEW_GROUPS:
            half = np.maximum(half, least_spread(errors, self._groups, weight=self._weights))
        hangs = self.contention.busy(rows, single)
        if alone is None:  # a transferred worker speed is less sure than the fits
            half = np.maximum(half, (1 - hangs) * np.log(one[:, 2] / one[:, 0]) / 2)
        half = np.hypot(half, hangs * Z90 * self._cap_sigma)
        return np.column_stack([mean * np.exp(-half), mean, mean * np.exp(half)])

    def _fit_both(self, clusters: pd.DataFrame, workers: pd.DataFrame | None) -> None:
        single = clusters[(clusters["num_workers"] == 1).to_numpy()]
        if len(single) == 0 and (workers is None or len(workers) == 0):
            # The speed per worker in the smallest clusters is the best estimate.
            single = clusters[(clusters["num_workers"] == clusters["num_workers"].min()).to_numpy()].copy()
            single["measured"] = single["measured"] / single["num_workers"]
        known = single if workers is None else pd.concat([workers, single], ignore_index=True)
        self.workers = WorkerSpeed(catalogue=self.catalogue).fit(known)
        self.notes = list(self.workers.notes)
        self.contention = Contention.fit(clusters, _series_alone(clusters))

    def _alone(self, rows: pd.DataFrame) -> Floats:
        return np.asarray(1.0 / self.workers.predict(rows)[:, 1])


def alone_speeds(rows: pd.DataFrame) -> Floats | None:
    """(n,) the speed of one worker for every row, from its rows of one worker; None if one is missing."""
    single = pd.Series(np.where(rows["num_workers"] == 1, rows["measured"], np.nan))
    found = single.groupby(_series(rows), dropna=False).transform("median").to_numpy(float)
    return None if np.isnan(found).any() else found


def _series_alone(rows: pd.DataFrame) -> Floats:
    """(n,) steps/s of one worker without contention: the median speed per worker of a series' unslowed clusters."""
    each = pd.Series(rows["measured"].to_numpy(float) / rows["num_workers"].to_numpy(float))
    series = _series(rows)
    unslowed = each.where(each >= UNSATURATED * each.groupby(series, dropna=False).transform("max"))
    return np.asarray(unslowed.groupby(series, dropna=False).transform("median"), dtype=np.float64)


def _series(rows: pd.DataFrame) -> list[Any]:
    """What clusters of equal workers have in common: the keys of a group."""
    return [
        rows[name].to_numpy() for name in ("model", "accelerator", "batch_size", "cpu_cores") if name in rows
    ]
