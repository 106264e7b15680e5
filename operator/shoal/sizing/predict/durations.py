"""The time to save a snapshot, t = a + b * size + c * tensors, from measurements in a table."""

from __future__ import annotations

from typing import Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.predict.estimators import AdditiveRegressor
from shoal.sizing.predict.tables import measured_in
from shoal.sizing.speed import priors

__all__ = ["SnapshotTime"]


FEW = 5


class SnapshotTime(BaseEstimator):  # type: ignore[misc]
    """Predict the seconds to save a snapshot from its size (or parameters) and its number of tensors.

    Args:
        elsewhere: whether the interval is for another day or store than the measured ones, which shifts all times.

    Attributes:
        regression_: the fitted `AdditiveRegressor`.
        by_size_: whether the measurements have the size of a snapshot.
        notes_: what a reader of its predictions has to know.

    """

    def __init__(self, elsewhere: bool = False) -> None:
        self.elsewhere = elsewhere

    def fit(self, rows: pd.DataFrame) -> Self:
        """Fit to a table as `tables.load` gives it: model, params, num_tensors, perhaps ckpt_mb, `measured` s."""
        if len(rows) == 0:
            raise NotEnoughData("no measurement of a snapshot's time is known: give at least one")
        seconds = measured_in(rows)
        self.by_size_ = "ckpt_mb" in rows
        models = [str(name) for name in rows["model"]]
        regression = AdditiveRegressor(priors.SNAPSHOT_NOISE, priors.SNAPSHOT_MEDIAN, priors.SNAPSHOT_SIGMA)
        self.regression_ = regression.fit(self._matrix(rows), seconds, models)
        known = len(set(models))
        self.notes_ = [
            "the intervals are wider by what stores differ between days and places, which shifts all times together"
            if self.elsewhere
            else "the intervals are for the storage and the day that were measured: another one shifts all times"
        ]
        if known < FEW:
            self.notes_.append(
                f"snapshots of {known} models only were measured: the prior decides much; measure more"
            )
        return self

    def notes_on(self, _rows: pd.DataFrame, /) -> list[str]:
        """What a reader of the predictions for these rows has to know."""
        return self.notes_

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Give (n, 3) low, predicted and high seconds."""
        if not hasattr(self, "regression_"):
            raise NotEnoughData("no measurement of a snapshot's time is known: call fit first")
        seconds, sigma = self.regression_.predict(
            self._matrix(rows), return_std=True, elsewhere=priors.ANOTHER_STORE if self.elsewhere else 0.0
        )
        factor = np.exp(priors.Z90 * sigma)
        return np.column_stack([seconds / factor, seconds, seconds * factor])

    def _matrix(self, rows: pd.DataFrame) -> Floats:
        if self.by_size_ and "ckpt_mb" not in rows:
            raise UsageError("the snapshots were fitted by size: give the column ckpt_mb here too")
        size = rows["ckpt_mb"] if self.by_size_ else rows["params"] * 12 / 1e6
        return np.column_stack([size.to_numpy(float), rows["num_tensors"].to_numpy(float)])
