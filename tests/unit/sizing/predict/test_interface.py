"""The classes for tables are scikit-learn's estimators: parameters, clones, fitted attributes, checks in `fit`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.accelerators import catalogue
from shoal.sizing.predict.cluster_speed import ClusterSpeed
from shoal.sizing.predict.durations import SnapshotTime
from shoal.sizing.predict.estimators import AdditiveRegressor
from shoal.sizing.predict.worker_speed import WorkerSpeed

ESTIMATORS = [WorkerSpeed, ClusterSpeed, SnapshotTime]
ROWS = pd.DataFrame(
    {
        "model": ["a", "b", "c"],
        "accelerator": ["T4", "T4", "P100"],
        "flops": [1e9, 2e9, 3e9],
        "params": [1e6, 2e6, 3e6],
        "num_tensors": [10, 20, 30],
        "num_workers": [1, 2, 4],
        "num_ps": [1, 1, 1],
        "measured": [5.0, 6.0, 9.0],
    },
    index=[7, 8, 9],
)


@pytest.mark.parametrize("of", ESTIMATORS)
def test_parameters_are_read_set_and_cloned(of: Any) -> None:
    made = of(elsewhere=True)
    assert made.get_params()["elsewhere"] is True
    assert clone(made).get_params() == made.get_params()
    assert made.set_params(elsewhere=False).elsewhere is False
    assert repr(of(elsewhere=True)) == f"{of.__name__}(elsewhere=True)"
    if "catalogue" in made.get_params():
        sheets = catalogue()
        assert of(catalogue=sheets).catalogue is sheets


@pytest.mark.parametrize("of", ESTIMATORS)
def test_what_is_learned_comes_with_fit_and_predict_changes_nothing(of: Any) -> None:
    made = of()
    with pytest.raises(NotFittedError):
        check_is_fitted(made)
    with pytest.raises(NotEnoughData, match="call fit first"):
        made.predict(ROWS)
    assert made.fit(ROWS) is made
    check_is_fitted(made)
    before = {name: repr(value) for name, value in vars(made).items()}
    new = ROWS.assign(accelerator="A100-40GB")
    first, again = made.predict(new), made.predict(new)
    assert np.array_equal(first, again)
    assert {name: repr(value) for name, value in vars(made).items()} == before


@pytest.mark.parametrize("of", ESTIMATORS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_what_cannot_have_been_measured_is_refused_by_fit(of: Any, value: float) -> None:
    """NaN gave predictions of NaN without a word, and 0 an error of linear algebra."""
    rows = ROWS.copy()
    rows.loc[8, "measured"] = value
    with pytest.raises(UsageError, match=f"row 8: measured must be a number above 0, not {value:g}"):
        of().fit(rows)


def test_an_accelerator_that_was_never_measured_is_noted_for_the_rows_that_have_it() -> None:
    speed = WorkerSpeed().fit(ROWS)
    assert speed.notes_on(ROWS) == speed.notes_
    (more,) = speed.notes_on(ROWS.assign(accelerator="A100-40GB"))[len(speed.notes_) :]
    assert more.startswith("A100-40GB was never measured: its speed is carried over from P100, T4")


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf])
def test_noise_without_a_size_is_refused(noise: float) -> None:
    with pytest.raises(UsageError, match="noise must be above 0"):
        AdditiveRegressor(noise=noise).fit([[1.0], [2.0]], [1.0, 2.0])
