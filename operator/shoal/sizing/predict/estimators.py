"""A time that is a sum of parts, t = a + sum_j c_j x_j with all parts positive: a scikit-learn estimator.

It is learned in logarithms, around a prior that knows orders of magnitude only: the time to save a snapshot, by its
size and its number of tensors.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from shoal.errors import UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.speed.posterior import Posterior, width_factor

__all__ = ["AdditiveRegressor"]


PRIOR_SIGMA = 2.0


class AdditiveRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """y = a + sum_j c_j x_j with all terms positive: a MAP fit of the relative error.

    Args:
        noise: standard deviation of the logarithm of y, of a group.
        centres: (n_features + 1,) prior medians of a and the c_j. None: every term is about equally large.
        spreads: (n_features + 1,) standard deviations of their logarithms. None: 2, give or take a factor of seven.

    Attributes:
        intercept_: a.
        coef_: (n_features,) the c_j.

    """

    def __init__(
        self, noise: float = 0.1, centres: ArrayLike | None = None, spreads: ArrayLike | None = None
    ) -> None:
        self.noise = noise
        self.centres = centres
        self.spreads = spreads

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Fit to X (n, d) >= 0 and y (n,) > 0. Rows of one of the `groups` (n,) count as repeats of one."""
        if not 0 < self.noise < np.inf:
            raise UsageError(f"noise must be above 0, and finite, not {self.noise}")
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        X, y = np.asarray(X), np.asarray(y, dtype=np.float64)
        _not_negative(X)
        if np.any(y <= 0):
            raise UsageError("y must be > 0: a time of zero or less cannot be fitted")
        groups = np.arange(len(y)) if groups is None else np.asarray(groups)
        check_consistent_length(X, groups)
        terms = X.shape[1] + 1
        centres = _equal_terms(X, y) if self.centres is None else _positive("centres", self.centres, terms)
        spreads = (
            np.full(terms, PRIOR_SIGMA) if self.spreads is None else _positive("spreads", self.spreads, terms)
        )
        # Repeats of one group share its deviation; a little is their own.
        same, own = np.equal.outer(groups, groups), np.eye(len(X))
        kernel = self.noise**2 * (0.8 * same + 0.2 * own) + 1e-10 * own
        self._posterior = Posterior(
            lambda theta: _form(X, theta), np.log(y), kernel, np.log(centres), spreads
        )
        names = [str(group) for group in groups]
        errors, sigmas = self._posterior.held_out(names)
        self._factor = width_factor(errors / sigmas, names)
        coefficients = np.exp(self._posterior.theta)
        self.intercept_, self.coef_ = float(coefficients[0]), coefficients[1:]
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False, elsewhere: float = 0.0
    ) -> Floats | tuple[Floats, Floats]:
        """Predict (n,) values > 0; with `return_std` also the standard deviations (n,) of their logarithms.

        `elsewhere` is the standard deviation of what another day or place changes for all of them.
        """
        check_is_fitted(self)
        checked = np.asarray(validate_data(self, X, reset=False, dtype=np.float64))
        _not_negative(checked)
        mean, jacobian = _form(checked, self._posterior.theta)
        nothing = np.zeros((len(self._posterior.data), len(checked)))
        mean, variance, form = self._posterior.predict(
            mean, jacobian, nothing, np.full(len(checked), self.noise**2)
        )
        sigma = np.sqrt(self._factor**2 * variance + form + elsewhere**2)
        return (np.exp(mean), sigma) if return_std else np.exp(mean)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        tags.regressor_tags.poor_score = True  # it minimizes the relative error, not the squared error of R²
        return tags


def _form(x: Floats, theta: Floats) -> tuple[Floats, Floats]:
    """(n,) the logarithm of the sum, and its derivatives (n, d + 1)."""
    parts = np.column_stack([np.full(len(x), theta[0]), theta[1:] + np.log(np.maximum(x, 1e-300))])
    top = parts.max(axis=1, keepdims=True)
    whole = top + np.log(np.exp(parts - top).sum(axis=1, keepdims=True))
    return whole[:, 0], np.exp(parts - whole)


def _equal_terms(X: Floats, y: Floats) -> Floats:
    """(d + 1,) medians with which every term has the same part of y."""
    typical = np.array([np.median(x[x > 0]) if np.any(x > 0) else 1.0 for x in X.T])
    share = float(np.median(y)) / (X.shape[1] + 1)
    return np.concatenate([[share], share / typical])


def _positive(name: str, values: ArrayLike, size: int) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if found.shape != (size,) or not np.all(np.isfinite(found) & (found > 0)):
        raise UsageError(f"{name} must be {size} numbers above 0, not {values!r}")
    return found


def _not_negative(X: Floats) -> None:
    if np.any(X < 0):
        raise UsageError("Negative values in data: terms of a time are >= 0")
