"""scikit-learn's checks, and signs, units and groups."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.estimator_checks import parametrize_with_checks

from shoal.errors import UsageError
from shoal.sizing.predict.estimators import AdditiveRegressor


@pytest.mark.by_day(18)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([AdditiveRegressor()])
def test_estimators_pass_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_fit_recovers_coefficients() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(0.1, 10, (200, 3))
    fit = AdditiveRegressor(noise=0.01).fit(X, 0.5 + 2 * X[:, 0] + 0.1 * X[:, 1])
    assert fit.coef_ == pytest.approx([2, 0.1, 0], abs=0.03)
    assert fit.intercept_ == pytest.approx(0.5, abs=0.05)
    assert (AdditiveRegressor().fit(X, 20 - X[:, 0]).coef_ >= 0).all()


@pytest.mark.nightly
@settings(max_examples=40, deadline=None)
@given(st.floats(1e-9, 1e12), st.floats(1e-6, 1e6))
def test_fit_is_independent_of_units(of_x: float, of_y: float) -> None:
    rng = np.random.default_rng(1)
    X, noise = rng.uniform(1, 10, (30, 2)), np.exp(rng.normal(0, 0.1, 30))
    y = (1 + X[:, 0] + 3 * X[:, 1]) * noise
    plain, scaled = AdditiveRegressor().fit(X, y), AdditiveRegressor().fit(X * of_x, y * of_y)
    assert scaled.predict(X * of_x) == pytest.approx(plain.predict(X) * of_y, rel=1e-4)


def test_interval_widens_outside_the_measured_range() -> None:
    X = np.linspace(1, 3, 12)[:, None]
    fit = AdditiveRegressor(noise=0.05).fit(X, 1 + X[:, 0])
    _, sigma = fit.predict(np.array([[2.0], [2000.0]]), return_std=True)
    assert sigma[1] > 1.5 * sigma[0]


def test_invalid_numbers_raise_error() -> None:
    X = np.ones((4, 1))
    with pytest.raises(UsageError, match="Negative values"):
        AdditiveRegressor().fit(-X, np.ones(4))
    with pytest.raises(UsageError, match="y must be > 0"):
        AdditiveRegressor().fit(X, np.zeros(4))
    with pytest.raises(UsageError, match="noise must be above 0"):
        AdditiveRegressor(noise=0).fit(X, np.ones(4))


@pytest.mark.parametrize(
    ("parameters", "groups", "words"),
    [
        ({"spreads": [1.0, 0.0]}, None, "spreads must be 2 numbers above 0"),
        ({"centres": [1.0]}, None, "centres must be 2 numbers above 0"),
        ({"centres": [1.0, -1.0]}, None, "centres must be 2 numbers above 0"),
        ({}, ["a", "b"], "inconsistent numbers of samples"),
    ],
)
def test_priors_and_groups_must_fit_the_data(
    parameters: dict[str, Any], groups: list[str] | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        AdditiveRegressor(**parameters).fit([[1.0], [2.0], [3.0]], [1.0, 2.0, 3.0], groups)
