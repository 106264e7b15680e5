"""The regressors that CM-DARE published, for comparison, fitted and tested in the same way as ours.

Li, Walls, Guo: "Characterizing and Modeling Distributed Training with Transient Cloud GPU Servers", ICDCS 2020, with
the features and hyperparameters of the authors' notebooks: step time by FLOPs (C_m) and by the accelerator's TFLOPS
(C_gpu), checkpoint time by size, cluster speed as the sum of its workers. They give no intervals.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import nnls
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern, WhiteKernel
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import SVR

from shoal.sizing.accelerators import Catalogue

__all__ = [
    "Published",
    "SumOfWorkers",
    "by_sheet",
    "checkpoint_regressors",
    "cluster_regressors",
    "same_feature_regressors",
    "worker_regressors",
]

Floats = NDArray[np.float64]


@dataclass
class Published:
    """A published regression of a time, per accelerator or for all; predicts in the unit of `measured`."""

    regression: Any
    features: Callable[[pd.DataFrame], Floats]
    per_accelerator: bool
    of_speed: bool  # `measured` is a speed, but the regression is of time

    def fit(self, rows: pd.DataFrame) -> Published:
        """Fit to the rows of `tables.load`."""
        y = rows["measured"].to_numpy(float)
        times = 1 / y if self.of_speed else y
        self._least = 0.01 * float(times.min())
        with warnings.catch_warnings():
            # Sixteen models leave some length scales of the Gaussian process at their bounds.
            warnings.simplefilter("ignore", ConvergenceWarning)
            self._fits = {
                name: clone(self.regression).fit(self.features(rows[at]), times[at])
                for name, at in self._parts(rows).items()
            }
        return self

    def notes_on(self, _rows: pd.DataFrame, /) -> list[str]:
        """None."""
        return []

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Give (n, 3); low and high are nan.

        These regressions can predict a negative time: predictions below 1 % of the shortest fitted time count as that
        1 %, which is still a far too high speed. The report says so.
        """
        times = np.empty(len(rows))
        for name, at in self._parts(rows).items():
            times[at] = np.maximum(self._fits[name].predict(self.features(rows[at])), self._least)
        mean = 1 / times if self.of_speed else times
        return np.column_stack([np.full(len(rows), np.nan), mean, np.full(len(rows), np.nan)])

    def _parts(self, rows: pd.DataFrame) -> dict[str, NDArray[np.bool_]]:
        if not self.per_accelerator:
            return {"": np.ones(len(rows), dtype=bool)}
        names = rows["accelerator"].to_numpy()
        return {str(name): names == name for name in sorted(set(names))}


def worker_regressors(catalogue: Catalogue) -> dict[str, Published]:
    """The five regressors of a worker's step time in the paper."""

    def work(rows: pd.DataFrame) -> Floats:
        return np.asarray(rows[["flops"]].to_numpy(float) / 1e9)

    def peak(rows: pd.DataFrame) -> Floats:
        return np.array([[catalogue.find(name).fp32_tflops] for name in rows["accelerator"]])

    def normalised(rows: pd.DataFrame) -> Floats:
        return np.asarray(work(rows) / peak(rows))

    def both(rows: pd.DataFrame) -> Floats:
        return np.column_stack([work(rows), peak(rows)])

    polynomial = _svr(kernel="poly", degree=2, coef0=1.0)
    radial = _svr(kernel="rbf")
    return {
        "linear, C_m / C_gpu, all accelerators": Published(LinearRegression(), normalised, False, True),
        "linear, C_m and C_gpu, all accelerators": Published(LinearRegression(), both, False, True),
        "linear, C_m, per accelerator": Published(LinearRegression(), work, True, True),
        "SVR polynomial, C_m, per accelerator": Published(polynomial, work, True, True),
        "SVR RBF, C_m, per accelerator": Published(radial, work, True, True),
    }


class RelativeNNLS(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """t = a + b x_1 + c x_2 with coefficients >= 0, least squares of the relative error."""

    def fit(self, X: Floats, y: Floats) -> RelativeNNLS:
        """Fit to (n, d) and (n,)."""
        self.coef_, _ = nnls(np.column_stack([np.ones(len(X)), X]) / y[:, None], np.ones(len(y)))
        return self

    def predict(self, X: Floats) -> Floats:
        """Predict (n,)."""
        return np.asarray(np.column_stack([np.ones(len(X)), X]) @ self.coef_)


def same_feature_regressors() -> dict[str, Published]:
    """Regressions that get what ours gets: FLOPs, tensors and parameters, for each accelerator."""

    def plain(rows: pd.DataFrame) -> Floats:
        return np.column_stack([rows["flops"].to_numpy(float) / 1e9, rows["num_tensors"].to_numpy(float)])

    def logs(rows: pd.DataFrame) -> Floats:
        return np.asarray(np.log(rows[["flops", "num_tensors", "params"]].to_numpy(float)))

    def of_log(regression: Any) -> Any:
        return TransformedTargetRegressor(
            make_pipeline(StandardScaler(), regression), func=np.log, inverse_func=np.exp
        )

    kernel = (
        ConstantKernel() * Matern([1.0] * 3, (0.1, 100), nu=2.5)
        + DotProduct()
        + WhiteKernel(1e-3, (1e-5, 1e-1))
    )
    gauss = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    boosting = GradientBoostingRegressor(n_estimators=300, max_depth=2, learning_rate=0.05, random_state=0)
    return {
        "the form alone: a + b FLOPs + c tensors, NNLS": Published(RelativeNNLS(), plain, True, True),
        "ridge of logarithms, same features": Published(of_log(Ridge(0.1)), logs, True, True),
        "Gaussian process of logarithms, same features": Published(of_log(gauss), logs, True, True),
        "gradient boosting of logarithms, same features": Published(of_log(boosting), logs, True, True),
    }


@dataclass
class SumOfWorkers:
    """CM-DARE's speed of a cluster: the sum of its workers, each as it was measured alone, however many there are."""

    workers: pd.DataFrame

    def fit(self, _rows: pd.DataFrame) -> SumOfWorkers:
        """Nothing is fitted."""
        return self

    def notes_on(self, _rows: pd.DataFrame, /) -> list[str]:
        """None."""
        return []

    def predict(self, rows: pd.DataFrame) -> Floats:
        """Give (n, 3); low and high are nan."""
        keys = ["model", "accelerator"]
        alone = self.workers.groupby(keys)["measured"].median()
        speed = (
            alone.loc[[tuple(row) for row in rows[keys].to_numpy()]].to_numpy()
            * rows["num_workers"].to_numpy()
        )
        return np.column_stack([np.full(len(rows), np.nan), speed, np.full(len(rows), np.nan)])


def cluster_regressors(workers: pd.DataFrame) -> dict[str, SumOfWorkers | Published]:
    """The sum of the workers, and a ridge regression that gets what ours gets: workers, servers, and the model."""

    def logs(rows: pd.DataFrame) -> Floats:
        names = ["num_workers", "num_ps", "flops", "num_tensors", "params"]
        return np.asarray(np.log(rows[names].to_numpy(float)))

    ridge = TransformedTargetRegressor(
        make_pipeline(StandardScaler(), Ridge(0.1)), func=np.log, inverse_func=np.exp
    )
    return {"sum of workers": SumOfWorkers(workers), "ridge": Published(ridge, logs, True, True)}


def by_sheet(known: pd.DataFrame, rows: pd.DataFrame, catalogue: Catalogue, peak: str) -> Floats:
    """(n,) speeds of models on another accelerator: as measured on the known ones, by the ratio of a sheet's peak."""

    def peaks(found: pd.DataFrame) -> Floats:
        return np.array([float(getattr(catalogue.find(name), peak)) for name in found["accelerator"]])

    each = known.assign(of_peak=known["measured"] / peaks(known)).groupby("model")["of_peak"].mean()
    return np.asarray(each.loc[rows["model"]].to_numpy() * peaks(rows))


def _svr(**options: Any) -> Any:
    """Support vector regression of a step time: C and epsilon by cross-validation, at the ends of their grid."""
    grid = {"svr__C": [10, 100], "svr__epsilon": [0.01, 0.1]}
    pipeline = make_pipeline(MinMaxScaler(), SVR(gamma="auto", **options))
    return GridSearchCV(pipeline, grid, cv=5, scoring="neg_mean_absolute_error")


def checkpoint_regressors() -> dict[str, Published]:
    """The two regressors of a checkpoint's time by its size (or the parameters, where no size is known).

    C and epsilon are the values that the authors found.
    """

    def size(rows: pd.DataFrame) -> Floats:
        return np.asarray(rows[["ckpt_mb" if "ckpt_mb" in rows else "params"]].to_numpy(float))

    radial = make_pipeline(MinMaxScaler(), SVR(kernel="rbf", C=10, epsilon=0.14, gamma="auto"))
    return {
        "linear, size": Published(LinearRegression(), size, False, False),
        "SVR RBF, size": Published(radial, size, False, False),
    }
