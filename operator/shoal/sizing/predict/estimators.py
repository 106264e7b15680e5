"""Regressions for times: few parameters, positive predictions, relative error.

A training step is a sum of non-negative costs (fixed overhead, arithmetic, kernel launches), so `RelativeNNLS` fits
`t = a + sum of c_j x_j` with all coefficients >= 0. `PowerLaw`, a product of powers, is for data that is not such a
sum. Both are scikit-learn estimators on a matrix of features >= 0.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import nnls
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from shoal.errors import UsageError

__all__ = ["PositiveRegressor", "PowerLaw", "RelativeNNLS"]

Floats = NDArray[np.float64]


class PositiveRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """The base class: features >= 0, targets > 0, predictions > 0 and finite.

    `fit_checked` and `predict_checked` take validated arrays: cross-validation calls them hundreds of times, and
    scikit-learn's validation would take most of the time.
    """

    def fit_checked(self, X: Floats, y: Floats, weight: Floats) -> Self:
        """Fit to X (n, d), y (n,) and weights (n,)."""
        raise NotImplementedError

    def predict_checked(self, X: Floats) -> Floats:
        """Predict (n,) values > 0."""
        raise NotImplementedError

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit to X (n, d) >= 0 and y (n,) > 0."""
        return self.fit_checked(*self._validated(X, y, sample_weight, reset=True))

    def predict(self, X: ArrayLike) -> Floats:
        """Predict (n,) values > 0."""
        return self.predict_checked(self._features(X))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        tags.regressor_tags.poor_score = True  # minimizes the relative error, not the squared error of R²
        return tags

    def _validated(
        self, X: Any, y: Any, sample_weight: ArrayLike | None, *, reset: bool
    ) -> tuple[Floats, Floats, Floats]:
        X, y = validate_data(self, X, y, reset=reset, y_numeric=True, dtype=np.float64)
        if np.any(X < 0):
            raise UsageError(
                "Negative values in data: features such as FLOPs, tensors and batch size are >= 0"
            )
        if np.any(y <= 0):
            raise UsageError("y must be > 0: a time or a speed of zero or less cannot be fitted")
        return X, y, _check_sample_weight(sample_weight, X, dtype=np.float64)

    def _features(self, X: Any) -> Floats:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        if np.any(X < 0):
            raise UsageError(
                "Negative values in data: features such as FLOPs, tensors and batch size are >= 0"
            )
        return np.asarray(X, dtype=np.float64)


class RelativeNNLS(PositiveRegressor):
    """y = a + sum_j c_j x_j with all coefficients >= 0, least squares on the relative error 1 - prediction/y.

    Lawson and Hanson's non-negative least squares on rows divided by y. A small ridge on every term's share of the
    prediction splits the shares evenly between terms that the data do not separate.

    Args:
        columns: which columns of X are terms, None for all.
        intercept: whether there is a constant term.
        ridge: strength of the prior, in rows: (relative noise / prior spread of a share)², default 0.1² / 1².
        forgetting: factor on the weight of earlier rows at every `partial_fit`.

    Attributes:
        coef_: (n_features,) coefficients, 0 for columns that are not terms.
        intercept_: the constant.

    """

    def __init__(
        self,
        columns: tuple[int, ...] | None = None,
        intercept: bool = True,
        ridge: float = 0.01,
        forgetting: float = 1.0,
    ) -> None:
        self.columns = columns
        self.intercept = intercept
        self.ridge = ridge
        self.forgetting = forgetting

    def fit_checked(self, X: Floats, y: Floats, weight: Floats) -> Self:
        """Fit to X (n, d), y (n,) and weights (n,)."""
        self._sums: tuple[Floats, Floats, float] | None = None
        return self._update(X, y, weight)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Add rows; the weight of older ones is multiplied by `forgetting`. O(d³), no rows are kept."""
        first = not hasattr(self, "_sums")
        if first:
            self._sums = None
        return self._update(*self._validated(X, y, sample_weight, reset=first))

    def _terms(self, X: Floats) -> Floats:
        chosen = X if self.columns is None else X[:, list(self.columns)]
        return np.column_stack([np.ones(len(X)), chosen]) if self.intercept else chosen

    def _update(self, X: Floats, y: Floats, weight: Floats) -> Self:
        A = self._terms(X) / y[:, None]
        gram, shares, total = (A * weight[:, None]).T @ A, weight @ A, float(weight.sum())
        if self._sums is not None:
            keep = self.forgetting
            gram, shares = gram + keep * self._sums[0], shares + keep * self._sums[1]
            total += keep * self._sums[2]
        self._sums = (gram, shares, total)
        if not total > 0:
            raise UsageError("every row has weight 0: give at least one row a positive weight")
        # In units of shares of the prediction all columns are near 1, whatever the units of X and y.
        scale = shares / total
        used = scale > 0
        coef = np.zeros(len(scale))
        if used.any():
            s = scale[used]
            G = gram[np.ix_(used, used)] / np.outer(s, s) + max(self.ridge, 1e-12) * np.eye(len(s))
            L = np.linalg.cholesky(G)
            # min c'Gc - 2 r'c over c >= 0, written as the least squares |L'c - L⁻¹r|².
            solution, _ = nnls(L.T, solve_triangular(L, shares[used] / s, lower=True))
            coef[used] = solution / s
        full = np.zeros(X.shape[1])
        terms = coef[1:] if self.intercept else coef
        full[list(range(X.shape[1]) if self.columns is None else self.columns)] = terms
        self.intercept_ = float(coef[0]) if self.intercept else 0.0
        self.coef_ = full
        self._floor = float(total / np.sum(weight / y) * 1e-6) if weight.any() else 1e-12
        return self

    def predict_checked(self, X: Floats) -> Floats:
        """Predict (n,) values > 0."""
        return np.asarray(np.maximum(X @ self.coef_ + self.intercept_, self._floor))


class PowerLaw(PositiveRegressor):
    """y = exp(w_0) * prod_j x_j^w_j, ridge regression of log y on log x.

    Zeros in X count as the smallest positive value of their column. Exponents are bounded by the ridge only, but a
    prediction is at most a factor of `reach` outside the fitted range of y.
    """

    def __init__(
        self, columns: tuple[int, ...] | None = None, ridge: float = 0.01, reach: float = 1e3
    ) -> None:
        self.columns = columns
        self.ridge = ridge
        self.reach = reach

    def fit_checked(self, X: Floats, y: Floats, weight: Floats) -> Self:
        """Fit to X (n, d), y (n,) and weights (n,)."""
        if not weight.sum() > 0:
            raise UsageError("every row has weight 0: give at least one row a positive weight")
        X, y, weight = X[weight > 0], y[weight > 0], weight[weight > 0]
        self._floors = np.array([x[x > 0].min() if np.any(x > 0) else 1.0 for x in X.T])
        Z = self._logs(X)
        self._centre = weight @ Z / weight.sum()
        level = float(weight @ np.log(y) / weight.sum())
        Z = Z - self._centre
        gram = (Z * weight[:, None]).T @ Z + self.ridge * np.eye(Z.shape[1])
        self.coef_ = np.linalg.solve(gram, Z.T @ (weight * (np.log(y) - level)))
        self.intercept_ = level
        self._range = (np.log(y.min() / self.reach), np.log(y.max() * self.reach))
        return self

    def _logs(self, X: Floats) -> Floats:
        Z = np.log(np.maximum(X, self._floors))
        return np.asarray(Z if self.columns is None else Z[:, list(self.columns)])

    def predict_checked(self, X: Floats) -> Floats:
        """Predict (n,) values > 0."""
        Z = self._logs(X) - self._centre
        return np.asarray(np.exp(np.clip(Z @ self.coef_ + self.intercept_, *self._range)))
