"""The additive time as a scikit-learn estimator: a thin wrapper around `speed.additive`, which the operator uses."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from shoal.errors import UsageError
from shoal.sizing.speed.additive import Additive

__all__ = ["AdditiveRegressor"]

Floats = NDArray[np.float64]

PRIOR_SIGMA = 2.0


class AdditiveRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """y = a + sum_j c_j x_j with all terms positive: a MAP fit of the relative error.

    The prior says that every term is about equally large, give or take a factor of seven.

    Args:
        noise: standard deviation of the logarithm of y.

    Attributes:
        intercept_: a.
        coef_: (n_features,) the c_j.

    """

    def __init__(self, noise: float = 0.1) -> None:
        self.noise = noise

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Fit to X (n, d) >= 0 and y (n,) > 0. Rows of one of the `groups` (n,) count as repeats of one."""
        if not self.noise > 0:
            raise UsageError(f"noise must be above 0, not {self.noise}")
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        return self._fitted(np.asarray(X), np.asarray(y, dtype=np.float64), groups)

    def _fitted(self, X: Floats, y: Floats, groups: ArrayLike | None) -> Self:
        _not_negative(X)
        if np.any(y <= 0):
            raise UsageError("y must be > 0: a time of zero or less cannot be fitted")
        names = [str(g) for g in (range(len(y)) if groups is None else np.asarray(groups))]
        typical = np.array([np.median(x[x > 0]) if np.any(x > 0) else 1.0 for x in X.T])
        share = float(np.median(y)) / (X.shape[1] + 1)
        self._fit = Additive(
            X,
            np.log(y),
            names,
            centres=np.concatenate([[share], share / typical]),
            spreads=np.full(X.shape[1] + 1, PRIOR_SIGMA),
            noise=self.noise,
        )
        self.intercept_, self.coef_ = float(self._fit.coefficients[0]), self._fit.coefficients[1:]
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """Predict (n,) values > 0; with `return_std` also the standard deviations (n,) of their logarithms."""
        check_is_fitted(self)
        checked = np.asarray(validate_data(self, X, reset=False, dtype=np.float64))
        _not_negative(checked)
        mean, sigma = self._fit.predict(checked)
        return (np.exp(mean), sigma) if return_std else np.exp(mean)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        tags.regressor_tags.poor_score = True  # it minimizes the relative error, not the squared error of R²
        return tags


def _not_negative(X: Floats) -> None:
    if np.any(X < 0):
        raise UsageError("Negative values in data: terms of a time are >= 0")
