"""The durations of snapshots, start-ups, joins and recoveries.

The time of a snapshot is `t = a + b * size + c * tensors`, with non-negative terms chosen by their relative error on
unseen models. The other times depend on the cloud and the image, so they are predicted from their history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.predict.conformal import FEW_GROUPS, GroupConformalRegressor
from shoal.sizing.predict.estimators import RelativeNNLS
from shoal.sizing.types import Interval

__all__ = ["DurationHistory", "SnapshotTime"]

Floats = NDArray[np.float64]


@dataclass
class SnapshotTime:
    """Predict the seconds to save a snapshot from its size (or parameters) and its number of tensors."""

    notes: list[str] = field(default_factory=list, init=False)
    _fit: GroupConformalRegressor | None = field(default=None, init=False, repr=False)
    _by_size: bool = field(default=False, init=False)

    def fit(self, rows: pd.DataFrame) -> Self:
        """Fit to a table as `tables.load` gives it: model, params, num_tensors, perhaps ckpt_mb, `measured` s."""
        if len(rows) == 0:
            raise NotEnoughData("no measurement of a snapshot's time is known: give at least one")
        self._by_size = "ckpt_mb" in rows
        models = rows["model"].to_numpy()
        repeats = rows.groupby("model")["model"].transform("size").to_numpy(float)
        known = len(set(models))
        forms: list[tuple[int, ...]] = [(0,), (1,), (0, 1)] if known >= 3 else [(0,)]
        candidates = [RelativeNNLS(columns=form) for form in forms]
        self._fit = GroupConformalRegressor(candidates).fit(
            self._matrix(rows), rows["measured"].to_numpy(float), groups=models, sample_weight=1 / repeats
        )
        self.notes = []
        if known < FEW_GROUPS:
            self.notes.append(
                f"snapshots of {known} models only were measured: the interval is widened; measure more"
            )
        return self

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Give (n, 3) low, predicted and high seconds."""
        if self._fit is None:
            raise NotEnoughData("no measurement of a snapshot's time is known: call fit first")
        return self._fit.predict_interval(self._matrix(rows))

    def _matrix(self, rows: pd.DataFrame) -> Floats:
        if self._by_size and "ckpt_mb" not in rows:
            raise UsageError("the snapshots were fitted by size: give the column ckpt_mb here too")
        size = rows["ckpt_mb"] if self._by_size else rows["params"] / 1e6
        return np.column_stack([size.to_numpy(float), rows["num_tensors"].to_numpy(float)])


@dataclass
class DurationHistory:
    """Start-up, join or recovery times of one pool: a prior, updated with observations.

    Args:
        prior_seconds: the prior mean, for example `startupSeconds` of a CapacityPool.
        prior_weight: weight of the prior in observations.
        prior_spread: standard deviation of the logarithm of the prior; 0.5 is a factor of 1.6 either way.
        half_life: number of newer observations that halves a weight.

    """

    prior_seconds: float
    prior_weight: float = 1.0
    prior_spread: float = 0.5
    half_life: float = 50.0
    _seen: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not (np.isfinite(self.prior_seconds) and self.prior_seconds > 0):
            raise UsageError(
                f"the expected duration must be a positive number of seconds, not {self.prior_seconds}"
            )

    def add(self, seconds: float) -> Self:
        """Add an observation."""
        if not (np.isfinite(seconds) and seconds > 0):
            raise UsageError(f"a duration must be a positive number of seconds, not {seconds}")
        self._seen.append(float(seconds))
        return self

    def extend(self, seconds: Sequence[float]) -> Self:
        """Add observations, the newest last."""
        for value in seconds:
            self.add(value)
        return self

    def predict(self) -> Interval:
        """The next duration: log-normal, with the prior as additional observations (Student's t for few)."""
        n = len(self._seen)
        age = np.arange(n)[::-1]
        w = np.concatenate([[self.prior_weight], 0.5 ** (age / self.half_life)])
        logs = np.log([self.prior_seconds, *self._seen])
        mean = float(w @ logs / w.sum())
        variance = (self.prior_weight * self.prior_spread**2 + w @ (logs - mean) ** 2) / w.sum()
        effective = float(w.sum() ** 2 / (w @ w))
        half = stats.t.ppf(0.95, effective + 1) * np.sqrt(variance * (1 + 1 / effective))
        return Interval(
            float(np.exp(mean - half)), float(np.exp(mean + variance / 2)), float(np.exp(mean + half))
        )
