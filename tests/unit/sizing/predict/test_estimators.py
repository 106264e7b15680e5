"""scikit-learn's checks, and signs, units and forgetting."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.estimator_checks import parametrize_with_checks

from shoal.errors import UsageError
from shoal.sizing.predict.conformal import (
    GroupConformalRegressor,
    group_quantile,
    group_weights,
    least_spread,
    little_data_factor,
)
from shoal.sizing.predict.estimators import PowerLaw, RelativeNNLS


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [RelativeNNLS(), RelativeNNLS(intercept=False), PowerLaw(), GroupConformalRegressor(folds=5)]
)
def test_estimators_pass_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_fit_recovers_non_negative_coefficients() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(0.1, 10, (200, 3))
    fit = RelativeNNLS(ridge=1e-9).fit(X, 0.5 + 2 * X[:, 0] + 0.1 * X[:, 1])
    assert fit.coef_ == pytest.approx([2, 0.1, 0], abs=1e-3)
    assert fit.intercept_ == pytest.approx(0.5, abs=1e-2)
    assert (RelativeNNLS().fit(X, 20 - X[:, 0]).coef_ >= 0).all()


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-9, 1e12), st.floats(1e-6, 1e6))
def test_fit_is_independent_of_units(of_x: float, of_y: float) -> None:
    rng = np.random.default_rng(1)
    X, noise = rng.uniform(1, 10, (30, 2)), np.exp(rng.normal(0, 0.1, 30))
    y = (1 + X[:, 0] + 3 * X[:, 1]) * noise
    plain, scaled = RelativeNNLS().fit(X, y), RelativeNNLS().fit(X * of_x, y * of_y)
    assert scaled.predict(X * of_x) == pytest.approx(plain.predict(X) * of_y, rel=1e-6)


def test_partial_fit_equals_fit_and_forgets_old_rows() -> None:
    rng = np.random.default_rng(2)
    X = rng.uniform(1, 10, (40, 2))
    y = 1 + X @ [2.0, 3.0]
    parts = RelativeNNLS()
    for rows in (slice(0, 7), slice(7, 40)):
        parts.partial_fit(X[rows], y[rows])
    assert parts.predict(X) == pytest.approx(RelativeNNLS().fit(X, y).predict(X), rel=1e-9)
    forgetful = RelativeNNLS(forgetting=0.5).partial_fit(X, y)
    for _ in range(12):
        forgetful.partial_fit(X, 2 * y)
    assert forgetful.predict(X) == pytest.approx(2 * y, rel=0.02)


def test_fit_recovers_power_law() -> None:
    X = np.random.default_rng(3).uniform(1, 100, (80, 2))
    y = 3 * X[:, 0] ** 0.7 * X[:, 1] ** -0.2
    assert PowerLaw(ridge=1e-9).fit(X, y).predict(X) == pytest.approx(y, rel=1e-6)


def test_zero_targets_raise_error() -> None:
    with pytest.raises(UsageError, match="y must be > 0"):
        RelativeNNLS().fit([[1.0], [2.0]], [0.0, 1.0])


def test_folds_keep_groups_together() -> None:
    rng = np.random.default_rng(4)
    groups = np.repeat(np.arange(30), 5)
    fit = GroupConformalRegressor(folds=7).fit(
        rng.uniform(1, 2, (150, 2)), rng.uniform(1, 2, 150), groups=groups
    )
    assert all(len(set(fit.fold_[groups == g])) == 1 for g in range(30))


def test_simplest_good_candidate_is_chosen() -> None:
    rng = np.random.default_rng(5)
    X = rng.uniform(1, 10, (60, 2))
    candidates = [RelativeNNLS(columns=(0,)), RelativeNNLS(columns=(0, 1)), PowerLaw()]
    noise = np.exp(rng.normal(0, 0.05, 60))
    assert GroupConformalRegressor(candidates).fit(X, (1 + X[:, 0]) * noise).best_ == 0
    assert GroupConformalRegressor(candidates).fit(X, (X[:, 0] + 2 * X[:, 1]) * noise).best_ == 1
    assert GroupConformalRegressor(candidates).fit(X, X[:, 0] ** 0.3 * X[:, 1] ** -1.5 * noise).best_ == 2


def test_interval_covers_groups_with_random_deviation() -> None:
    rng = np.random.default_rng(6)
    groups = np.repeat(np.arange(400), 4)
    X = rng.uniform(1, 10, (1600, 2))
    own = rng.normal(0, 0.1, 400)[groups]
    y = (1 + X[:, 0] + 3 * X[:, 1]) * np.exp(own + rng.normal(0, 0.03, 1600))
    train = groups < 200
    fit = GroupConformalRegressor().fit(X[train], y[train], groups=groups[train])
    low, _, high = fit.predict_interval(X[~train]).T
    assert np.mean((low <= y[~train]) & (y[~train] <= high)) == pytest.approx(0.9, abs=0.03)


def test_group_with_many_rows_counts_once() -> None:
    rng = np.random.default_rng(7)
    groups = np.concatenate([np.zeros(400, dtype=int), np.arange(1, 25)])
    X = rng.uniform(1, 10, (424, 1))
    own = np.where(groups == 0, 0.0, rng.choice([-0.2, 0.2], 25)[groups])
    y = (1 + X[:, 0]) * np.exp(own + rng.normal(0, 0.01, 424))
    fit = GroupConformalRegressor().fit(X, y, groups=groups, sample_weight=1 / np.bincount(groups)[groups])
    low, mean, high = fit.predict_interval(np.array([[4.0]])).T
    # Every other model is off by a fifth: the one with 400 rows does not help to predict the next.
    assert np.log(mean / low)[0] > 0.15
    assert np.log(high / mean)[0] > 0.15
    assert least_spread(fit.residuals_, 25, weight=fit.group_weight_) > 1.5 * least_spread(fit.residuals_, 25)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12), st.floats(0.05, 0.99), st.data())
def test_duplicated_row_with_half_weight_keeps_quantiles(
    values: list[float], p: float, data: st.DataObject
) -> None:
    once = np.array(values)
    times = np.array(data.draw(st.lists(st.integers(1, 4), min_size=len(once), max_size=len(once))))
    weight = np.repeat(1 / times, times)
    many = group_quantile(np.repeat(once, times), p, len(once), weight)
    plain = group_quantile(once, p, len(once))
    # Between the neighboring values: two rows of one group are not interpolated.
    ordered = np.sort(once)
    at = np.searchsorted(ordered, plain - 1e-9)
    assert ordered[max(at - 1, 0)] - 1e-6 <= many <= ordered[min(at + 1, len(once) - 1)] + 1e-6


def test_weights_sum_to_one_in_every_group() -> None:
    names = np.array(["a", "a", "a", "b", "c", "c"])
    assert group_weights(names) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1, 1 / 2, 1 / 2])
    old = group_weights(names, np.array([2.0, 1.0, 1.0, 0.1, 0.0, 0.0]))
    assert old == pytest.approx([1 / 2, 1 / 4, 1 / 4, 1, 1 / 2, 1 / 2])


def test_few_groups_widen_the_interval() -> None:
    assert little_data_factor(2) > little_data_factor(4) > little_data_factor(9) > 1 == little_data_factor(10)
    assert group_quantile(np.arange(1.0, 20.0), 0.9, 19) == pytest.approx(18.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10_000))
def test_predictions_for_any_data_are_positive_and_ordered(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    X, y = 10 ** rng.uniform(-6, 12, (n, 2)), 10 ** rng.uniform(-6, 6, n)
    fit = GroupConformalRegressor([RelativeNNLS(), PowerLaw()]).fit(X, y)
    found = fit.predict_interval(10 ** rng.uniform(-6, 12, (20, 2)))
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert (np.diff(found, axis=1) >= 0).all()
