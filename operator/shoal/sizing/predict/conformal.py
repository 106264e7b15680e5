"""Choose among a few regressions by their error on unseen groups, and give prediction intervals.

Measurements of one model are correlated, so rows are never split at random: a fold holds whole groups. The
same out-of-fold residuals choose the regression and give the interval (CV+ and jackknife+: Barber, Candes,
Ramdas, Tibshirani, "Predictive inference with the jackknife+", Annals of Statistics 2021). For one fixed
regression they prove that an interval at level 1 - alpha covers at least 1 - 2 alpha; tests check the coverage here,
where the same residuals also choose.

Every group has the same weight, so that one model with 400 rows does not determine the interval of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from shoal.errors import UsageError
from shoal.sizing.predict.estimators import PositiveRegressor, RelativeNNLS

__all__ = [
    "GroupConformalRegressor",
    "group_folds",
    "group_quantile",
    "group_weights",
    "least_spread",
    "little_data_factor",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

FEW_GROUPS = 10  # below this a 90 % quantile lies beyond the largest residual
PRIOR_NOISE = 0.1  # prior relative deviation of a group from a fit ...
PRIOR_GROUPS = 3  # ... and its weight in groups


def group_folds(groups: NDArray[Any], most: int, seed: int = 0) -> Ints:
    """The fold of every row: one group per fold up to `most` groups, else groups dealt evenly.

    With more than three times `most` groups, half as many folds are enough.
    """
    names, index = np.unique(groups, return_inverse=True)
    if len(names) > 3 * most:
        most = (most + 1) // 2
    order = (
        np.random.default_rng(seed).permutation(len(names)) if len(names) > most else np.arange(len(names))
    )
    return np.asarray((order % most)[index])


def little_data_factor(groups: int, level: float = 0.9) -> float:
    """The factor that widens an interval from few groups: Student's t over the normal quantile."""
    if groups >= FEW_GROUPS:
        return 1.0
    p = 0.5 + level / 2
    return float(stats.t.ppf(p, max(groups - 1, 1)) / stats.norm.ppf(p))


def group_weights(groups: NDArray[Any], sample_weight: Floats | None = None) -> Floats:
    """(n,) weights that sum to 1 in every group, in proportion to the weights of the samples."""
    _, index = np.unique(groups, return_inverse=True)
    own = np.ones(len(index)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
    total = np.bincount(index, own)[index]
    each = np.bincount(index)[index]
    return np.asarray(np.where(total > 0, own / np.where(total > 0, total, 1.0), 1.0 / each))


def group_quantile(values: Floats, p: float, groups: int, weight: Floats | None = None) -> Floats:
    """Quantile along the last axis with the conformal correction (1 + 1/G) for G groups, linear in between.

    `weight` (n,) are the weights of the values, None: equal. With as many groups as values this is the order
    statistic p (n + 1) of split conformal prediction.
    """
    order = np.argsort(values, axis=-1)
    ordered = np.take_along_axis(values, order, axis=-1)
    counted = np.ones(values.shape[-1]) if weight is None else weight
    reached = np.cumsum(counted[order], axis=-1)
    last = reached[..., -1:]
    target = np.clip(p * (1 + 1 / groups) * last, reached[..., :1], last)
    above = np.argmax(reached >= target * (1 - 1e-12), axis=-1)[..., None]
    below = np.maximum(above - 1, 0)
    high, low = (np.take_along_axis(reached, at, axis=-1) for at in (above, below))
    part = np.divide(target - low, high - low, out=np.ones_like(target), where=high > low)
    low, high = (np.take_along_axis(ordered, at, axis=-1) for at in (below, above))
    return np.asarray(((1 - part) * low + part * high)[..., 0])


class GroupConformalRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """The simplest candidate regression that is not clearly worse than the best, with intervals.

    Args:
        candidates: `PositiveRegressor`s, simplest first; None: `RelativeNNLS` on all columns.
        folds: the most folds; with at most this many groups each group is one fold.
        seed: deals groups to folds.

    Attributes:
        best_: index of the chosen candidate; `scores_` (c,) their out-of-fold MAPE.
        estimator_: the chosen candidate fitted to all rows; `fold_estimators_` the fits without each fold.
        residuals_: (n,) out-of-fold log(y / prediction); `groups_` the number of groups.
        group_weight_: (n,) the weight of each residual, which sums to 1 in every group.

    """

    def __init__(
        self, candidates: Sequence[PositiveRegressor] | None = None, folds: int = 16, seed: int = 0
    ) -> None:
        self.candidates = candidates
        self.folds = folds
        self.seed = seed

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        tags.regressor_tags.poor_score = True
        return tags

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        groups: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Fit to X (n, d) >= 0, y (n,) > 0; `groups` (n,) keeps rows together, None: every row is a group."""
        checked: tuple[Floats, Floats] = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        features, target = checked
        if np.any(target <= 0):
            raise UsageError("y must be > 0: a time or a speed of zero or less cannot be fitted")
        weight = _check_sample_weight(sample_weight, features, dtype=np.float64)
        names = np.arange(len(target)) if groups is None else np.asarray(groups)
        self.groups_ = len(np.unique(names))
        self.group_weight_ = group_weights(names, weight)
        candidates = list(self.candidates) if self.candidates else [RelativeNNLS()]
        self.fold_ = group_folds(names, self.folds, self.seed)
        if self.groups_ < 2:
            self.best_, self.scores_ = 0, np.array([np.nan])
            self.estimator_ = clone(candidates[0]).fit(features, target, sample_weight=weight)
            self.fold_estimators_ = [self.estimator_]
            self.fold_ = np.zeros(len(target), dtype=np.intp)
            self.residuals_ = np.log(target / self.estimator_.predict(features))
            return self
        trials = [self._out_of_fold(c, features, target, weight) for c in candidates]
        errors = np.array([np.abs(np.exp(-residuals) - 1) for _, residuals in trials])
        self.scores_ = errors @ weight / weight.sum()
        self.best_ = _simplest_good(errors, names)
        self.fold_estimators_, self.residuals_ = trials[self.best_]
        self.estimator_ = clone(candidates[self.best_]).fit(features, target, sample_weight=weight)
        return self

    def _out_of_fold(
        self, candidate: PositiveRegressor, X: Floats, y: Floats, weight: Floats
    ) -> tuple[list[Any], Floats]:
        fitted: list[Any] = []
        residuals = np.empty(len(y))
        for fold in range(int(self.fold_.max()) + 1):
            out = self.fold_ == fold
            if weight[~out].sum() > 0:
                fitted.append(clone(candidate).fit_checked(X[~out], y[~out], weight[~out]))
            else:
                fitted.append(clone(candidate).fit_checked(X, y, weight))
            residuals[out] = np.log(y[out] / fitted[-1].predict_checked(X[out]))
        return fitted, residuals

    def predict(self, X: ArrayLike) -> Floats:
        """Predict (n,) values > 0."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return np.asarray(self.estimator_.predict(X))

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> Floats:
        """Give (n, 3) low, prediction, high: an interval for `level` (see the module for its coverage)."""
        mean = self.predict(X)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        logs = np.log(np.column_stack([e.predict_checked(X) for e in self.fold_estimators_]))
        spread = np.abs(self.residuals_) * little_data_factor(self.groups_, level)
        if self.groups_ < FEW_GROUPS:
            spread = np.maximum(
                spread, least_spread(self.residuals_, self.groups_, level, self.group_weight_)
            )
        low, high = np.empty(len(mean)), np.empty(len(mean))
        for start in range(0, len(mean), 256):  # bounded memory: 256 x training rows
            part = slice(start, start + 256)
            centres = logs[part][:, self.fold_]
            low[part] = -group_quantile(spread - centres, level, self.groups_, self.group_weight_)
            high[part] = group_quantile(spread + centres, level, self.groups_, self.group_weight_)
        return np.column_stack([np.minimum(np.exp(low), mean), mean, np.maximum(np.exp(high), mean)])


def least_spread(residuals: Floats, groups: int, level: float = 0.9, weight: Floats | None = None) -> float:
    """Half width from a prior for the noise, since a few residuals can be small by chance."""
    variance = float(np.average(residuals**2, weights=weight))
    pooled = (groups * variance + PRIOR_GROUPS * PRIOR_NOISE**2) / (groups + PRIOR_GROUPS)
    return float(stats.t.ppf(0.5 + level / 2, groups + PRIOR_GROUPS - 1) * np.sqrt(pooled))


def _simplest_good(errors: Floats, groups: NDArray[Any]) -> int:
    """Index of the first candidate that is within one standard error of the best (paired over groups)."""
    _, index = np.unique(groups, return_inverse=True)
    per_group = np.array([np.bincount(index, e) / np.bincount(index) for e in errors])
    best = int(np.argmin(per_group.mean(axis=1)))
    for number, row in enumerate(per_group):
        difference = row - per_group[best]
        standard_error = difference.std(ddof=1) / np.sqrt(len(difference))
        if difference.mean() <= standard_error:
            return number
    return best
