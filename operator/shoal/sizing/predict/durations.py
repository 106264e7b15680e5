"""The time to save a snapshot, t = a + b * size + c * tensors, from measurements in a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pandas as pd

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.predict.estimators import AdditiveRegressor
from shoal.sizing.speed import priors

__all__ = ["SnapshotTime"]


FEW = 5


@dataclass
class SnapshotTime:
    """Predict the seconds to save a snapshot from its size (or parameters) and its number of tensors.

    Args:
        elsewhere: whether the interval is for another day or store than the measured ones, which shifts all times.

    """

    elsewhere: bool = False
    notes: list[str] = field(default_factory=list, init=False)
    _fit: AdditiveRegressor | None = field(default=None, init=False, repr=False)
    _by_size: bool = field(default=False, init=False)

    def fit(self, rows: pd.DataFrame) -> Self:
        """Fit to a table as `tables.load` gives it: model, params, num_tensors, perhaps ckpt_mb, `measured` s."""
        if len(rows) == 0:
            raise NotEnoughData("no measurement of a snapshot's time is known: give at least one")
        self._by_size = "ckpt_mb" in rows
        models = [str(name) for name in rows["model"]]
        regression = AdditiveRegressor(priors.SNAPSHOT_NOISE, priors.SNAPSHOT_MEDIAN, priors.SNAPSHOT_SIGMA)
        self._fit = regression.fit(self._matrix(rows), rows["measured"].to_numpy(float), models)
        known = len(set(models))
        self.notes = [
            "the intervals are wider by what stores differ between days and places, which shifts all times together"
            if self.elsewhere
            else "the intervals are for the storage and the day that were measured: another one shifts all times"
        ]
        if known < FEW:
            self.notes.append(
                f"snapshots of {known} models only were measured: the prior decides much; measure more"
            )
        return self

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Give (n, 3) low, predicted and high seconds."""
        if self._fit is None:
            raise NotEnoughData("no measurement of a snapshot's time is known: call fit first")
        seconds, sigma = self._fit.predict(
            self._matrix(rows), return_std=True, elsewhere=priors.ANOTHER_STORE if self.elsewhere else 0.0
        )
        factor = np.exp(priors.Z90 * sigma)
        return np.column_stack([seconds / factor, seconds, seconds * factor])

    def _matrix(self, rows: pd.DataFrame) -> Floats:
        if self._by_size and "ckpt_mb" not in rows:
            raise UsageError("the snapshots were fitted by size: give the column ckpt_mb here too")
        size = rows["ckpt_mb"] if self._by_size else rows["params"] * 12 / 1e6
        return np.column_stack([size.to_numpy(float), rows["num_tensors"].to_numpy(float)])
