"""The speed of a cluster from tables of measurements: `speed.servers` for data frames."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator

from shoal.errors import NotEnoughData
from shoal.sizing.accelerators import Catalogue
from shoal.sizing.availability import Floats
from shoal.sizing.predict.tables import measured_in
from shoal.sizing.predict.worker_speed import WorkerSpeed
from shoal.sizing.speed import priors
from shoal.sizing.speed.measurements import Model
from shoal.sizing.speed.servers import Cluster, ServerModel

__all__ = ["ClusterSpeed", "alone_speeds", "series_alone"]


UNSATURATED = 0.9  # a worker above this part of the best speed per worker counts as not slowed down
FEW_MODELS = 10


class ClusterSpeed(BaseEstimator):  # type: ignore[misc]
    """Predict a cluster's steps/s from its workers and the parameter servers' capacity.

    Rows are tables as `tables.load` gives them.

    Args:
        catalogue: the data sheets. None: those of Shoal.
        elsewhere: whether the interval is for another day than the measured ones.

    Attributes:
        workers_: the fitted `WorkerSpeed`.
        servers_: the posterior of the parameter servers.
        notes_: what a reader of its predictions has to know.

    """

    def __init__(self, catalogue: Catalogue | None = None, elsewhere: bool = False) -> None:
        self.catalogue = catalogue
        self.elsewhere = elsewhere

    def fit(self, clusters: pd.DataFrame, workers: pd.DataFrame | None = None) -> Self:
        """Fit to measured clusters, and to additional single workers."""
        if len(clusters) == 0:
            raise NotEnoughData("no measurement of a cluster's speed is known: give at least one")
        measured_in(clusters)
        single = clusters[(clusters["num_workers"] == 1).to_numpy()]
        if len(single) == 0 and (workers is None or len(workers) == 0):
            # The speed per worker in the smallest clusters is the best estimate.
            single = clusters[(clusters["num_workers"] == clusters["num_workers"].min()).to_numpy()].copy()
            single["measured"] = single["measured"] / single["num_workers"]
        known = single if workers is None else pd.concat([workers, single], ignore_index=True)
        self.workers_ = WorkerSpeed(catalogue=self.catalogue).fit(known)
        self.notes_ = list(self.workers_.notes_)
        several = clusters[(clusters["num_workers"] > 1).to_numpy()]
        alone = series_alone(clusters)[(clusters["num_workers"] > 1).to_numpy()]
        self.servers_ = ServerModel(
            (), [_cluster(row, a, 0.0) for (_, row), a in zip(several.iterrows(), alone, strict=True)]
        )
        models = clusters["model"].nunique()
        if models < FEW_MODELS:
            self.notes_.append(
                f"clusters were measured with {models} models only: the interval is widened; measure more models"
            )
        return self

    def notes_on(self, _rows: pd.DataFrame, /) -> list[str]:
        """What a reader of the predictions for these rows has to know."""
        return self.notes_

    def predict(self, rows: pd.DataFrame, alone: Floats | None = None) -> Floats:
        """Give (n, 3) low, predicted, high steps/s; `alone` (n,) is a worker's own speed where it was measured."""
        if not hasattr(self, "servers_"):
            raise NotEnoughData("no measurement of a cluster's speed is known: call fit first")
        if alone is None:
            mean, sigma = self.workers_.logarithms(rows)
            single = np.exp(-mean)
        else:
            single, sigma = alone, np.zeros(len(rows))
        noise = np.hypot(priors.CLUSTER_NOISE, priors.ANOTHER_DAY if self.elsewhere else 0.0)
        found = np.empty((len(rows), 3))
        for i, (_, row) in enumerate(rows.iterrows()):
            speed, spread = self.servers_.speed(_cluster(row, single[i], float(sigma[i])))
            half = priors.Z90 * float(np.hypot(spread, noise))
            found[i] = speed * np.exp([-half, 0.0, half])
        return found


def _cluster(row: Any, alone: float, sigma: float) -> Cluster:
    model = Model(
        str(row["model"]), float(row["flops"]), max(int(row["params"]), 1), max(int(row["num_tensors"]), 1)
    )
    return Cluster(
        model,
        float(row["num_workers"]),
        int(row["num_ps"]),
        float(row["num_workers"]) * alone,
        float(row.get("measured", 1.0)),
        sigma,
        f"{row['model']} {row['accelerator']}",
    )


def alone_speeds(rows: pd.DataFrame) -> Floats | None:
    """(n,) the speed of one worker for every row, from its rows of one worker; None if one is missing."""
    single = pd.Series(np.where(rows["num_workers"] == 1, rows["measured"], np.nan))
    found = single.groupby(_series(rows), dropna=False).transform("median").to_numpy(float)
    return None if np.isnan(found).any() else found


def series_alone(rows: pd.DataFrame) -> Floats:
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
